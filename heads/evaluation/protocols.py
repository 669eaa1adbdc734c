"""Protocols: what is right for each query besides or instead of its own items, and which numbers are taken.

- ``full`` and ``1k-folds``: recalls of each image's own captions.
- ``eccv``: mAP@R, R-Precision and R@1 on ECCV Caption (Chun et al., *ECCV Caption: Correcting False Negatives by
  Collecting Machine-and-Human-verified Image-Caption Associations for MS-COCO*).
- ``cxc``: recalls on Crisscrossed Captions (Parekh et al., CxC). It judged 35,585 pairs as right; papers count 35,614,
  with 29 pairs of a caption and its own image that it did not. So 28 of the 25,000 captions ask nothing.
- ``rpc2``: R-Precision on Crisscrossed Captions (Pishdad et al., *Uncertainty-based Cross-Modal Retrieval with
  Probabilistic Representations*, section 4.3).
- ``pmrp``: Plausible Match R-Precision (PCME), by the object classes of COCO's instance annotations; zeta 0, 1, 2 and
  their mean.

The package `eccv_caption` holds the judgements, of the 5,000 test images and 25,000 captions of Karpathy's split. The
last three give, of 5,000 images, the mean of five folds of 1,000 as well; a fold's right items are those inside.
"""

import inspect
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...pipeline.errors import RecipeError, RunError, nearest, require_packages
from ..modules.parts import Registry
from ..recipes.own import digest_of, known_sources, part_of, remember, sources_of
from . import metrics
from .metrics import Table, Ties
from .precision import best_ranks, map_at_r, plausible_matches, r_precision
from .scoring import Scored

Relevance = tuple[Tensor, Tensor]  # of `relevance`
ZETAS = (0, 1, 2)  # object classes in which plausible matches may differ


class Protocol:
    """Base of protocols: which items are right for a query, and which numbers are taken.

    Made as `Class()`, or as `Class(argument)` where one follows its name, as in ``pmrp:FILE``: it loads what it needs.
    It is called with scores, which have `similarity [I, C]`, larger is closer, `caption_image [C]`, the image of each
    caption, `ids` of the images, `texts` of the captions, `cocoid` and `sentid`, their numbers in COCO, and `ranks()`
    of both directions, see `xret.metrics.ranks`; and with `ties`, see `recall`. RunError: it is not defined for these
    samples.
    """

    def __call__(self, scores: Scored, ties: Ties) -> Table:
        """Return the numbers of both directions, by the same names."""
        raise NotImplementedError


PROTOCOLS: Registry[Protocol] = Registry("protocol", Protocol, "xret.metrics")


def load_protocol(name: str, named: bool = True) -> tuple[str, Protocol]:
    """Return a protocol by its name, ``module:Class`` for a user-defined one, perhaps with an argument after a colon.

    One that the user has not `named` but a store's manifest has runs if it was named here before. RunError if there is
    no such protocol, or a package or a file is missing.
    """
    name, _, argument = name.partition(":")
    if name not in PROTOCOLS and argument:
        module, (part, _, argument) = name, argument.partition(":")
        name = f"{module}:{part}"
        try:
            sources = sources_of([name], [], {}) if named else known_sources(f"protocol {name}", [name], [], {})
            kind = part_of(PROTOCOLS, name, sources)
        except RecipeError as error:
            new = f"it has not run here before, or was changed: read it, and name it once as --protocol {name}"
            raise RunError(f"protocol {name}: {error if named else new}") from error
        remember({module: digest_of(module, sources[module])})
    elif name in PROTOCOLS:
        kind = PROTOCOLS[name]
    else:
        known = f"{nearest(name, list(PROTOCOLS))}: {', '.join(PROTOCOLS)}"
        raise RunError(f"there is no protocol '{name}'{known}; or write module:Class for your own")
    given = [argument] if argument else []
    try:
        inspect.signature(kind).bind(*given)
    except TypeError as error:
        wanted = f"takes nothing after its name; leave out ':{argument}'" if given else f"needs more: {name}:ARGUMENT"
        raise RunError(f"protocol {name} {wanted}") from error
    return name, kind(*given)


def require_table(name: str, table: Any) -> None:
    """Raise RunError where what a protocol returned is no table of numbers by the same names in both directions."""
    ways = [table.image_to_text, table.text_to_image] if isinstance(table, Table) else []
    numbers = all(isinstance(value, float | int) for way in ways for value in way.values())
    if not ways or not numbers or [*ways[0]] != [*ways[1]]:
        wanted = "an xret.metrics.Table that has numbers of the same names for both directions"
        raise RunError(f"protocol {name} must return {wanted}, and returned {table}")


