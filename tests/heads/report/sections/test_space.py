"""The map of embeddings: neighbours stay neighbours, and marks say what they are."""

import numpy as np
import pytest

from xret.heads.report.sections.space import element_map, tsne
from xret.heads.report.views import open_views

pytestmark = pytest.mark.usefixtures("one_thread")


def test_groups_stay_groups_on_the_map():
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(size=(30, 8)) * 0.05 + centre for centre in np.eye(8)[:2] * 5])
    placed = tsne(rows, 0)
    assert placed.shape == (60, 2)
    np.testing.assert_array_equal(placed, tsne(rows, 0))
    one, other = placed[:30], placed[30:]
    between = np.linalg.norm(one.mean(0) - other.mean(0))
    assert between > 2 * max(np.linalg.norm(group - group.mean(0), axis=1).mean() for group in (one, other))
    np.testing.assert_array_equal(tsne(np.ones((5, 3)), 0), np.zeros((5, 2)))
    np.testing.assert_array_equal(tsne(np.ones((1, 3)), 0), np.zeros((1, 2)))


def test_marks_of_a_map_are_few_and_say_what_they_are(view, run):
    found = element_map(view, 0)
    assert [name for name, _ in found.legend] == ["image", "caption", "slot 1", "slot 2", "slot 3", "slot 4"]
    assert len(found.samples) == 12
    for sample in found.samples:
        assert [(mark.modality, mark.colour) for mark in sample] == [
            (modality, slot) for modality in ("image", "caption") for slot in range(4)
        ]
        row = view.scores.ids.index(sample[0].title.split(":")[0].removeprefix("Image "))
        assert sample[1].title == f"Image {view.scores.ids[row]}: {view.first_caption(row)} (slot 2)"
        assert sample[7].title == f"Caption: {view.first_caption(row)} (slot 4)"
        assert all(3 <= place <= 97 for mark in sample for place in (mark.left, mark.top))
    (vectors,) = open_views([run("vsepp")], None, "test", "cpu")
    found = element_map(vectors, 0)
    assert [(name, mark.colour) for name, mark in found.legend] == [("image", 0), ("caption", 1)]
    assert {tuple(mark.colour for mark in sample) for sample in found.samples} == {(0, 1)}
