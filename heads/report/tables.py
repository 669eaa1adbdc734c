"""The numbers of the runs: what was trained, what the protocols measure, and the curves of the training."""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ..evaluation.evaluation import Evaluation, Result
from ..evaluation.metrics import WAYS
from ..evaluation.number_table import NumberTable, shown
from ..recipes.blocks import Recipe
from ..recipes.schema import flat
from ..runs.run import MAY_CHANGE
from .examples import PageRun

Series = tuple[Sequence[float], Sequence[float]]  # positions and values of a line
WIDTH, HEIGHT, LEFT, BOTTOM = 420, 250, 52, 34  # of a chart, and of the room for its scales


def facts_table(runs: Sequence[PageRun]) -> NumberTable:
    """Return what was trained on what: a row a fact, a column a run."""
    columns = []
    for run in runs:
        recipe, info = run.seen.run.recipe, run.seen.run.info
        columns.append(
            {
                "recipe": f"{recipe.name} ({recipe.paper})",
                "aggregators": f"{recipe.aggregator['image']['name']} / {recipe.aggregator['text']['name']}",
                "similarity": recipe.similarity["name"],
                "losses": ", ".join(recipe.terms),
                "features": f"{' + '.join(info.names('image'))} / {' + '.join(info.names('text'))}",
                "seed": str(info.seed),
                "best epoch": f"{info.best_epoch or '–'} (validation RSUM {shown(info.best_rsum)})",
                "store": run.seen.ranker.cache.url,
            }
        )
    rows = [[fact, *(column[fact] for column in columns)] for fact in columns[0]]
    rows += differing_settings([run.seen.run.recipe for run in runs])
    return NumberTable("Runs", ["run", *(run.name for run in runs)], rows)


def differing_settings(recipes: Sequence[Recipe]) -> list[list[str]]:
    """Return a row for each key in which recipes of one name differ: the key, and the value of each recipe.

    Keys that no number depends on are left out, and the feature sets, which have a fact of their own.
    """
    values = [flat(recipe.to_dict()) for recipe in recipes]
    alike: dict[str, list[dict[str, Any]]] = {}
    for recipe, own in zip(recipes, values, strict=True):
        alike.setdefault(recipe.name, []).append(own)
    keys = dict.fromkeys(key for own in values for key in own if key not in MAY_CHANGE)
    differing = [key for key in keys if any(own.get(key) != of[0].get(key) for of in alike.values() for own in of)]
    return [[key, *(_setting(own, key) for own in values)] for key in differing]


def _setting(values: dict[str, Any], key: str) -> str:
    """Return a value as `--set` takes it, or a dash if there is none."""
    value = values.get(key, "–")
    return value if isinstance(value, str) else json.dumps(value)


def evaluation_tables(found: Sequence[tuple[str, Evaluation]]) -> list[NumberTable]:
    """Return a table a protocol, with a row a run and one of chance.

    Args:
        found: the evaluation of each run, or of frozen encoders, by name. Runs with other numbers of images or
            captions, because samples failed, have a table of their own.
    """
    alike: dict[tuple[str, int, int, int], list[tuple[str, Result]]] = {}
    for name, evaluation in found:
        for one in evaluation.results:
            alike.setdefault((one.protocol, one.images, one.captions, one.skipped), []).append((name, one))
    return [_evaluation_table(rows) for rows in alike.values()]


def _evaluation_table(found: list[tuple[str, Result]]) -> NumberTable:
    first = found[0][1]
    measures = list(first.image_to_text)
    recalls, paper = first.rsum is not None, any(one.paper_rsum is not None for _, one in found)
    header = ["run", *(f"{way} {measure}" for way in ("i→t", "t→i") for measure in measures)]
    header += ["RSUM", "mean recall"] * recalls + ["paper's RSUM", "difference"] * paper
    rows: list[list[str | int | float | None]] = []
    for name, one in found:
        row = [name, *(getattr(one, way)[measure] for way in WAYS for measure in measures)]
        rows.append(row + [one.rsum, one.mean_recall] * recalls + [one.paper_rsum, one.difference] * paper)
    if first.chance_rsum is not None:
        blank = [None] * 2 * len(measures)
        rows.append(["chance", *blank, first.chance_rsum, first.chance_rsum / 6, *[None] * 2 * paper])
    caption = (
        f"Protocol {first.protocol}, split {first.split}: {first.images:,} images, {first.captions:,} captions "
        f"({first.captions_per_image:.2f} an image), {first.skipped:,} skipped, ties {first.ties}. i→t is image to "
        f"text, t→i text to image; {'recall in percent, medr: median rank from 1' if recalls else 'in percent'}."
    )
    return NumberTable(caption, header, rows)


