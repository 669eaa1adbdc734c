"""The table of an ablation: mean and standard deviation over seeds, the paper's value next to them."""

import csv
import io
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from ...pipeline.errors import RunError, require_packages
from ...pipeline.files import making_file
from ...pipeline.wording import aligned
from ..evaluation.paper_rows import ROWS
from ..evaluation.result import FEW, Result, too_few
from .plan import Value

PLOTS = (".png", ".svg", ".pdf")
_WAYS = {"image_to_text": "i2t", "text_to_image": "t2i"}
_TITLES = {"rsum": "RSUM", "log_circular_variance": "log var."}
_LATEX = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    | {sign: f"\\{sign}" for sign in "&%$#_{}"}
)


@dataclass(frozen=True)
class Entry:
    """A cell under one protocol: a variant's label and values, a seed and its run, and what came of it.

    ``result`` is None of a failed cell, which has an ``error``; ``paper`` are the values by metric of the paper's
    ``row``; ``views`` of each image, over which the mean is taken; ``hubness``: whether it is corrected, by a scale of
    the cell's own, in so far as one is better on ``val`` than none.
    """

    label: str
    values: dict[str, Value]
    seed: int
    run: str
    result: Result | None = None
    error: str | None = None
    paper: dict[str, float] = field(default_factory=dict)
    row: str | None = None
    views: int = 1
    hubness: bool = False

    @property
    def protocol(self) -> str | None:
        """How it is measured, in words; None of a failed cell."""
        words = ", hubness corrected" if self.hubness else ""
        return None if self.result is None else self.result.protocol + words

    @property
    def rsum(self) -> float | None:
        """RSUM in percent; None of a failed cell, and where the protocol has none."""
        return None if self.result is None else self.result.rsum

    @property
    def metrics(self) -> dict[str, float]:
        """What was found, by the name of the metric, such as ``image_to_text R@1``."""
        if self.result is None:
            return {}
        ways = {f"{way} {name}": value for way in _WAYS for name, value in getattr(self.result, way).items()}
        known = ways | {name: getattr(self.result, name) for name in _TITLES}
        return {name: value for name, value in known.items() if value is not None and not name.endswith(" medr")}

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it, the result's values beside the others."""
        own = asdict(self)
        result: dict[str, Any] = own.pop("result") or {}
        return own | result


@dataclass(frozen=True)
class Line:
    """A variant under one protocol (``-`` if no cell is finished), over so many finished and failed seeds.

    ``mean`` and ``std`` (of the sample, n - 1; empty for a single seed) are by metric; ``result`` is that of one seed,
    for split, ties and images.
    """

    label: str
    values: dict[str, Value]
    protocol: str
    result: Result | None
    views: int
    seeds: int
    failed: int
    mean: dict[str, float]
    std: dict[str, float]
    row: str | None
    paper: dict[str, float]

    @property
    def place(self) -> Any:
        """The first of the values that it sets: where it stands in a plot, in which all are one number."""
        return next(iter(self.values.values()))


def summarise(entries: Sequence[Entry]) -> list[Line]:
    """Return the lines of the entries of an ablation: protocol by protocol, the variants in their order."""
    protocols = dict.fromkeys(filter(None, (entry.protocol for entry in entries))) or ["-"]
    by_label: dict[str, list[Entry]] = {}
    for entry in entries:
        by_label.setdefault(entry.label, []).append(entry)
    return [_line(protocol, variant) for protocol in protocols for variant in by_label.values()]


def _line(protocol: str, entries: Sequence[Entry]) -> Line:
    done = [entry for entry in entries if entry.protocol == protocol]
    known: dict[str, list[float]] = {}
    for entry in done:
        for name, value in entry.metrics.items():
            known.setdefault(name, []).append(value)
    first = (done or entries)[0]
    return Line(
        label=first.label,
        values=first.values,
        protocol=protocol,
        result=first.result if done else None,
        views=first.views,
        seeds=len(done),
        failed=sum(entry.error is not None for entry in entries),
        mean={name: statistics.fmean(values) for name, values in known.items()},
        std={name: statistics.stdev(values) for name, values in known.items() if len(values) > 1},
        row=first.row,
        paper=first.paper,
    )


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
    """Return the table as CSV, every number in full: what varies, then mean, std and paper of each known metric."""
    keys = list(dict.fromkeys(key for line in lines for key in line.values))
    columns = [
        (name, kind) for name in _names(lines) for kind in ("mean", "std", "paper")
        if any(name in getattr(line, kind) for line in lines)
    ]  # fmt: skip
    facts = ("protocol", "views", "seeds", "failed", "row")
    rows: list[list[Any]] = [["label", *keys, *facts, *(f"{name} {kind}" for name, kind in columns)]]
    for line in lines:
        own = [line.label, *(line.values.get(key) for key in keys), *(getattr(line, fact) for fact in facts)]
        rows.append([*own, *(getattr(line, kind).get(name) for name, kind in columns)])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def save(lines: Sequence[Line], file: Path) -> None:
    """Write the table to a file: ``.csv``, ``.tex``, or as a plot ``.png``, ``.svg`` or ``.pdf``; see `plot`."""
    with making_file(file, RunError) as partial:
        if file.suffix in PLOTS:
            plot(lines).savefig(partial, format=file.suffix[1:])
        else:
            partial.write_text({".csv": as_csv, ".tex": as_latex}[file.suffix](lines), encoding="utf-8")


