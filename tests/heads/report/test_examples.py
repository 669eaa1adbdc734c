"""Galleries, elements and disagreements: what is shown is what the run ranks."""

import re

import numpy as np
import pytest
import torch
from torch.nn import functional

from xret.heads.evaluation.number_table import shown as number
from xret.heads.evaluation.scoring import Side
from xret.heads.modules.embedding import Gaussian, Sequence
from xret.heads.report.examples import (
    DIRECTIONS,
    agreement_table,
    by_element,
    disagreements,
    drawn,
    exemplary,
    gallery,
    mixed,
    nearest,
)


def ranked(scores):
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))


def test_a_gallery_is_the_head_of_the_ranking(setdiv):
    scores = setdiv.seen
    for direction, matrix in (("image_to_text", scores.similarity), ("text_to_image", scores.similarity.T)):
        examples = gallery(setdiv.ways[direction], mixed(setdiv.ways[direction], 6, 3), 5)
        assert len(examples) == 6
        for shown in examples:
            if direction == "image_to_text":
                query = scores.ids.index(shown.query.name)
                best = [(scores.texts[row], scores.caption_image[row] == query) for row in ranked(matrix[query])[:5]]
                assert [(item.text, item.right) for item in shown.found] == best
            else:
                asking = [row for row, text in enumerate(scores.texts) if text == shown.query.text]
                found = [
                    [(scores.ids[i], scores.caption_image[row] == i) for i in ranked(matrix[row])[:5]] for row in asking
                ]
                assert [(item.name, item.right) for item in shown.found] in found


def test_a_failure_shows_the_right_answer_its_rank_and_its_score(setdiv):
    failed = 0
    for direction, way in setdiv.ways.items():
        for query in way.queries.tolist():
            scores = way.similarity[query].tolist()
            ranking = ranked(scores)
            own = [item for item in ranking if way.item_image[item] == way.query_image[query]]
            rank = 1 + ranking.index(own[0])
            assert way.right(query) == (own[0], rank)
            one = way.example(query, ranking[:1])
            place = f"rank {rank} of {len(scores)}: "
            assert one.found[0].note == (place if rank == 1 else "") + number(scores[ranking[0]])
            failed += rank > 1
            if rank == 1:
                assert one.missed is None
                continue
            said = setdiv.seen.texts[own[0]] if direction == "image_to_text" else setdiv.seen.ids[own[0]]
            assert (one.missed.text if direction == "image_to_text" else one.missed.name) == said
            assert (one.missed.right, one.missed.note) == (True, place + number(scores[own[0]]))
            assert way.example(query, ranking[:rank]).missed is None  # it is there already
    assert failed > 5


def test_each_element_finds_what_is_nearest_to_it():
    torch.manual_seed(0)
    queries, items = (functional.normalize(torch.randn(n, k, 6), dim=-1) for n, k in ((3, 4), (7, 2)))
    for query, found in zip(queries, nearest(queries, items).tolist(), strict=True):
        for element, item in zip(query, found, strict=True):
            by_item = [max((element @ other).item() for other in own) for own in items]
            assert item == by_item.index(max(by_item))
    assert nearest(queries[:0], items).shape == (0, 4)


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_successes_succeed_and_failures_fail(setdiv, direction, right):
    way, scores = setdiv.ways[direction], setdiv.seen
    hits = dict(zip(way.queries.tolist(), way.hits.tolist(), strict=True))
    for shown in by_element(way, right, 3, 0):
        assert [item.note.split(":")[0] for item in shown.found] == [f"element {k}" for k in (1, 2, 3, 4)]
        assert (shown.missed is None) is right
        if direction == "image_to_text":
            row = scores.ids.index(shown.query.name)
            assert hits[row] is right
            own = {scores.texts[c] for c in np.flatnonzero(scores.caption_image == row)}
            assert all(item.text in own for item in shown.found if item.right)
        else:
            assert any(hits[c] is right for c, text in enumerate(scores.texts) if text == shown.query.text)


def test_a_gallery_mixes_right_near_and_wrong_answers(setdiv):
    for way in setdiv.ways.values():
        ranks = [way.right(query)[1] for query in way.queries.tolist()]
        kinds = [[rank for rank in ranks if low <= rank <= high] for low, high in ((1, 1), (2, 10), (11, 99))]
        assert sum(map(bool, kinds)) > 1
        first = [way.right(query)[1] for query in mixed(way, sum(map(bool, kinds)), 0)]
        assert all(rank in kind for rank, kind in zip(first, filter(None, kinds), strict=True))
        assert sorted(mixed(way, 99, 0)) == way.queries.tolist()


def test_the_example_is_right_and_its_elements_find_as_many_of_its_captions_as_any(setdiv):
    (image,), way = exemplary(setdiv, 0), setdiv.ways["image_to_text"]
    owners = way.item_image.tolist()
    found = [
        {c for c in row if owners[c] == i}
        for i, row in enumerate(nearest(way.query_elements, way.item_elements).tolist())
    ]
    right = [query for query in way.queries.tolist() if way.right(query)[1] == 1]
    assert image in right
    assert len(found[image]) == max(len(found[query]) for query in right)


def test_drawn_with_a_seed():
    rows = np.arange(10, 20)
    assert drawn(rows, 30, 0) == rows.tolist()
    assert drawn(rows, 3, 0) == drawn(rows, 3, 0) == sorted(drawn(rows, 3, 0))
    assert drawn(rows[:0], 3, 0) == []
    assert len({tuple(drawn(rows, 3, seed)) for seed in range(9)}) > 3


def test_where_runs_disagree_each_says_its_score_and_the_rank_of_the_right_one(setdiv, shown):
    runs = [setdiv, shown("vsepp")]
    examples = disagreements(runs, "text_to_image", 3, 0)
    assert examples
    for one in examples:
        assert {item.right for item in one.found} == {True, False}
        for run, item in zip(runs, one.found, strict=True):
            rest = "" if item.right else r", the right one at rank [1-9]\d* of 12: [\d.−]+"
            assert re.fullmatch(rf"{run.name}: [\d.−]+{rest}", item.note)


def test_agreement_is_counted_query_by_query(setdiv, shown):
    runs, right = [setdiv, shown("vsepp")], []
    for run in runs:
        owner, scores = run.seen.caption_image.tolist(), run.seen.similarity
        to_text = [owner[ranked(row)[0]] == i for i, row in enumerate(scores)]
        right.append(to_text + [ranked(scores[:, c])[0] == own for c, own in enumerate(owner)])
    only = [sum(a and not b for a, b in zip(*pair, strict=True)) for pair in (right, right[::-1])]
    rows = [row[1:] for row in agreement_table(runs).rows]
    assert rows == [[None, pytest.approx(100 * only[0] / 42)], [pytest.approx(100 * only[1] / 42), None]]


def test_elements_of_every_kind_are_unit_rows():
    torch.manual_seed(0)
    rows = torch.randn(2, 3, 4)
    sequence = Sequence(rows, torch.tensor([1, 3]))
    kinds = {1: [rows[:, 0], Gaussian(rows[:, 0], rows[:, 1]), sequence], 3: [rows]}
    for count, embeddings in kinds.items():
        for embedding in embeddings:
            made = Side(embedding, None, torch.ones(2)).elements
            assert made.shape == (2, count, 4)
            torch.testing.assert_close(made.norm(dim=2), torch.ones(2, count))
    first = Side(sequence, None, torch.ones(2)).elements[0, 0]
    torch.testing.assert_close(first, functional.normalize(rows[0, 0], dim=0))
