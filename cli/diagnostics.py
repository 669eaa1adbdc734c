"""What `xret eval --diagnostics` prints below the usual table."""

from collections.abc import Sequence
from typing import Any

from ..pipeline.wording import counted

LENGTHS = 3  # of a GPO, the most frequent
COEFFICIENTS = 10  # of a length, from the largest value's
GALLERY = 3  # samples at either end of the uncertainty


def format_diagnostics(found: dict[str, Any]) -> str:
    """Return what `heads.report.diagnostics.diagnose` found as lines for a terminal."""
    lines: list[str] = []
    for key, format_one in FORMATS.items():
        lines.append("")
        if found[key] is None:
            lines.append(f"{key.replace('_', ' ')}: none, {found['reasons'][key]}")
        else:
            lines += format_one(found[key])
    return "\n".join(lines)


def _circular_variance(found: dict[str, Any]) -> list[str]:
    names = {"log": "of 1 - |mean| (SetDiv)", "log_squared": "of 1 - |mean|^2 (MaxMatch)"}
    lines = [_row("circular variance, natural log", ["image", "text", "both"])]
    return lines + [_row(name, [f"{value:.2f}" for value in found[key].values()]) for key, name in names.items()]


def _elements(found: dict[str, Any]) -> list[str]:
    rsum, wins, cosines = found["rsum"], found["wins"], found["similarity"]
    most = max(len(rsum[side]["only"]) for side in ("image", "text"))
    lines = [_row("element", [str(number + 1) for number in range(most)])]
    for side in ("image", "text"):
        for how in ("only", "without"):
            if rsum[side][how] is not None:
                lines.append(_row(f"RSUM, {side}: {how} this one", [f"{value:.1f}" for value in rsum[side][how]]))
        lines.append(_row(f"nearest in a match, {side}, %", [f"{100 * share:.1f}" for share in wins[side]]))
    lines.append(f"RSUM of the whole split with all elements {rsum['all']:.1f}")
    titles = {
        "image": "mean cosine of the elements of an image",
        "text": "mean cosine of the elements of a caption",
        "matching": "mean cosine, image (rows) with its own caption",
        "any": "mean cosine, image (rows) with any caption",
    }
    for key, title in titles.items():
        lines.append(_row(title, [str(number + 1) for number in range(len(cosines[key][0]))]))
        lines += [_row(str(k), [f"{value:z.2f}" for value in row]) for k, row in enumerate(cosines[key], 1)]
    return lines


def _uncertainty(found: dict[str, Any]) -> list[str]:
    lines = [_row("uncertainty, log-determinant", ["mean", "least", "median", "most"])]
    for side, one in found.items():
        values = [one["mean"], one["deciles"][0], one["deciles"][5], one["deciles"][10]]
        lines.append(_row(side, [f"{value:.2f}" for value in values]))
    for side, name in (("image", "file_name"), ("text", "caption")):
        for end in ("highest", "lowest"):
            lines.append(f"{end} of {'images' if side == 'image' else 'captions'}")
            lines += [f"  {one['uncertainty']:9.2f}  {one[name]}" for one in found[side][end][:GALLERY]]
    return lines


def _crops(found: dict[str, Any]) -> list[str]:
    """Crop C shows what A and B do, and its caption says both."""
    heads = ("crop A", "crop C", "text A", "text C")
    lines = [_row(f"crops of {counted(found['images'], 'image')}, below", ["triplets", *heads])]
    for one in found["thresholds"]:
        if one["uncertainty"] is not None:
            values = [one["uncertainty"][side][part] for side in ("image", "text") for part in "AC"]
            lines.append(_row(f"{one['area']:.0%}: uncertainty", [str(one["triplets"]), *map("{:.2f}".format, values)]))
    for one in found["thresholds"]:
        values = [one["accuracy"][way][part] for way in ("image_to_text", "text_to_image") for part in "AC"]
        lines.append(
            _row(f"{one['area']:.0%}: chosen rightly, %", [str(one["triplets"]), *map("{:.1f}".format, values)])
        )
    return lines


def _gpo(found: dict[str, Any]) -> list[str]:
    lines = ["learned pooling coefficients, from the largest value's"]
    for side, parts in found.items():
        for part in parts:
            frequent = sorted(part["lengths"], key=lambda one: -one["samples"])[:LENGTHS]
            for one in sorted(frequent, key=lambda one: one["length"]):
                values = [f"{value:.3f}" for value in one["coefficients"][:COEFFICIENTS]]
                more = [] if one["length"] <= COEFFICIENTS else ["…", f"{one['coefficients'][-1]:.3f}"]
                lines.append(_row(f"{side} {part['part']}, {counted(one['length'], 'row')}", [*values, *more], 7))
    return lines


def _cost(found: dict[str, Any]) -> list[str]:
    shapes = [" x ".join(f"{size:,}" for size in found[side]) for side in ("image", "text")]
    return [
        f"a pair costs {found['macs_a_pair']:,} multiply-accumulates (SetDiv calls them FLOPs, torch counts two each);"
        f" an image is {shapes[0]}, a caption {shapes[1]}"
    ]


def _row(name: str, cells: Sequence[str], width: int = 9) -> str:
    return f"{name:46}" + "".join(f"{cell:>{width}}" for cell in cells)


FORMATS = {
    "circular_variance": _circular_variance,
    "elements": _elements,
    "uncertainty": _uncertainty,
    "crops": _crops,
    "gpo": _gpo,
    "cost": _cost,
}