@PROTOCOLS.register("full", "all images and captions of a split: the default, and COCO 5K")
class _Full(Protocol):
    def __call__(self, scores: Scored, ties: Ties) -> Table:
        return metrics.recall_table(*scores.ranks(), ties)


@PROTOCOLS.register("1k-folds", "5,000 images: the mean of five folds of 1,000, COCO 1K")
class _Folds(Protocol):
    def __call__(self, scores: Scored, ties: Ties) -> Table:
        if len(scores.ids) != metrics.FOLDED:
            raise RunError(
                f"protocol 1k-folds needs exactly {metrics.FOLDED:,} images and split '{scores.split}' has "
                f"{len(scores.ids):,}; take --protocol full"
            )
        return metrics.recalls(scores.similarity, scores.caption_image, "1k-folds", ties)


def load_judgements(protocol: str) -> Any:
    """Return `eccv_caption.Metrics`, which has the judgements; RunError where it is not installed."""
    require_packages(f"the judgements of protocol {protocol} need", {"eccv_caption": "eccv_caption"}, "eccv")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it misses a faster JSON reader
        from eccv_caption import Metrics  # type: ignore[import-not-found, import-untyped, unused-ignore]
    return Metrics()


@PROTOCOLS.register("cxc", "COCO's test split: Crisscrossed Captions, judged by people")
class _CrisscrossedCaptions(Protocol):
    name, judgements = "cxc", "cxc_gts"

    def __init__(self) -> None:
        self.truth = load_judgements(self.name)

    def __call__(self, scores: Scored, ties: Ties) -> Table:
        truth = self.truth
        known, given = (set(truth.coco_gts["i2t"]), set(truth.coco_ids.tolist())), (scores.cocoid, scores.sentid)
        if any(sorted(ours.tolist()) != sorted(theirs) for ours, theirs in zip(given, known, strict=True)):
            among = [len(theirs & set(ours.tolist())) for ours, theirs in zip(given, known, strict=True)]
            raise RunError(
                f"protocol {self.name} needs the {len(known[0]):,} images and {len(known[1]):,} captions of COCO's test"
                f" split, with their cocoid and sentid; split '{scores.split}' has {len(given[0]):,} and"
                f" {len(given[1]):,}, of which {among[0]:,} and {among[1]:,} are among them; take --protocol full"
            )
        right = getattr(truth, self.judgements)
        to_text = relevance(right["i2t"], scores.cocoid, scores.sentid)
        return self.table(scores, ties, to_text, relevance(right["t2i"], scores.sentid, scores.cocoid))

    def table(self, scores: Scored, ties: Ties, to_text: Relevance, to_image: Relevance) -> Table:
        return _with_folds(scores, to_text[0], to_image[0], partial(_recalls, ties))


@PROTOCOLS.register("rpc2", "COCO's test split: R-Precision on Crisscrossed Captions")
class _RPrecision(_CrisscrossedCaptions):
    name = "rpc2"

    def table(self, scores: Scored, ties: Ties, to_text: Relevance, to_image: Relevance) -> Table:
        return _with_folds(scores, to_text[0], to_image[0], partial(_r_precisions, "RPC2", ties))


@PROTOCOLS.register("eccv", "COCO's test split: ECCV Caption, with right answers that COCO lacks")
class _ECCVCaption(_CrisscrossedCaptions):
    name, judgements = "eccv", "eccv_gts"

    def table(self, scores: Scored, ties: Ties, to_text: Relevance, to_image: Relevance) -> Table:
        measured = [
            {
                "mAP@R": _percent(map_at_r(scored, relevant, ties, count)),
                "R-P": _percent(r_precision(scored, relevant, ties, count)),
                "R@1": metrics.recall(best_ranks(scored, relevant), 1, ties),
            }
            for scored, (relevant, count) in ((scores.similarity, to_text), (scores.similarity.T, to_image))
        ]
        return Table(measured[0], measured[1])


