"""What `diagnose` finds out about a run, as tables and plots."""

from dataclasses import dataclass, field
from functools import partial

from ..diagnostics import Diagnosis
from ..diagnostics.circular_variance import CircularVariance
from ..diagnostics.coefficients import Coefficients
from ..diagnostics.cost import Cost
from ..diagnostics.crops import Crops
from ..diagnostics.elements import Elements
from ..diagnostics.uncertainty import UncertainImage, Uncertainty
from ..figures import Plot, Table, heat_map, number
from ..pictures import Pictures
from ..plots import bars, curves
from .crops import Triplet, triplets
from .examples import Item, described

SHOWN = 4  # samples at either end of the uncertainty
RANKS = 10  # whose coefficients are printed
TITLES = {
    "circular_variance": "circular variance",
    "elements": "single elements",
    "crops": "uncertainty against ambiguity",
    "gpo": "coefficients of GPO",
}
MAPS = {
    "matching": "images and their own captions",
    "any": "all images and all captions",
    "image": "within the sets of images",
    "text": "within the sets of captions",
}
BOTH = "image\N{NO-BREAK SPACE}↓ caption\N{NO-BREAK SPACE}→"
CORNERS = {
    "image": "image\N{NO-BREAK SPACE}↓ image\N{NO-BREAK SPACE}→",
    "text": "caption\N{NO-BREAK SPACE}↓ caption\N{NO-BREAK SPACE}→",
}


@dataclass
class Shown:
    """A run's diagnostics on the page, by kind: what several runs have of a kind stands side by side.

    Attributes:
        facts: short ones, name and value.
        heat_maps: matrices over elements.
        plots: drawings.
        tables: other numbers.
        uncertain: samples by title.
        triplets: crops of a few images.
        reasons: what does not apply, and why.
    """

    facts: list[tuple[str, str]] = field(default_factory=list)
    heat_maps: dict[str, Table] = field(default_factory=dict)
    plots: dict[str, Plot] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    uncertain: dict[str, list[Item]] = field(default_factory=dict)
    triplets: list[Triplet] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)


def diagnosis(found: Diagnosis, pictures: Pictures | None) -> Shown:
    """Turn the result of `diagnose` into what the page shows of it, or a terminal, which has no pictures."""
    page = Shown(reasons={TITLES.get(key, key): why for key, why in found.reasons.items()})
    _cost(page, found.cost)
    if found.circular_variance:
        _variance(page, found.circular_variance)
    if found.elements:
        _elements(page, found.elements)
    if found.gpo:
        _gpo(page, found.gpo)
    if found.uncertainty:
        _uncertainty(page, found.uncertainty, pictures)
    if found.crops:
        _crops(page, found.crops)
        page.triplets = triplets(found.crops, pictures) if pictures else []
    return page


def _cost(page: Shown, cost: Cost) -> None:
    page.facts.append(("multiply-accumulates a pair", f"{cost.macs_a_pair:,}"))
    for shape, what in ((cost.image, "an image"), (cost.text, "a caption")):
        page.facts.append((f"shape of {what}", " × ".join(f"{size:,}" for size in shape)))


def _variance(page: Shown, variance: CircularVariance) -> None:
    forms = (("ln of 1 − ‖mean‖ (SetDiv)", variance.log), ("ln of 1 − ‖mean‖² (MaxMatch)", variance.log_squared))
    rows = [[title, number(form.image), number(form.text), number(form.both)] for title, form in forms]
    caption = "Circular variance within the sets, natural logarithms; the larger, the more diverse."
    page.tables["circular variance"] = Table(caption, ["form", "images", "captions", "both"], rows)


def _elements(page: Shown, found: Elements) -> None:
    rsum = found.rsum
    for key, what in MAPS.items():
        caption, cosines = f"Mean cosine of elements, {what}.", getattr(found.similarity, key)
        page.heat_maps[key] = heat_map(caption, CORNERS.get(key, BOTH), cosines, whole=(0.0, 1.0))
    caption = "How often (%) two elements are the most similar ones of an image and its own caption."
    percent = [[100 * share for share in line] for line in found.wins.pairs]
    page.heat_maps["wins"] = heat_map(caption, BOTH, percent, digits=1)
    whole = f"all elements give {number(rsum.all)}."
    caption = f"RSUM with one element of the image and one of the caption; {whole}"
    page.heat_maps["rsum"] = heat_map(caption, BOTH, rsum.pairs, digits=1)
    for what, one in (("image", rsum.image), ("caption", rsum.text)):
        series = [("only this element", one.only)]
        if one.without:
            series.append(("all but this element", one.without))
        labels = [str(k) for k in range(1, len(one.only) + 1)]
        columns = [f"{what} element", *(title for title, _ in series)]
        rows = [[label, *(number(values[k]) for _, values in series)] for k, label in enumerate(labels)]
        how = f"RSUM with a single {what} element, and with each left out, the other side whole"
        caption = f"{how}; {whole}"
        draw = partial(bars, labels, series, "RSUM (sum of six %)", x=f"{what} element")
        page.plots[f"elements {what}"] = Plot(draw, "Bar chart", caption, Table(caption, columns, rows))


