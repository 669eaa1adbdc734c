"""Runs beside one another: where they disagree, and what other similarities would give."""

import re

import pytest
import torch

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.report.figures import number
from xret.heads.report.sections.comparison import agreement_table, disagreements
from xret.heads.report.sections.tables import similarity_table
from xret.heads.report.views import open_views

pytestmark = pytest.mark.usefixtures("one_thread")


def test_where_runs_disagree_each_says_its_score_and_the_rank_of_the_right_one(run, no_pictures):
    views = open_views([run("setdiv"), run("vsepp")], None, "test", "cpu")
    examples = disagreements(views, no_pictures, "text_to_image", 0)
    assert examples
    for one in examples:
        assert {item.right for item in one.found} == {True, False}
        for view, item in zip(views, one.found, strict=True):
            assert re.fullmatch(
                rf"{view.name}: [\d.−]+" + ("" if item.right else r", the right one at rank [1-9]\d*: [\d.−]+"),
                item.note,
            )


def test_other_similarities_are_measured_as_a_run_with_them(view, run, folder):
    table = similarity_table(view, "pessimistic")
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == ["smooth-chamfer (its own)", "mil", "chamfer", "assignment"]
    own = evaluate([run("setdiv")], device="cpu").results[0]
    assert rows["smooth-chamfer (its own)"][-1] == number(own.rsum)
    (other,) = open_views([run("vsepp")], None, "test", "cpu")
    assert similarity_table(other, "pessimistic") is None
    left, right = view.image_elements, view.caption_elements
    best = torch.einsum("ikd,cjd->ickj", left, right).amax((2, 3))
    hits = (view.scores.caption_image[best.argmax(1)] == torch.arange(len(left))).double().mean()
    assert rows["mil"][0] == number(100 * hits.item())


def test_agreement_is_counted_query_by_query(run):
    views = open_views([run("setdiv"), run("vsepp")], None, "test", "cpu")
    right = []
    for view in views:
        owner = view.scores.caption_image.tolist()
        to_text = [
            owner[max(range(len(owner)), key=lambda c: row[c])] == i for i, row in enumerate(view.scores.similarity)
        ]
        to_image = [max(range(12), key=lambda i: view.scores.similarity[i, c]) == own for c, own in enumerate(owner)]
        right.append(to_text + to_image)
    only = [sum(a and not b for a, b in zip(*pair, strict=True)) for pair in (right, right[::-1])]
    table = agreement_table(views)
    assert [row[1:] for row in table.rows] == [
        ["–", number(100 * only[0] / 42)],
        [number(100 * only[1] / 42), "–"],
    ]
