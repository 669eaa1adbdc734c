"""Galleries and examples: what is shown is what the run ranks."""

import numpy as np
import pytest
import torch
from scores import score
from torch.nn import functional

from xret.heads.report.figures import number
from xret.heads.report.sections.examples import by_element, drawn, example, gallery, nearest

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_gallery_is_the_head_of_the_ranking(view, run, no_pictures):
    scores = score(run("setdiv"), device="cpu")
    for direction, matrix in (("image_to_text", scores.similarity), ("text_to_image", scores.similarity.T)):
        examples = gallery(view, no_pictures, direction, 6, 5, 3)
        assert len(examples) == 6
        for shown in examples:
            if direction == "image_to_text":
                query = scores.ids.index(shown.query.name)
                best = [(scores.texts[row], scores.caption_image[row] == query) for row in _ranked(matrix[query])]
                assert [(item.text, item.right) for item in shown.found] == best
            else:
                asking = [row for row, text in enumerate(scores.texts) if text == shown.query.text]
                found = [
                    [(scores.ids[i], scores.caption_image[row] == i) for i in _ranked(matrix[row])] for row in asking
                ]
                assert [(item.name, item.right) for item in shown.found] in found


def test_a_failure_shows_the_right_answer_its_rank_and_its_score(view, no_pictures):
    failed = 0
    for direction, way in view.ways.items():
        for query in way.queries.tolist():
            scores = way.similarity[query].tolist()
            ranking = sorted(range(len(scores)), key=lambda item: (-scores[item], item))
            own = [item for item in ranking if way.item_image[item] == way.query_image[query]]
            rank = 1 + ranking.index(own[0])
            assert way.right(query) == (own[0], rank)
            one = example(view, no_pictures, direction, query, ranking[:1])
            assert one.found[0].note == number(scores[ranking[0]])
            failed += rank > 1
            if rank == 1:
                assert one.missed is None
                continue
            said = view.scores.texts[own[0]] if direction == "image_to_text" else view.scores.ids[own[0]]
            assert (one.missed.text if direction == "image_to_text" else one.missed.name) == said
            assert (one.missed.right, one.missed.note) == (True, f"rank {rank}: {number(scores[own[0]])}")
            assert example(view, no_pictures, direction, query, ranking[:rank]).missed is None  # it is there already
    assert failed > 5


def _ranked(scores):
    return sorted(range(len(scores)), key=lambda place: (-scores[place].item(), place))[:5]


def test_each_element_finds_what_is_nearest_to_it():
    torch.manual_seed(0)
    queries, items = (functional.normalize(torch.randn(n, k, 6), dim=-1) for n, k in ((3, 4), (7, 2)))
    for query, found in zip(queries, nearest(queries, items).tolist(), strict=True):
        for element, item in zip(query, found, strict=True):
            by_item = [max((element @ other).item() for other in own) for own in items]
            assert item == by_item.index(max(by_item))
    assert nearest(queries[:0], items).shape == (0, 4)


def test_successes_succeed_and_failures_fail(view, no_pictures):
    for direction in ("image_to_text", "text_to_image"):
        cases = by_element(view, no_pictures, direction, 3, 0)
        assert cases["failures"]
        for name, right in (("successes", True), ("failures", False)):
            for shown in cases[name]:
                assert [item.note.split(":")[0] for item in shown.found] == [f"element {k}" for k in (1, 2, 3, 4)]
                assert (shown.missed is None) is right
                if direction == "image_to_text":
                    row = view.scores.ids.index(shown.query.name)
                    assert bool(view.ways[direction].hits[row]) is right
                    own = {view.scores.texts[c] for c in np.flatnonzero(view.scores.caption_image == row)}
                    assert all(item.text in own for item in shown.found if item.right)
                else:
                    asked = [c for c, text in enumerate(view.scores.texts) if text == shown.query.text]
                    assert any(bool(view.ways[direction].hits[c]) is right for c in asked)


def test_drawn_with_a_seed():
    rows = np.arange(10, 20)
    assert drawn(rows, 30, 0) == rows.tolist()
    assert drawn(rows, 3, 0) == drawn(rows, 3, 0) == sorted(drawn(rows, 3, 0))
    assert drawn(rows[:0], 3, 0) == []
    assert len({tuple(drawn(rows, 3, seed)) for seed in range(9)}) > 3
