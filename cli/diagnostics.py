"""What `xret eval --diagnostics` prints below the usual table."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..pipeline.wording import counted

if TYPE_CHECKING:
    from ..heads.report.diagnostics import Diagnosis
    from ..heads.report.diagnostics.circular_variance import CircularVariance
    from ..heads.report.diagnostics.coefficients import Coefficients
    from ..heads.report.diagnostics.cost import Cost
    from ..heads.report.diagnostics.crops import Crops
    from ..heads.report.diagnostics.elements import Elements
    from ..heads.report.diagnostics.uncertainty import Uncertainty

LENGTHS = 3  # of a GPO, the most frequent
COEFFICIENTS = 10  # of a length, from the largest value's
GALLERY = 3  # samples at either end of the uncertainty


def format_diagnostics(found: "Diagnosis") -> str:
    """Return a diagnosis as lines for a terminal."""
    lines: list[str] = []
    for key, format_one in FORMATS.items():
        lines.append("")
        part = getattr(found, key)
        if part is None:
            lines.append(f"{key.replace('_', ' ')}: none, {found.reasons[key]}")
        else:
            lines += format_one(part)
    return "\n".join(lines)


def _circular_variance(found: "CircularVariance") -> list[str]:
    lines = [_row("circular variance, natural log", ["image", "text", "both"])]
    for name, one in (("of 1 - |mean| (SetDiv)", found.log), ("of 1 - |mean|^2 (MaxMatch)", found.log_squared)):
        lines.append(_row(name, _numbers((one.image, one.text, one.both))))
    return lines


def _elements(found: "Elements") -> list[str]:
    rsum, wins, cosines = found.rsum, found.wins, found.similarity
    lines = [_row("element", map(str, range(1, 1 + max(len(rsum.image.only), len(rsum.text.only)))))]
    for side, one, won in (("image", rsum.image, wins.image), ("text", rsum.text, wins.text)):
        lines.append(_row(f"RSUM, {side}: only this one", _numbers(one.only, 1)))
        if one.without is not None:
            lines.append(_row(f"RSUM, {side}: without this one", _numbers(one.without, 1)))
        lines.append(_row(f"nearest in a match, {side}, %", _numbers((100 * share for share in won), 1)))
    lines.append(f"RSUM of the whole split with all elements {rsum.all:.1f}")
    for title, values in (
        ("mean cosine of the elements of an image", cosines.image),
        ("mean cosine of the elements of a caption", cosines.text),
        ("mean cosine, image (rows) with its own caption", cosines.matching),
        ("mean cosine, image (rows) with any caption", cosines.any),
    ):
        lines.append(_row(title, map(str, range(1, 1 + len(values[0])))))
        lines += [_row(str(k), [f"{value:z.2f}" for value in row]) for k, row in enumerate(values, 1)]
    return lines


def _uncertainty(found: "Uncertainty") -> list[str]:
    lines = [_row("uncertainty, log-determinant", ["mean", "least", "median", "most"])]
    for side, one in (("image", found.image), ("text", found.text)):
        lines.append(_row(side, _numbers((one.mean, *(one.deciles[place] for place in (0, 5, 10))))))
    for what, shown, name in (("images", found.image, "file_name"), ("captions", found.text, "caption")):
        for end in ("highest", "lowest"):
            lines.append(f"{end} of {what}")
            samples: Sequence[Any] = getattr(shown, end)[:GALLERY]
            lines += [f"  {one.uncertainty:9.2f}  {getattr(one, name)}" for one in samples]
    return lines


def _crops(found: "Crops") -> list[str]:
    """Crop C shows what A and B do, and its caption says both."""
    heads = ("crop A", "crop C", "text A", "text C")
    lines = [_row(f"crops of {counted(found.images, 'image')}, below", ["triplets", *heads])]
    for one in found.thresholds:
        if one.uncertainty is not None:
            values = [one.uncertainty[side][letter] for side in ("image", "text") for letter in "AC"]
            lines.append(_row(f"{one.area:.0%}: uncertainty", [str(one.triplets), *_numbers(values)]))
    for one in found.thresholds:
        chosen = one.accuracy.image_to_text, one.accuracy.text_to_image
        values = [way[letter] for way in chosen for letter in "AC"]
        lines.append(_row(f"{one.area:.0%}: chosen rightly, %", [str(one.triplets), *_numbers(values, 1)]))
    return lines


def _gpo(found: "Coefficients") -> list[str]:
    lines = ["learned pooling coefficients, from the largest value's"]
    for side, part in [*(("image", part) for part in found.image), *(("text", part) for part in found.text)]:
        frequent = sorted(part.lengths, key=lambda one: -one.samples)[:LENGTHS]
        for one in sorted(frequent, key=lambda one: one.length):
            values = _numbers(one.coefficients[:COEFFICIENTS], 3)
            more = [] if one.length <= COEFFICIENTS else ["…", f"{one.coefficients[-1]:.3f}"]
            lines.append(_row(f"{side} {part.part}, {counted(one.length, 'row')}", [*values, *more], 7))
    return lines


def _cost(found: "Cost") -> list[str]:
    image, text = (" x ".join(f"{size:,}" for size in shape) for shape in (found.image, found.text))
    return [
        f"a pair costs {found.macs_a_pair:,} multiply-accumulates (SetDiv calls them FLOPs, torch counts two each);"
        f" an image is {image}, a caption {text}"
    ]


def _numbers(values: Iterable[float], digits: int = 2) -> list[str]:
    return [f"{value:.{digits}f}" for value in values]


def _row(name: str, cells: Iterable[str], width: int = 9) -> str:
    return f"{name:46}" + "".join(f"{cell:>{width}}" for cell in cells)


FORMATS: dict[str, Callable[[Any], list[str]]] = {
    "circular_variance": _circular_variance,
    "elements": _elements,
    "uncertainty": _uncertainty,
    "crops": _crops,
    "gpo": _gpo,
    "cost": _cost,
}