def _gpo(page: Shown, found: Coefficients) -> None:
    for what, part in [*(("image", part) for part in found.image), *(("caption", part) for part in found.text)]:
        usual = sorted(part.lengths, key=lambda one: -one.samples)[:4]
        series = [
            (f"{one.length} rows", [float(rank) for rank in range(1, one.length + 1)], one.coefficients)
            for one in sorted(usual, key=lambda one: one.length)
        ]
        of = f" ({part.part})" if part.part else ""
        caption = (
            f"What GPO of the {what} branch{of} weighs each rank with, from the largest value to the smallest, "
            f"{'for the most frequent numbers of rows' if series[1:] else f'of {series[0][0]}'}."
        )
        draw = partial(curves, series, "rank of the value", "coefficient", whole=True, marked=False)
        width = min(RANKS, max(len(values) for _, _, values in series))
        rows = [[title, *_first([number(v, 3) for v in values], width)] for title, _, values in series]
        table = Table(caption, ["rank", *map(str, range(1, width + 1)), "last"], rows)
        page.plots[f"gpo {what}{of}"] = Plot(draw, "Line chart", caption, table)


def _first(cells: list[str], width: int) -> list[str]:
    """Return the first cells, none where there are fewer than `width`, and the last one."""
    return [*cells[:width], *[""] * (width - len(cells)), cells[-1]]


def _uncertainty(page: Shown, found: Uncertainty, pictures: Pictures | None) -> None:
    deciles = [float(k) for k in range(0, 101, 10)]
    for what, one in (("image", found.image), ("caption", found.text)):
        caption = (
            f"Uncertainty, the log-determinant of the covariance, of {what}s (mean {number(one.mean)}): the share of "
            "samples below each value."
        )
        axis = f"uncertainty of {what}s (log-determinant)"
        draw = partial(curves, [(f"{what}s", one.deciles, deciles)], axis, f"{what}s below (%)")
        header = [f"{what}s below (%)", *(number(share, 0) for share in deciles)]
        table = Table(caption, header, [["uncertainty", *map(number, one.deciles)]])
        page.plots[f"uncertainty {what}"] = Plot(draw, "Line chart", caption, table)
    for title, images, captions in (
        ("Least", found.image.lowest, found.text.lowest),
        ("Most", found.image.highest, found.text.highest),
    ):
        page.uncertain[f"{title} uncertain images"] = [_image(one, pictures) for one in images[:SHOWN]]
        page.uncertain[f"{title} uncertain captions"] = [
            Item(one.caption, note=number(one.uncertainty)) for one in captions[:SHOWN]
        ]


def _image(one: UncertainImage, pictures: Pictures | None) -> Item:
    text = one.captions[0] if one.captions else ""
    picture = pictures.show(one.file_name, described(one.id, text)) if pictures else None
    return Item(text, one.id, picture, note=number(one.uncertainty))


def _crops(page: Shown, found: Crops) -> None:
    areas = [100 * one.area for one in found.thresholds]
    known = [(one, one.uncertainty) for one in found.thresholds if one.uncertainty]
    for side, what in (("image", "crop"), ("text", "caption")) if known else ():
        series = [(f"{what} {letter}", areas, [values[side][letter] for _, values in known]) for letter in "AC"]
        caption = (
            f"Uncertainty of {what}s against ambiguity. A is a region smaller than the given share of the image, C the "
            f"box around it and another one, B; means over the triplets of {found.images:,} images."
        )
        axes = "largest area of A and B (% of the image)", f"uncertainty of {what}s (log-det.)"
        header = ["largest area (%)", *(name for name, _, _ in series)]
        rows = [[number(one.area * 100, 0), *(number(values[side][a]) for a in "AC")] for one, values in known]
        table = Table(caption, header, rows)
        page.plots[f"crops {what}"] = Plot(partial(curves, series, *axes), "Line chart", caption, table)
    asks = [f"{query} {letter} asks" for query in ("crop", "caption") for letter in "AC"]
    rows = []
    for area, one in zip(areas, found.thresholds, strict=True):
        chosen = one.accuracy.image_to_text, one.accuracy.text_to_image
        rows.append([number(area, 0), f"{one.triplets:,}", *(number(way[letter]) for way in chosen for letter in "AC")])
    caption = (
        "Binary selection, accuracy in percent; chance is 50. Crop A asks: which of the captions A and C of its image "
        "is its own? Caption A asks for its crop likewise."
    )
    page.tables["crops"] = Table(caption, ["largest area (%)", "triplets", *asks], rows)
