"""The table of an ablation: mean and standard deviation over seeds, the paper's value next to them."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...pipeline.errors import RunError
from ...pipeline.files import making_file
from ...pipeline.versions import require_packages
from ...pipeline.wording import aligned, counted, rows_as_csv
from ..evaluation.evaluation import FEW, too_few
from ..evaluation.metrics import Ties
from ..evaluation.paper_rows import ROWS
from .plan import Value

_WAYS = {"image_to_text": "i2t", "text_to_image": "t2i"}
_OF_A_WAY = ("R@1", "R@5", "R@10", "mAP@R", "R-P", "PMRP", "PMRP 1K", "RPC2", "RPC2 1K")
_KINDS = ("mean", "std", "paper")
# The name of a metric is its place in an entry.
METRICS = (*(f"{way} {name}" for way in _WAYS for name in _OF_A_WAY), "rsum", "log_circular_variance")
_TITLES = {"rsum": "RSUM", "log_circular_variance": "log var."}
_LATEX = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    | {sign: f"\\{sign}" for sign in "&%$#_{}"}
)


@dataclass(frozen=True)
class Entry:
    """A cell under one protocol.

    Attributes:
        cell: what the variant sets, by recipe key.
        label: of the variant.
        seed: of the run.
        status: ``done`` or ``failed``.
        run: the run folder.
        split: what is evaluated.
        protocol: of the evaluation; None of a failed cell, as are all numbers.
        rsum, image_to_text, text_to_image, log_circular_variance: as in `evaluation.Result`.
        paper: the paper's values by metric, with their `row`; None where it has none.
        error: the sentence that a failed cell ended in.
        ties: how equal scores are counted; None of a failed cell.
        images: that are compared; None of a failed cell.
        views: of each image, over which the mean is taken; None of a failed cell.
    """

    cell: dict[str, Value]
    label: str
    seed: int
    status: Literal["done", "failed"]
    run: str
    split: str
    protocol: str | None = None
    rsum: float | None = None
    image_to_text: dict[str, float] | None = None
    text_to_image: dict[str, float] | None = None
    log_circular_variance: float | None = None
    paper: dict[str, Any] | None = None
    error: str | None = None
    ties: Ties | None = None
    images: int | None = None
    views: int | None = None


@dataclass(frozen=True)
class Line:
    """A variant under one protocol.

    Attributes:
        label: of the variant.
        values: what it sets.
        split, protocol, ties, images, views: what was evaluated, and how; of these the split alone where every seed
            failed.
        seeds: how many are finished.
        failed: how many failed.
        mean: over the finished seeds, by metric, as far as known.
        std: of the sample (n - 1), by metric; empty for a single seed.
        row: of the paper's table.
        paper: the paper's values, by metric.
    """

    label: str
    values: dict[str, Any]
    split: str
    protocol: str | None
    ties: Ties | None
    images: int | None
    views: int | None
    seeds: int
    failed: int
    mean: dict[str, float]
    std: dict[str, float]
    row: str | None
    paper: dict[str, float]


def summarise(entries: Sequence[Entry]) -> list[Line]:
    """Return the lines of the entries of an ablation: protocol by protocol, the variants in their order."""
    protocols: list[str | None] = [*dict.fromkeys(entry.protocol for entry in entries if entry.protocol)] or [None]
    labels = list(dict.fromkeys(entry.label for entry in entries))
    lines = []
    for protocol in protocols:
        for label in labels:
            own = [entry for entry in entries if entry.label == label]
            done = [entry for entry in own if entry.status == "done" and entry.protocol == protocol]
            failed = sum(entry.status == "failed" for entry in own)
            paper = dict(done[0].paper or {}) if done else {}
            row = paper.pop("row", None)
            how = (done[0].ties, done[0].images, done[0].views) if done else (None, None, None)
            first, (mean, std) = (label, own[0].cell, own[0].split, protocol, *how), _statistics(done)
            lines.append(Line(*first, len(done), failed, mean, std, row, paper))
    return lines


def _statistics(entries: Sequence[Entry]) -> tuple[dict[str, float], dict[str, float]]:
    known = {
        metric: [value for entry in entries if (value := _number(entry, metric)) is not None] for metric in METRICS
    }
    mean = {metric: statistics.fmean(values) for metric, values in known.items() if values}
    return mean, {metric: statistics.stdev(values) for metric, values in known.items() if len(values) > 1}


def _number(entry: Entry, metric: str) -> float | None:
    block, _, name = metric.partition(" ")
    found: Any = getattr(entry, block)
    value: float | None = found.get(name) if name else found
    return value


def as_text(lines: Sequence[Line]) -> str:
    """Return the table for a terminal, one part a protocol."""
    return "\n\n".join("\n".join([title, *aligned(rows)]) for title, rows in _tables(lines))


def as_latex(lines: Sequence[Line]) -> str:
    """Return the table as LaTeX, for the package booktabs, one `tabular` a protocol."""
    parts = []
    for title, rows in _tables(lines):
        head, *body = (" & ".join(cell.translate(_LATEX) for cell in row) + r" \\" for row in rows)
        begin = rf"\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}"
        part = [f"% {title}", begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
        parts.append("\n".join(part))
    return "\n\n".join(parts) + "\n"


def as_csv(lines: Sequence[Line]) -> str:
    """Return the table as CSV, every number in full: what varies, then mean, std and paper of each known metric.

    A key has a column, and so has the protocol, where not all lines have the same; views, where there are several.
    """
    keys = dict.fromkeys(key for line in lines for key in line.values)
    varied = {key: [line.values.get(key) for line in lines] for key in keys}
    varied |= {"protocol": [line.protocol for line in lines]}
    found: dict[str, list[Any]] = {"row": [line.row for line in lines]}
    for metric in METRICS:
        found |= {f"{metric} {kind}": [getattr(line, kind).get(metric) for line in lines] for kind in _KINDS}
    columns: dict[str, list[Any]] = {"label": [line.label for line in lines]}
    columns |= {name: cells for name, cells in varied.items() if len(set(map(repr, cells))) > 1}
    columns |= {"views": [line.views for line in lines]} if _views(lines) - {1} else {}
    columns |= {"seeds": [line.seeds for line in lines]}
    columns |= {"failed": [line.failed for line in lines]} if any(line.failed for line in lines) else {}
    columns |= {name: cells for name, cells in found.items() if any(cell is not None for cell in cells)}
    return rows_as_csv([list(columns), *zip(*columns.values(), strict=True)])


def plot(lines: Sequence[Line], file: Path) -> None:
    """Draw RSUM against the one value that is varied, with the standard deviation over seeds, and the paper's.

    Args:
        lines: of `summarise`.
        file: see `require_plot`.

    Raises:
        RunError: matplotlib is not installed, or there is no RSUM.
        ValueError: as of `require_plot`.
    """
    beside, lines = [line for line in lines if not line.values], [line for line in lines if line.values]
    require_plot(file, [line.values for line in lines])
    from matplotlib.figure import Figure

    keys = list(lines[0].values)
    key = keys[0]  # all have the same value
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    measured = [line for line in lines if "rsum" in line.mean]
    if not measured and any(line.seeds for line in lines):
        raise RunError("nothing can be drawn: no protocol of this data set has an RSUM; leave --plot out")
    for protocol in dict.fromkeys(line.protocol for line in measured):
        drawn = sorted((line for line in measured if line.protocol == protocol), key=lambda line: line.values[key])
        x, y = [line.values[key] for line in drawn], [line.mean["rsum"] for line in drawn]
        bars = [line.std.get("rsum", math.nan) for line in drawn] if any(line.std for line in drawn) else None
        axes.errorbar(x, y, bars, marker="o", capsize=3, label=f"protocol {protocol}: {_drawn(drawn)}")
        known = {line.values[key]: line.paper["rsum"] for line in drawn if "rsum" in line.paper}
        if known:
            title = next(ROWS[line.row].title for line in drawn if line.row)
            axes.plot([*known], [*known.values()], "x", label=f"protocol {protocol}: the paper's value, {title}")
    for line in (line for line in beside if "rsum" in line.mean):
        axes.axhline(line.mean["rsum"], linestyle=":", label=f"protocol {line.protocol}: {line.label}")
    values = sorted({line.values[key] for line in lines})
    axes.set_xlabel(" = ".join(keys) + _scaled(axes, values))
    axes.set_ylabel("RSUM: sum of six recalls in percent")
    if measured:
        axes.set_title(f"split {measured[0].split}, ties {measured[0].ties}{_over_views(measured)}")
        figure.legend(loc="outside lower center")
    with making_file(file) as partial:
        figure.savefig(partial, format=file.suffix[1:])


def _scaled(axes: Any, values: Sequence[float]) -> str:
    """Give the axis of the values its scale, and ticks at those that have room; return what is said of the scale."""
    sizes = [abs(value) for value in values if value] or [1.0]
    least, said = min(sizes), ""
    if max(sizes) > 10 * least and values[0] > 0:  # 0.1, ..., 1 stays linear
        axes.set_xscale("log")
        said = " (logarithmic)"
    elif max(sizes) > 10 * least:
        axes.set_xscale("symlog", linthresh=least)
        said = f" (logarithmic beyond {'±' if values[0] < 0 else ''}{least:g})"
    labels = [f"{value:g}" for value in values]
    at = axes.xaxis.get_transform().transform(np.array(values, float))
    room = 0.016 * (max(map(len, labels)) + 1) * (at[-1] - at[0])  # a character is some 1.6% of the axis
    shown = [0]
    for k in range(1, len(values)):
        if at[k] - at[shown[-1]] >= room:
            shown.append(k)
    axes.set_xticks([values[k] for k in shown], [labels[k] for k in shown])
    axes.minorticks_off()
    return said


def _drawn(lines: Sequence[Line]) -> str:
    """Return what a line and its bars are."""
    fewest, most = min(line.seeds for line in lines), max(line.seeds for line in lines)
    if most == 1:
        return "one seed"
    seeds = counted(most, "seed") if fewest == most else f"{fewest} to {most} seeds"
    return f"mean over {seeds}, bars ± the sample standard deviation"


def require_plot(file: Path, values: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what `plot` cannot draw.

    Args:
        file: ends in ``.png``, ``.svg`` or ``.pdf``.
        values: what each variant sets: one key, or several that vary together, with numbers.

    Raises:
        ValueError: `file` ends otherwise, or the values are others.
        RunError: matplotlib is not installed.
    """
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{file} must end in .png, .svg or .pdf")
    numeric = all(type(value) in (int, float) for cell in values for value in cell.values())
    together = all(len(set(cell.values())) == 1 for cell in values)
    same_keys = len({tuple(cell) for cell in values}) == 1
    if not (numeric and together and same_keys):
        raise ValueError("a plot needs a single varied key with numbers as its values")
    require_packages("a plot needs", {"matplotlib": "matplotlib"}, "plots")


