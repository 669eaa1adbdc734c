"""Ranks counted from blocks of similarities that are computed when they are read, against those of the whole matrix."""

import pytest
import torch
from small_store import make_store

from xret.heads.evaluation import pairs, scoring
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.metrics import block_ranks, ranks
from xret.heads.evaluation.pairs import Pairs, Part
from xret.heads.evaluation.scoring import compare, representatives
from xret.pipeline.errors import RunError
from xret.similarities import Cosine


class Head:
    """A model of embeddings that are there already."""

    def __init__(self, damaged=False):
        self.damaged = damaged

    def similarity(self, images, captions):
        found = Cosine()(images, captions)
        return found * torch.nan if self.damaged else found


@pytest.fixture
def in_blocks(monkeypatch):
    monkeypatch.setattr(scoring, "WHOLE", 0)
    monkeypatch.setattr(pairs, "block_side", lambda *_: 5)


@pytest.mark.parametrize("ties", ["pessimistic", "mean"])
def test_tables_are_those_of_the_matrix(request, setdiv, vsepp, tmp_path, ties):
    views = make_store(tmp_path / "views.zarr", text="tokens", space="one", views=2)
    cases = [
        ([setdiv], {}),
        ([vsepp, setdiv], {}),
        ([vsepp, setdiv], {"hubness": True}),
        ([views], {"views": True, "hubness": True}),
    ]
    expected = [evaluate(runs, device="cpu", ties=ties, **options) for runs, options in cases]
    request.getfixturevalue("in_blocks")
    for (runs, options), one in zip(cases, expected, strict=True):
        found = evaluate(runs, device="cpu", ties=ties, **options)
        for part in ("image_to_text", "text_to_image"):
            assert getattr(found.results[0], part) == pytest.approx(getattr(one.results[0], part))
        if one.hubness is not None:
            assert found.hubness.val_rsum == pytest.approx(one.hubness.val_rsum)
            assert [each.rsum for each in found.hubness.results] == [
                pytest.approx(each.rsum) for each in one.hubness.results
            ]
            assert "skewness" not in str(found)


def random_pairs(seed, captions=61, images=23, **head):
    draw = torch.Generator().manual_seed(seed)
    texts = [str(number % 40) for number in range(captions)]
    spoken = torch.randn(40, 6, generator=draw)[torch.arange(captions) % 40]
    owner = torch.arange(captions) * images // captions
    seen, head = torch.randn(images, 6, generator=draw), Head(**head)
    part = Part(head, (seen,), spoken)
    return Pairs((part,), owner, representatives(spoken, texts)), compare(Head(), seen, spoken, texts)


@pytest.mark.parametrize("step", [1, 7, 100])
def test_ties_of_equal_captions_stay_exact(monkeypatch, step):
    monkeypatch.setattr(pairs, "block_side", lambda *_: step)
    found, matrix = random_pairs(0)
    for ours, theirs in zip(
        block_ranks(found.blocks, 23, found.caption_image), ranks(matrix, found.caption_image), strict=True
    ):
        assert [one.tolist() for one in ours] == [one.tolist() for one in theirs]
    assert sum(block.numel() for _, _, block in found.blocks()) == matrix.numel()
    assert found.deviation() == pytest.approx(matrix.double().std(correction=0).item())


def test_another_order_joins_by_place(monkeypatch):
    monkeypatch.setattr(pairs, "block_side", lambda *_: 7)
    (one, first), (two, second) = random_pairs(0), random_pairs(1)
    rows, columns = torch.randperm(23).tolist(), torch.randperm(61).tolist()
    both = one.joined(two, rows, columns)
    matrix = torch.empty_like(first)
    for some, captions, block in both.blocks():
        matrix[some, captions] = block
    torch.testing.assert_close(matrix, (first + second[rows][:, columns]) / 2)


def test_damaged_weights_are_a_sentence():
    found, _ = random_pairs(0, damaged=True)
    with pytest.raises(RunError, match="not finite"):
        block_ranks(found.blocks, 23, found.caption_image)