def require_saveable(file: Path, values: Sequence[dict[str, Value]]) -> None:
    """Raise RunError for a file that `save` cannot write for variants that set these values, before any training.

    A plot needs matplotlib, and one key, or several together, varied with numbers.
    """
    if file.suffix not in (".csv", ".tex", *PLOTS):
        raise RunError(f"{file} must end in .csv, .tex, {', '.join(PLOTS)}")
    if file.suffix in PLOTS:
        numeric = all(type(value) in (int, float) for cell in values for value in cell.values())
        if not numeric or len({tuple(cell) for cell in values}) != 1 or any(len({*v.values()}) != 1 for v in values):
            raise RunError(f"{file}: a plot needs a single varied key with numbers as its values")
        require_packages("a plot needs", {"matplotlib": "matplotlib"}, "plots")


def plot(lines: Sequence[Line]) -> Any:
    """Return a matplotlib figure of RSUM against the one varied key: bars over seeds, the paper's values, baselines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    measured = [line for line in lines if "rsum" in line.mean]
    for protocol, own in groupby(measured, attrgetter("protocol")):
        _draw(axes, f"protocol {protocol}", list(own))
    varied = [line for line in lines if line.values]
    values = sorted({line.place for line in varied})
    if values and values[0] > 0 and values[-1] > 10 * values[0]:
        axes.set_xscale("log")
    if len(values) <= 8:
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
    axes.set_xlabel(" = ".join(varied[0].values) if varied else "")
    axes.set_ylabel("RSUM: sum of six recalls in percent")
    if measured:
        axes.set_title(_title(measured))
        figure.legend(loc="outside lower center")
    return figure


def _draw(axes: Any, title: str, lines: Sequence[Line]) -> None:
    points = sorted((line for line in lines if line.values), key=lambda line: line.place)
    seeds = max((line.seeds for line in points), default=0)
    label = "one seed" if seeds < 2 else f"mean of {seeds} seeds ± standard deviation"
    bars = [line.std.get("rsum", 0.0) for line in points] if seeds > 1 else None
    x, y = [line.place for line in points], [line.mean["rsum"] for line in points]
    axes.errorbar(x, y, bars, marker="o", capsize=3, label=f"{title}: {label}")
    if known := {line.place: line.paper["rsum"] for line in points if "rsum" in line.paper}:
        axes.plot([*known], [*known.values()], "x", label=f"{title}: the paper's value")
    for line in (line for line in lines if not line.values):
        axes.axhline(line.mean["rsum"], linestyle=":", label=f"{title}: {line.label}")


def _names(lines: Sequence[Line]) -> list[str]:
    found = dict.fromkeys(name for line in lines for name in (*line.mean, *line.paper))
    return [*(name for name in found if name not in _TITLES), *(name for name in _TITLES if name in found)]


def _tables(lines: Sequence[Line]) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the title and the rows of each protocol's table, its head first."""
    for own in (list(group) for _, group in groupby(lines, attrgetter("protocol"))):
        columns = [["", *(line.label for line in own)]]
        for metric in _names(own) or ["rsum"]:
            columns += _columns(metric, own)
        if len({line.views for line in own}) > 1:
            columns.append(["views", *(str(line.views) for line in own)])
        if any(line.failed for line in own):
            columns.append(["failed", *(str(line.failed) for line in own)])
        yield _title(own), [*map(list, zip(*columns, strict=True))]


def _columns(metric: str, lines: Sequence[Line]) -> Iterator[list[str]]:
    way, _, name = metric.partition(" ")
    marks = [" *" if metric == "rsum" and below(line, lines) else "" for line in lines]
    cells = [_mean(line, metric) + mark for line, mark in zip(lines, marks, strict=True)]
    yield [f"{_WAYS[way]} {name}" if name else _TITLES[metric], *cells]
    if any(metric in line.paper for line in lines):
        yield ["paper", *(f"{line.paper[metric]:g}" if metric in line.paper else "-" for line in lines)]


def below(line: Line, lines: Sequence[Line]) -> bool:
    """Return whether a line's RSUM lies below the best of its protocol's `lines` by more than both spread over seeds.

    That is the deviation of the difference of two seeds; a line of a single seed has none, and is never below.
    """
    spread = [one for one in lines if "rsum" in one.std]
    if "rsum" not in line.std:
        return False
    best = max(spread, key=lambda one: one.mean["rsum"])
    return best.mean["rsum"] - line.mean["rsum"] > math.hypot(best.std["rsum"], line.std["rsum"])


def _mean(line: Line, metric: str) -> str:
    if metric not in line.mean:
        return "-"
    return f"{line.mean[metric]:.2f}" + (f" ± {line.std[metric]:.2f}" if metric in line.std else "")


def _title(lines: Sequence[Line]) -> str:
    done = [(line.result, line) for line in lines if line.result]
    if not done:
        return "no cell is finished"
    result, first = done[0]
    title = f"split {result.split}, protocol {first.protocol}, ties {result.ties}"
    if first.views > 1 and {line.views for line in lines} == {first.views}:
        title += f", mean over {first.views} views of each image"
    if (seeds := max(line.seeds + line.failed for line in lines)) > 1:
        title += f"; mean ± sample standard deviation over {seeds} seeds"
    if any(below(line, lines) for line in lines):
        title += "; * is below the best by more than the spread over seeds"
    if row := next((line.row for line in lines if line.row), None):
        caveat = max((line.result.caveat for line in lines if line.paper and line.result), default="")
        title += f"; paper: {ROWS[row].title}{caveat}"
    return title + (f"; {too_few(result.images)} to tell variants apart" if result.images < FEW else "")