@PROTOCOLS.register("pmrp", "COCO's test split: matches that are plausible by their objects")
class _PlausibleMatches(Protocol):
    def __init__(self, annotations: str = "") -> None:
        if not annotations:
            raise RunError(
                "protocol pmrp compares the object classes of the images: name COCO's annotations, as "
                "--protocol pmrp:instances_val2014.json"
            )
        self.classes = read_classes(Path(annotations))

    def __call__(self, scores: Scored, ties: Ties) -> Table:
        if missing := [number for number in scores.cocoid.tolist() if number not in self.classes]:
            raise RunError(
                f"the annotations do not know {len(missing):,} of the {len(scores.cocoid):,} images of split "
                f"'{scores.split}', among them cocoid {missing[0]}: pmrp needs images of COCO and the annotations of "
                "their part"
            )
        codes = torch.from_numpy(np.stack([self.classes[number] for number in scores.cocoid.tolist()]))
        # One at a time: a byte a cell.
        matches = (plausible_matches(codes, zeta)[:, scores.caption_image] for zeta in ZETAS)
        tables = [_with_folds(scores, match, match.T, partial(_r_precisions, "PMRP", ties)) for match in matches]
        ways = []
        for way in metrics.WAYS:
            of_zetas: list[dict[str, float]] = [getattr(table, way) for table in tables]
            means = {name: fmean(values[name] for values in of_zetas) for name in of_zetas[0]}
            ways.append(means | {f"zeta {zeta}": values["PMRP"] for zeta, values in zip(ZETAS, of_zetas, strict=True)})
        return Table(ways[0], ways[1])


def _with_folds(
    scores: Scored, to_text: Tensor, to_image: Tensor, measure: Callable[[Tensor, Tensor, Tensor], Table]
) -> Table:
    """Return the table of all images, with, of 5,000, the means over the folds as ``… 1K``.

    `to_text`, bool `[I, C]`, and `to_image`, `[C, I]`, are the right items of each query.
    """
    whole = measure(scores.similarity, to_text, to_image)
    folds = [measure(*fold) for fold in _folds(scores, to_text, to_image)]
    ways = []
    for way in metrics.WAYS:
        values: dict[str, float] = getattr(whole, way)
        known = [name for name in values if folds and name != "medr"]
        ways.append(values | {f"{name} 1K": fmean(getattr(fold, way)[name] for fold in folds) for name in known})
    return Table(ways[0], ways[1], whole.rsum)


def _recalls(ties: Ties, similarity: Tensor, to_text: Tensor, to_image: Tensor) -> Table:
    return metrics.recall_table(best_ranks(similarity, to_text), best_ranks(similarity.T, to_image), ties)


def _r_precisions(name: str, ties: Ties, similarity: Tensor, to_text: Tensor, to_image: Tensor) -> Table:
    ways = (similarity, to_text), (similarity.T, to_image)
    tables = [{name: _percent(r_precision(*way, ties))} for way in ways]
    return Table(tables[0], tables[1])


def _folds(scores: Scored, to_text: Tensor, to_image: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield of each fold of 5,000 images the similarity and the right items, of both ways, inside it."""
    for fold in metrics.FOLDS if len(scores.similarity) == metrics.FOLDED else ():
        rows, columns = metrics.inside(fold, scores.caption_image)
        some = scores.similarity[rows][:, columns.to(scores.similarity.device)]
        yield some, to_text[rows][:, columns], to_image[columns][:, rows]


def relevance(right: Mapping[int, Sequence[int]], queries: np.ndarray, items: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return which items are right for which queries, bool `[Q, G]`, and how many each has, int64 `[Q]`.

    All are named by their ids: `queries [Q]`, the gallery's `items [G]`, and `right` of each query, of which some may
    lie outside the gallery.
    """
    column = {item: place for place, item in enumerate(items.tolist())}
    wanted = [set(right.get(query, ())) for query in queries.tolist()]
    relevant = torch.zeros(len(queries), len(items), dtype=torch.bool)
    for row, ids in enumerate(wanted):
        relevant[row, [column[item] for item in ids if item in column]] = True
    return relevant, torch.tensor([len(ids) for ids in wanted])


def read_classes(file: Path) -> dict[int, np.ndarray]:
    """Return by image id whether it shows each object class, bool `[L]`; instances of crowds count as well.

    Polygons are dropped while `instances_val2014.json`, or a file of its form, is read. RunError where it is none.
    """

    def without_polygons(entry: dict[str, Any]) -> Any:
        return (entry["image_id"], entry["category_id"]) if "category_id" in entry else entry

    try:
        with file.open(encoding="utf-8") as stream:
            content = json.load(stream, object_hook=without_polygons)
        column = {entry["id"]: place for place, entry in enumerate(content["categories"])}
        classes = {entry["id"]: np.zeros(len(column), dtype=bool) for entry in content["images"]}
        for image, category in content["annotations"]:
            classes[image][column[category]] = True
    except OSError as error:
        raise RunError(f"the annotations {file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{file} is not COCO's instance annotations, with images, categories and annotations that name an "
            "image_id and a category_id: give instances_val2014.json"
        ) from error
    return classes


def _percent(values: Tensor) -> float:
    return 100 * values.mean().item()
