"""The numbers of the runs: what was trained, what the protocols measure, and the curves of the training."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..evaluation.metrics import WAYS
from ..evaluation.number_table import NumberTable, Rows, shown
from ..evaluation.result import FEW, Evaluation, Result, too_few
from ..recipes.blocks import Recipe, role
from ..runs.info import BRANCHES
from .examples import PageRun

Series = tuple[Sequence[float], Sequence[float]]  # epochs and values of a line


class Chart(NamedTuple):
    """Lines over epochs, or what `across` says; positions are shares of the width, and from the top of the height."""

    caption: str
    lines: dict[str, list[tuple[float, float]]]  # by name, in the order of their colours
    epochs: list[tuple[float, str]]  # where a number stands on the scale, and which
    values: list[tuple[float, str]]
    across: str = "epoch"


class Opening(NamedTuple):
    """What a page begins with that is not about its runs alone."""

    title: str
    table: NumberTable | None
    chart: Chart | None
    sentences: Sequence[str]


def facts_table(runs: Sequence[PageRun]) -> NumberTable:
    """Return what was trained on what: a row a fact, a column a run."""
    columns = []
    for run in runs:
        ranker = run.seen.ranker
        names = (" + ".join(origin.name for origin in ranker.origins(branch)) for branch in BRANCHES)
        facts = {"recipe": ranker.title}
        if ranker.run is not None:
            recipe, info = ranker.run.recipe, ranker.run.info
            facts = {
                "recipe": f"{recipe.name} ({recipe.paper})",
                "aggregators": f"{recipe.aggregator['image']['name']} / {recipe.aggregator['text']['name']}",
                "similarity": recipe.similarity["name"],
                "losses": ", ".join(recipe.terms),
                "seed": str(info.seed),
                "best epoch": f"{info.best_epoch} (validation RSUM {shown(info.best_rsum)})",
            }
            if info.average is not None:
                runs_of = ", ".join(f"{name} ({weight:.3g})" for name, weight in info.average.items())
                facts = {"recipe": f"{recipe.paper}: {runs_of}; validation RSUM {shown(info.best_rsum)}"}
        columns.append(facts | {"features": " / ".join(names), "store": ranker.cache.url})
    rows = [[fact, *(column.get(fact, "–") for column in columns)] for fact in max(columns, key=len)]
    opened = [run.seen.ranker.run for run in runs]
    rows += differing_settings([None if run is None or run.info.average else run.recipe for run in opened])
    return NumberTable("Runs", ["run", *(run.name for run in runs)], rows)


def differing_settings(recipes: Sequence[Recipe | None]) -> list[list[str]]:
    """Return a row for each key in which recipes of one name differ: the key, and the value of each as `--set` has it.

    Keys that no number depends on are left out; the feature sets have a fact of their own.
    """
    values = [{} if recipe is None else recipe.flat() for recipe in recipes]
    first: dict[str, dict[str, Any]] = {}
    pairs = [(flat, first.setdefault(flat["name"], flat)) for flat in values if flat]
    rows = []
    for key in dict.fromkeys(key for flat in values for key in flat if role(key) in ("learnt", "finetuned", "rounded")):
        if any(flat.get(key) != other.get(key) for flat, other in pairs):
            cells = (flat.get(key, "–") for flat in values)
            rows.append([key, *(cell if isinstance(cell, str) else json.dumps(cell) for cell in cells)])
    return rows


def evaluation_tables(evaluations: Sequence[tuple[str, Evaluation]]) -> list[NumberTable]:
    """Return a table a protocol, with a row for each run or frozen encoders, by name, and one of chance.

    Those with other numbers of images or captions, because samples failed, have a table of their own.
    """
    alike: dict[tuple[str, int, int, int], list[tuple[str, Result]]] = {}
    for name, evaluation in evaluations:
        for row in evaluation.results:
            alike.setdefault((row.protocol, row.images, row.captions, row.skipped), []).append((name, row))
    return [_evaluation_table(rows) for rows in alike.values()]


def _evaluation_table(results: list[tuple[str, Result]]) -> NumberTable:
    first = results[0][1]
    measures = list(first.image_to_text)
    recalls, paper = first.rsum is not None, any(result.paper_rsum is not None for _, result in results)
    header = ["run", *(f"{way} {measure}" for way in ("i→t", "t→i") for measure in measures)]
    header += ["RSUM", "mean recall"] * recalls + ["paper's RSUM", "difference"] * paper
    rows = Rows()
    for name, result in results:
        row = [name, *(getattr(result, way)[measure] for way in WAYS for measure in measures)]
        rows.append(row + [result.rsum, result.mean_recall] * recalls + [result.paper_rsum, result.difference] * paper)
    if first.chance_rsum is not None:
        blank = [None] * 2 * len(measures)
        rows.append(["chance", *blank, first.chance_rsum, first.chance_rsum / 6, *[None] * 2 * paper])
    caption = (
        f"Protocol {first.protocol}, split {first.split}: {first.images:,} images, {first.captions:,} captions "
        f"({first.captions_per_image:.2f} an image), {first.skipped:,} skipped, ties {first.ties}. i→t is image to "
        f"text, t→i text to image; {'recall in percent, medr: median rank from 1' if recalls else 'in percent'}."
    )
    if trained := [name for name, result in results if result.frozen and result.paper_rsum is not None]:
        caption += f" The papers of {', '.join(trained)} train their encoders, which are frozen here."
    if first.images < FEW:
        caption += f" {too_few(first.images)} to tell how good this is; take {FEW} or more."
    return NumberTable(caption, header, rows)


def training_charts(runs: Sequence[PageRun]) -> list[Chart]:
    """Return a chart each of validation RSUM and loss by epoch."""
    charts = []
    for key, caption in (("rsum", "Validation RSUM (sum of six %) by epoch"), ("loss", "Mean loss of each epoch")):
        lines = {}
        for run in runs:
            metrics = run.seen.ranker.run.metrics() if run.seen.ranker.run else []
            if known := [line for line in metrics if isinstance(line.get(key), int | float)]:
                lines[run.name] = [float(line["epoch"]) for line in known], [float(line[key]) for line in known]
        if lines:
            charts.append(line_chart(caption, lines))
    return charts


def line_chart(caption: str, lines: Mapping[str, Series], across: str = "epoch") -> Chart:
    """Return a chart of lines."""
    xs, ys = ([value for line in lines.values() for value in line[axis]] for axis in (0, 1))
    left, low = min(xs), min(ys)
    wide, high = max(max(xs) - left, 1), max(ys) - low or 1

    def right(x: float) -> float:
        return (x - left) / wide

    def down(y: float) -> float:
        return 1 - (y - low) / high

    return Chart(
        f"{caption}.",
        {name: [(right(x), down(y)) for x, y in zip(*line, strict=True)] for name, line in lines.items()},
        [(right(x), f"{x:,g}") for x in _ticks(left, max(xs), 1)],
        [(down(y), f"{y:g}") for y in _ticks(low, low + high)],
        across,
    )


def _ticks(low: float, high: float, least: float = 0) -> list[float]:
    """Return round numbers from low to high, about five, at least `least` apart."""
    raw = max((high - low) / 5, least, 1e-12)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.999 * raw)
    return [round(k * step, 12) for k in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]
