"""What a report reads of a run: its name among others, and the elements of its embeddings."""

import torch
from torch.nn import functional

from xret.heads.modules.embedding import Gaussian, Sequence
from xret.heads.report.views import elements, names


def test_elements_of_every_kind_are_unit_rows():
    torch.manual_seed(0)
    rows = torch.randn(2, 3, 4)
    sequence = Sequence(rows, torch.tensor([1, 3]))
    kinds = {1: [rows[:, 0], Gaussian(rows[:, 0], rows[:, 1]), sequence], 3: [rows]}
    for count, embeddings in kinds.items():
        for embedding in embeddings:
            made = elements(embedding)
            assert made.shape == (2, count, 4)
            torch.testing.assert_close(made.norm(dim=2), torch.ones(2, count))
    torch.testing.assert_close(elements(sequence)[0, 0], functional.normalize(rows[0, 0], dim=0))
    torch.testing.assert_close(elements(Gaussian(rows[:, 0], rows[:, 1])), elements(rows[:, 0]))


def test_runs_are_told_apart(tmp_path):
    a, b, c = tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "z"
    assert names([a]) == ["run"]
    assert names([a, b, c]) == ["x/run", "y/run", f"{tmp_path.name}/z"]
    assert names([c, c]) == ["z (1)", "z (2)"]