def _tables(lines: Sequence[Line]) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the title and the rows of each protocol's table, its head first."""
    for protocol in dict.fromkeys(line.protocol for line in lines):
        own = [line for line in lines if line.protocol == protocol]
        known = [metric for metric in METRICS if any(metric in line.mean or metric in line.paper for line in own)]
        columns = {metric: any(metric in line.paper for line in own) for metric in known or ["rsum"]}
        rows = [_head(columns), *(_cells(line, columns) for line in own)]
        more = {"views": [_count(line.views) for line in own]} if len(_views(own)) > 1 else {}
        more |= {"failed": [str(line.failed) for line in own]} if any(line.failed for line in own) else {}
        for name, cells in more.items():
            rows = [[*row, last] for row, last in zip(rows, [name, *cells], strict=True)]
        yield _title(own), rows


def _title(lines: Sequence[Line]) -> str:
    seeds = max(line.seeds + line.failed for line in lines)
    title = f"split {lines[0].split}, protocol {lines[0].protocol or '-'}"
    if ties := next((line.ties for line in lines if line.ties), None):
        title += f", ties {ties}{_over_views(lines)}"
    if seeds > 1:
        title += f"; mean ± sample standard deviation over {seeds} seeds"
    if row := next((line.row for line in lines if line.row), None):
        title += f"; paper: {ROWS[row].title}"
    if (images := next((line.images for line in lines if line.images), FEW)) < FEW:
        title += f"; {too_few(images)} to tell variants apart"
    return title


