"""The table of an ablation: mean and standard deviation over seeds, the paper's value beside them."""

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...pipeline.errors import RunError
from ...pipeline.files import writing
from ...pipeline.wording import aligned
from ..evaluation.paper_rows import ROWS
from .plan import Value

_WAYS = {"image_to_text": "i2t", "text_to_image": "t2i"}
_OF_A_WAY = ("R@1", "R@5", "R@10", "mAP@R", "R-P", "PMRP", "PMRP 1K", "RPC2", "RPC2 1K")
# The name of a metric is its place in an entry.
METRICS = (*(f"{way} {name}" for way in _WAYS for name in _OF_A_WAY), "rsum", "log_circular_variance")
_TITLES = {"rsum": "RSUM", "log_circular_variance": "log var."}
SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    sign: f"\\{sign}" for sign in "&%$#_{}"
}


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


@dataclass(frozen=True)
class Line:
    """A variant under one protocol.

    Attributes:
        label: of the variant.
        values: what it sets.
        split, protocol: what was evaluated; no protocol where every seed failed.
        seeds: how many are finished.
        failed: how many are not.
        mean: over the finished seeds, by metric; without those that are not known.
        std: of the sample (n - 1), by metric; empty for a single seed.
        row: of the paper's values.
        paper: they, by metric.
    """

    label: str
    values: dict[str, Any]
    split: str
    protocol: str | None
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
            mean, std = _statistics(done)
            lines.append(Line(label, own[0].cell, own[0].split, protocol, len(done), failed, mean, std, row, paper))
    return lines


def _statistics(entries: Sequence[Entry]) -> tuple[dict[str, float], dict[str, float]]:
    mean, std = {}, {}
    for metric in METRICS:
        values = [value for entry in entries if (value := _number(entry, metric)) is not None]
        if values:
            mean[metric] = statistics.fmean(values)
        if len(values) > 1:
            std[metric] = statistics.stdev(values)
    return mean, std


def _number(entry: Entry, metric: str) -> float | None:
    block, _, name = metric.partition(" ")
    found = getattr(entry, block)
    return found.get(name) if name else found


def as_text(lines: Sequence[Line]) -> str:
    """Return the table for a terminal, one part a protocol."""
    parts = []
    for protocol in dict.fromkeys(line.protocol for line in lines):
        chosen = [line for line in lines if line.protocol == protocol]
        table = [_head(chosen), *(_cells(line, chosen) for line in chosen)]
        parts.append("\n".join([_title(chosen), *aligned(table)]))
    return "\n\n".join(parts)


def as_latex(lines: Sequence[Line]) -> str:
    """Return the table as LaTeX, for the package booktabs, one `tabular` a protocol."""
    parts = []
    for protocol in dict.fromkeys(line.protocol for line in lines):
        chosen = [line for line in lines if line.protocol == protocol]
        head, rows = _head(chosen), [_cells(line, chosen) for line in chosen]
        body = [" & ".join(_escape(cell) for cell in row) + r" \\" for row in [head, *rows]]
        parts.append(
            "\n".join(
                [
                    f"% {_title(chosen)}",
                    rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
                    r"\toprule",
                    body[0],
                    r"\midrule",
                    *body[1:],
                    r"\bottomrule",
                    r"\end{tabular}",
                ]
            )
        )
    return "\n\n".join(parts) + "\n"


def as_csv(lines: Sequence[Line]) -> str:
    """Return the table as CSV, every number in full: what a variant sets, then mean, std and paper by metric."""
    keys = list(dict.fromkeys(key for line in lines for key in line.values))
    kinds = ("mean", "std", "paper")
    header = ["label", *keys, "split", "protocol", "seeds", "failed", "row"]
    header += [f"{metric} {kind}" for metric in METRICS for kind in kinds]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for line in lines:
        facts = [line.split, line.protocol, line.seeds, line.failed, line.row]
        numbers = [getattr(line, kind).get(metric) for metric in METRICS for kind in kinds]
        writer.writerow([line.label, *(line.values.get(key) for key in keys), *facts, *numbers])
    return text.getvalue()


