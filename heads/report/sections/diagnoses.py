"""What `diagnose` finds out about a run, as tables and plots."""

from dataclasses import dataclass, field
from typing import Any

from ..figures import Plot, Table, heat_map, number
from ..pictures import Pictures
from ..plots import bars, curves
from .crops import Triplet, triplets
from .examples import Item, described

SHOWN = 4  # samples at either end of the uncertainty
SIDES = {"image": "image", "text": "caption"}
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
class Diagnosis:
    """A run's diagnostics on the page.

    Attributes:
        name: of the run.
        facts: short ones, name and value.
        heat_maps: matrices over elements.
        plots: drawings.
        tables: other numbers.
        uncertain: samples by title.
        triplets: crops of a few images.
        reasons: what does not apply, and why.
    """

    name: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    heat_maps: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    uncertain: dict[str, list[Item]] = field(default_factory=dict)
    triplets: list[Triplet] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def diagnosis(name: str, found: dict[str, Any], pictures: Pictures) -> Diagnosis:
    """Turn the result of `diagnose` into what the page shows of it."""
    page = Diagnosis(name, reasons=[f"{TITLES.get(key, key)}: {why}" for key, why in found["reasons"].items()])
    if found.get("cost"):
        _cost(page, found["cost"])
    if found.get("circular_variance"):
        _variance(page, found["circular_variance"])
    if found.get("elements"):
        _elements(page, found["elements"])
    if found.get("gpo"):
        _gpo(page, found["gpo"])
    if found.get("uncertainty"):
        _uncertainty(page, found["uncertainty"], pictures)
    if found.get("crops"):
        _crops(page, found["crops"])
        page.triplets = triplets(found["crops"], pictures)
    return page


def _cost(page: Diagnosis, cost: dict[str, Any]) -> None:
    page.facts.append(("multiply-accumulates a pair", f"{cost['macs_a_pair']:,}"))
    for side, what in (("image", "an image"), ("text", "a caption")):
        page.facts.append((f"shape of {what}", " × ".join(map(str, cost[side]))))


def _variance(page: Diagnosis, variance: dict[str, dict[str, float]]) -> None:
    rows = [
        [title, *(number(variance[form][side]) for side in ("image", "text", "both"))]
        for form, title in (("log", "ln of 1 − ‖mean‖ (SetDiv)"), ("log_squared", "ln of 1 − ‖mean‖² (MaxMatch)"))
    ]
    caption = f"{page.name}: circular variance within the sets, natural logarithms; the larger, the more diverse."
    page.tables.append(Table(caption, ["form", "images", "captions", "both"], rows))


def _elements(page: Diagnosis, found: dict[str, Any]) -> None:
    cosines, wins, rsum = found["similarity"], found["wins"], found["rsum"]
    for key, what in MAPS.items():
        page.heat_maps.append(
            _by_elements(f"{page.name}: mean cosine of elements, {what}.", cosines[key], CORNERS.get(key, BOTH))
        )
    caption = f"{page.name}: how often (%) two elements are the most similar ones of an image and its own caption."
    page.heat_maps.append(_by_elements(caption, [[100 * share for share in line] for line in wins["pairs"]], full=100))
    caption = (
        f"{page.name}: RSUM with one element of the image and one of the caption; all elements give "
        f"{number(rsum['all'])}."
    )
    page.heat_maps.append(_by_elements(caption, rsum["pairs"], full=max(1e-9, rsum["all"])))
    for side, what in SIDES.items():
        series = [("only this element", rsum[side]["only"])]
        if rsum[side]["without"]:
            series.append(("all but this element", rsum[side]["without"]))
        labels = [str(k) for k in range(1, len(rsum[side]["only"]) + 1)]
        columns = [f"{what} element", *(title for title, _ in series)]
        rows = [[label, *(number(values[k]) for _, values in series)] for k, label in enumerate(labels)]
        caption = (
            f"{page.name}: RSUM with a single {what} element, and with each left out, the other side whole; "
            f"all elements give {number(rsum['all'])}."
        )
        svg = bars(labels, series, "RSUM (sum of six %)", x=f"{what} element")
        page.plots.append(Plot(svg, "Bar chart", caption, Table(caption, columns, rows)))