def _views(lines: Sequence[Line]) -> set[int]:
    """Return over how many views the lines are, as far as known."""
    return {line.views for line in lines if line.views}


def _over_views(lines: Sequence[Line]) -> str:
    """Return, for a title, over how many views the lines are, where it is over several and the same for all."""
    found = _views(lines)
    return f", mean over {max(found)} views of each image" if len(found) == 1 and max(found) > 1 else ""


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


def _head(columns: Mapping[str, bool]) -> list[str]:
    """Return the names of the columns: metrics, each with whether a column of the paper's follows."""
    head, ways = [""], set()
    for metric, paper in columns.items():
        way, _, name = metric.partition(" ")
        first = "" if way in ways else f"{_WAYS.get(way)} "
        ways.add(way)
        head += [first + name if name else _TITLES[metric], *(["paper"] if paper else [])]
    return head


def _cells(line: Line, columns: Mapping[str, bool]) -> list[str]:
    cells = [line.label]
    for metric, paper in columns.items():
        mean, std = line.mean.get(metric), line.std.get(metric)
        cells.append("-" if mean is None else f"{mean:.2f}" + ("" if std is None else f" ± {std:.2f}"))
        if paper:
            cells.append(f"{line.paper[metric]:g}" if metric in line.paper else "-")
    return cells