def plot(lines: Sequence[Line], file: str | Path) -> None:
    """Draw RSUM against the one value that is varied, with the standard deviation over seeds; the paper's beside it.

    Args:
        lines: of `summarise`.
        file: its ending says what it is: ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        RunError: matplotlib is not installed, or there is no RSUM.
        ValueError: `plotted_key` finds no key.
    """
    figure_class = _figure()
    key = plotted_key([line.values for line in lines])
    figure = figure_class(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    measured = [line for line in lines if "rsum" in line.mean]
    if not measured and any(line.seeds for line in lines):
        raise RunError("nothing can be drawn: no protocol of this data set has an RSUM; leave --plot out")
    for protocol in dict.fromkeys(line.protocol for line in measured):
        drawn = [line for line in measured if line.protocol == protocol]
        drawn.sort(key=lambda line: line.values[key])
        x, y = [line.values[key] for line in drawn], [line.mean["rsum"] for line in drawn]
        axes.errorbar(x, y, [line.std.get("rsum", 0.0) for line in drawn], marker="o", capsize=3, label=protocol)
        known = [line for line in drawn if "rsum" in line.paper]
        if known:
            label = f"paper, {ROWS[known[0].row or ''].title}"
            axes.plot([line.values[key] for line in known], [line.paper["rsum"] for line in known], "x", label=label)
    values = [line.values[key] for line in lines]
    if min(values) > 0 and max(values) >= 10 * min(values):
        axes.set_xscale("log")
    axes.set_xlabel(key)
    axes.set_ylabel("RSUM")
    if measured:
        axes.legend()
    with writing(Path(file)) as partial:
        figure.savefig(partial, format=Path(file).suffix[1:])


def plotted_key(values: Sequence[Mapping[str, Any]]) -> str:
    """Return the key that a plot is drawn over: the one whose value varies, or the first of those that vary together.

    Args:
        values: what each variant sets.

    Raises:
        ValueError: several vary, or their values are no numbers.
    """
    numeric = all(type(value) in (int, float) for cell in values for value in cell.values())
    together = all(len(set(cell.values())) == 1 for cell in values)
    same_keys = len({tuple(cell) for cell in values}) == 1
    if not (numeric and together and same_keys):
        raise ValueError("a plot needs a single varied key with numbers as its values")
    return next(iter(values[0]))


def require_plotting() -> None:
    """Raise RunError where matplotlib is not installed."""
    _figure()


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RunError("a plot needs matplotlib; install it with `pip install xret[plots]`") from error
    return Figure


def _title(lines: Sequence[Line]) -> str:
    seeds = max(line.seeds + line.failed for line in lines)
    title = f"split {lines[0].split}, protocol {lines[0].protocol or '-'}"
    if seeds > 1:
        title += f"; mean ± standard deviation over {seeds} seeds"
    if row := next((line.row for line in lines if line.row), None):
        title += f"; paper: {ROWS[row].title}"
    return title


def _shown(lines: Sequence[Line]) -> list[tuple[str, bool]]:
    """Return the metrics that are shown, each with whether a column of the paper's stands beside it."""
    known = [metric for metric in METRICS if any(metric in line.mean or metric in line.paper for line in lines)]
    return [(metric, any(metric in line.paper for line in lines)) for metric in known or ["rsum"]]


def _head(lines: Sequence[Line]) -> list[str]:
    head, ways = [""], set()
    for metric, paper in _shown(lines):
        way, _, name = metric.partition(" ")
        first = "" if way in ways else f"{_WAYS.get(way)} "
        ways.add(way)
        head += [first + name if name else _TITLES[metric], *(["paper"] if paper else [])]
    return [*head, "failed"] if any(line.failed for line in lines) else head


def _cells(line: Line, lines: Sequence[Line]) -> list[str]:
    cells = [line.label]
    for metric, paper in _shown(lines):
        mean, std = line.mean.get(metric), line.std.get(metric)
        cells.append("-" if mean is None else f"{mean:.2f}" + ("" if std is None else f" ± {std:.2f}"))
        if paper:
            cells.append(f"{line.paper[metric]:g}" if metric in line.paper else "-")
    return [*cells, str(line.failed)] if any(other.failed for other in lines) else cells


def _escape(text: str) -> str:
    return "".join(SPECIAL.get(sign, sign) for sign in text).replace("±", r"$\pm$")