def _by_elements(caption: str, values: list[list[float]], corner: str = BOTH, full: float = 1.0) -> Table:
    columns = [str(k) for k in range(1, len(values[0]) + 1)]
    rows = [str(k) for k in range(1, len(values) + 1)]
    return heat_map(caption, corner, columns, rows, values, 2 if full == 1 else 1, full)


def _gpo(page: Diagnosis, found: dict[str, Any]) -> None:
    for side, what in SIDES.items():
        for part in found[side] or []:
            usual = sorted(part["lengths"], key=lambda one: -one["samples"])[:4]
            series = [
                (
                    f"{one['length']} rows",
                    [float(rank) for rank in range(1, one["length"] + 1)],
                    one["coefficients"],
                )
                for one in sorted(usual, key=lambda one: one["length"])
            ]
            of = f" ({part['part']})" if part["part"] else ""
            caption = (
                f"{page.name}: what GPO of the {what} branch{of} weighs each rank with, from the largest value to the "
                f"smallest, {'for the most frequent numbers of rows' if series[1:] else f'of {series[0][0]}'}."
            )
            svg = curves(series, "rank of the value", "coefficient", whole=True, marked=False)
            page.plots.append(Plot(svg, "Line chart", caption))


def _uncertainty(page: Diagnosis, found: dict[str, Any], pictures: Pictures) -> None:
    deciles = [float(k) for k in range(0, 101, 10)]
    for side, what in SIDES.items():
        caption = (
            f"{page.name}: uncertainty, the log-determinant of the covariance, of {what}s (mean "
            f"{number(found[side]['mean'])}): the share of samples below each value."
        )
        svg = curves([(f"{what}s", found[side]["deciles"], deciles)], f"uncertainty of {what}s (log-determinant)",
                     f"{what}s below (%)")  # fmt: skip
        page.plots.append(Plot(svg, "Line chart", caption))
    for end, title in (("lowest", "Least"), ("highest", "Most")):
        page.uncertain[f"{title} uncertain images"] = [_image(one, pictures) for one in found["image"][end][:SHOWN]]
        page.uncertain[f"{title} uncertain captions"] = [
            Item(one["caption"], note=number(one["uncertainty"])) for one in found["text"][end][:SHOWN]
        ]


def _image(one: dict[str, Any], pictures: Pictures) -> Item:
    text = one["captions"][0] if one["captions"] else ""
    picture = pictures.show(one["file_name"], described(one["id"], text))
    return Item(text, one["id"], picture, note=number(one["uncertainty"]))


def _crops(page: Diagnosis, found: dict[str, Any]) -> None:
    thresholds = found["thresholds"]
    if not thresholds:
        return
    areas = [100 * one["area"] for one in thresholds]
    for side, what in (("image", "crop"), ("text", "caption")):
        if not all(one["uncertainty"] for one in thresholds):
            break
        series = [(f"{what} {which}", areas, [one["uncertainty"][side][which] for one in thresholds]) for which in "AC"]
        caption = (
            f"{page.name}: uncertainty of {what}s against ambiguity. A is a region smaller than the given share of the "
            f"image, C the box around it and another one, B; means over the triplets of {found['images']:,} images."
        )
        svg = curves(series, "largest area of A and B (% of the image)", f"uncertainty of {what}s (log-det.)")
        page.plots.append(Plot(svg, "Line chart", caption))
    ways = (("image_to_text", "crop"), ("text_to_image", "caption"))
    header = ["largest area (%)", "triplets", *(f"{query} {which} asks" for _, query in ways for which in "AC")]
    rows = [
        [
            number(area, 0),
            f"{one['triplets']:,}",
            *(number(one["accuracy"][way][which]) for way, _ in ways for which in "AC"),
        ]
        for area, one in zip(areas, thresholds, strict=True)
    ]
    caption = (
        f"{page.name}: binary selection, accuracy in percent; chance is 50. Crop A asks: which of the captions A and C "
        "of its image is its own? Caption A asks for its crop likewise."
    )
    page.tables.append(Table(caption, header, rows))
