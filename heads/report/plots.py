"""Plots as SVG that the page can hold: text stays text, colours are those of the page, light or dark.

Matplotlib draws with stand-in colours, which become variables of the page's style sheet.
"""

import hashlib
import io
import re
from collections.abc import Sequence
from typing import Any

INK, FAINT = "#010101", "#020202"
SERIES = tuple(f"#0301{number:02x}" for number in range(1, 9))
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTH, HEIGHT = 4.2, 2.9  # inches: narrow, so that a phone need not shrink the text

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "xret",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # names of runs may hold dollars
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "figure.constrained_layout.use": True,
}


def curves(
    series: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    x: str,
    y: str,
    *,
    log: bool = False,
    whole: bool = False,
    marked: bool = True,
) -> str:
    """Draw lines.

    Args:
        series: name, positions and values of each line.
        x: what the positions are.
        y: what the values are, with their unit.
        log: a logarithmic scale of values; they must be above 0.
        whole: positions are whole numbers.
        marked: a marker on every value.
    """

    def draw(axes: Any) -> None:
        for number, (name, xs, ys) in enumerate(series):
            axes.plot(xs, ys, label=_label(name), color=_colour(number), linestyle=DASHES[number % 4],
                      marker=MARKERS[number % 8] if marked else None, markersize=4)  # fmt: skip
        if log:
            axes.set_yscale("log", subs=[2, 5])
            axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
        # Of numbers as long as −1234.5 five have room.
        axes.xaxis.get_major_locator().set_params(**({"integer": True} if whole else {"nbins": 4}))

    return _drawn(draw, x, y, legend=len(series) > 1)


def bars(labels: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], y: str, *, x: str = "") -> str:
    """Draw groups of bars.

    Args:
        labels: of the groups.
        series: name and value a group.
        y: what the values are, with their unit.
        x: what the groups are.
    """

    def draw(axes: Any) -> None:
        width = 0.8 / len(series)
        for number, (name, values) in enumerate(series):
            at = [group - 0.4 + width * (number + 0.5) for group in range(len(labels))]
            axes.bar(at, values, width * 0.92, label=_label(name), color=_colour(number))
        axes.set_xticks(range(len(labels)), labels)

    return _drawn(draw, x, y, legend=len(series) > 1)


def _label(name: str) -> str:
    """Return a name as a legend shows it; one with an underscore first would be left out."""
    return f"\N{ZERO WIDTH SPACE}{name}" if name.startswith("_") else name


def _colour(number: int) -> str:
    return SERIES[number % len(SERIES)]


def _drawn(draw: Any, x: str, y: str, *, legend: bool) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, HEIGHT))
        axes = figure.subplots()
        draw(axes)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if legend:
            handles, _ = axes.get_legend_handles_labels()
            figure.set_size_inches(WIDTH, HEIGHT + 0.22 * -(-len(handles) // 2))
            figure.legend(loc="outside upper left", ncols=2, handlelength=2.2, columnspacing=1.2)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_the_page(file.getvalue())


def _for_the_page(svg: str) -> str:
    """Leave the drawing alone, with the page's colours and font; the page gives it an id and a description."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.S)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.S)
    svg = re.sub(r'font(-family)?: ([\d.]+px )?[^;"]*sans-serif[^;"]*', _font, svg)
    svg = svg.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")
    for number, colour in enumerate(SERIES, 1):
        svg = svg.replace(colour, f"var(--series-{number})")
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    own = hashlib.sha256(svg.encode()).hexdigest()[:8]  # two drawings of a page must not share an id
    svg = re.sub(r' id="([^"]+)"', lambda found: f' id="{own}-{found[1]}"' if found[1] in used else "", svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{own}-", svg)
    opening, _, rest = svg.partition(">")
    (box,) = re.findall(r'viewBox="[^"]+"', opening)
    width = float(box.split()[2])
    return f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {box} style="max-width:{width * 4 / 3:.0f}px">{rest}'


def _font(found: re.Match[str]) -> str:
    return f"font-size: {found[2].strip()}" if found[2] else "font-style: normal"