def training_charts(runs: Sequence[PageRun]) -> list[tuple[str, list[str], str]]:
    """Return a chart each of validation RSUM and loss by epoch: a caption, the names of its lines, and SVG."""
    logs = {run.name: [line for line in run.seen.run.metrics() if "epoch" in line] for run in runs}
    charts = []
    for key, caption in (("rsum", "Validation RSUM (sum of six %) by epoch"), ("loss", "Mean loss of each epoch")):
        lines = {name: _column(log, key) for name, log in logs.items()}
        lines = {name: line for name, line in lines.items() if line[0]}
        if lines:
            values = [value for line in lines.values() for value in line[1]]
            log = key == "loss" and min(values) > 0 and max(values) > 10 * min(values)
            charts.append((caption + (", logarithmic." if log else "."), list(lines), line_chart(caption, lines, log)))
    return charts


def training_table(run: PageRun) -> NumberTable | None:
    """Return the log of a training, epoch by epoch; None if there is none."""
    log = [{**line.get("parts", {}), **line} for line in run.seen.run.metrics() if "epoch" in line]
    if not log:
        return None
    terms = list(dict.fromkeys(term for line in run.seen.run.metrics() for term in line.get("parts", {})))
    keys = ["loss", *(terms if len(terms) > 1 else []), "rsum", "lr", "seconds"]
    rows = [[str(line["epoch"]), *(line.get(key) for key in keys)] for line in log]
    header = ["epoch", *(key.replace("rsum", "validation RSUM") for key in keys)]
    return NumberTable(
        f"Training of {run.name}, epoch by epoch; terms of the loss before they are weighted.", header, rows, 4
    )


def _column(log: list[dict[str, Any]], key: str) -> Series:
    """Return the epochs that have a number for `key`, and the numbers."""
    there = [(line["epoch"], line[key]) for line in log if isinstance(line.get(key), int | float)]
    return [float(epoch) for epoch, _ in there], [float(value) for _, value in there]


def line_chart(alt: str, lines: Mapping[str, Series], log: bool = False) -> str:
    """Return lines over epochs as SVG whose text and colours are the page's.

    Args:
        alt: what it shows.
        lines: by name, in the order of their colours.
        log: a logarithmic scale of values, which must be above 0.
    """
    xs = [x for line in lines.values() for x in line[0]]
    ys = [y for line in lines.values() for y in line[1]]
    low, high = (math.log10(min(ys)), math.log10(max(ys))) if log else (min(ys), max(ys))
    high = high if high > low else low + 1

    def across(x: float) -> float:
        return LEFT + 8 + (WIDTH - LEFT - 20) * (x - min(xs)) / max(max(xs) - min(xs), 1)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 12) * ((math.log10(y) if log else y) - low) / (high - low)

    parts = []
    for y in _log_ticks(min(ys), max(ys)) if log else _ticks(low, high):
        at = down(y)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in _ticks(min(xs), max(xs), 1):
        parts.append(f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 2}" text-anchor="middle">epoch</text>')
    for number, line in enumerate(lines.values()):
        points = [f"{across(x):.1f},{down(y):.1f}" for x, y in zip(*line, strict=True)]
        parts.append(f'<g class="series series-{number % 8 + 1}"><polyline points="{" ".join(points)}"/>')
        parts += ['<circle cx="{}" cy="{}" r="2.5"/>'.format(*point.split(",")) for point in points if len(points) < 40]
        parts.append("</g>")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(alt)}">{"".join(parts)}</svg>'


def _ticks(low: float, high: float, least: float = 0) -> list[float]:
    """Return round numbers from low to high, about five, at least `least` apart."""
    raw = max((high - low) / 5, least, 1e-12)
    step = next(m for m in (1, 2, 5, 10) if m * 10 ** math.floor(math.log10(raw)) >= 0.999 * raw)
    step *= 10 ** math.floor(math.log10(raw))
    return [round(k * step, 12) for k in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten from low to high, with twice and five times them if those are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    multiples = (1, 2, 5) if high < 1000 * low else (1,)
    return [m * 10.0**k for k in decades for m in multiples if low <= m * 10.0**k <= high]
