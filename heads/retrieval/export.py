"""The embeddings of a gallery, exported whole, smaller, or as far as earlier exports have them not."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from ...pipeline.errors import QueryError, RunError
from ...pipeline.files import locked, making, making_file, require_new
from ...pipeline.wording import counted, some_of
from ..average import NO_VECTOR
from ..evaluation.scoring import MODALITIES, Modality
from ..modules.embedding import Embedding, concatenate, kind_of, tensors_of
from .export_files import READERS, WRITERS, About, Arrays, Export, Row, Side, as_text, pyarrow
from .gallery import Gallery, Looked
from .index import Items
from .indexing import learn_bias, make_smaller
from .retriever import Retriever
from .smaller import mean_recall, require_smaller, rotation

log = logging.getLogger("xret")

_FORMAT = "xret-embeddings"
BATCHES = 32  # embedded before they are written, 8,192 samples
_SAME = 1e-3  # of its length, by which an embedding may differ from an earlier one of the same sample
Known = dict[str, tuple[str | Path, int]]  # of a sample by its id: an earlier export, and the row there


def export_embeddings(
    retriever: Retriever,
    out: str | Path,
    *,
    dims: int | None = None,
    dtype: str = "float32",
    since: str | Path | Sequence[str | Path] = (),
) -> About:
    """Write the embeddings of a gallery's images and captions, and what they belong to; whole, or not at all.

    Some thousand samples are in memory at a time.

    `out` is a new ``.parquet`` or ``.safetensors`` file, or a folder (without a suffix, or ending in ``.npy``).

    Returns:
        What every file says of itself, and `out`, how many `images` and `captions`, the `shapes` of the arrays, and the
        `bytes` of all; of smaller ones also the `mean_recall` before and after.

    `dims` and `dtype` (``float32``, ``int8``) make smaller ones, see `smaller`; a rotation is written as ``rotation``.
    With `since`, earlier exports of the same run in their order, only samples are written that none of them has; what
    they have and the store has not is listed as `gone`.

    Raises:
        OutputError: `out` exists already.
        QueryError: an average has no vectors.
        RunError: it ends in something else or cannot be written; the run is damaged; or an export of `since` is of
            something else, or has a sample that has changed.
    """
    out = Path(out)
    if out.suffix not in WRITERS:
        raise RunError(f"{out}: export to a file ending in .parquet or .safetensors, or to a folder of .npy files")
    folder = out.suffix in ("", ".npy")
    require_new(out, folder=folder)
    smaller = dims is not None or dtype != "float32"
    if since and (smaller or retriever.hubness):
        fit = "--dims, --dtype and --hubness fit numbers to the whole store"
        raise RunError(f"{fit}, and --since adds to others; leave one out")
    if smaller:
        require_smaller(retriever, dtype)
    if out.suffix == ".parquet":
        pyarrow()
    if retriever.model.compare.embedding == "joint":
        raise QueryError(NO_VECTOR)
    places = [since] if isinstance(since, str | Path) else since
    earlier: dict[str | Path, Export] = {place: _read(Path(place), retriever) for place in places}
    with (
        (making if folder else making_file)(out, RunError, "choose another --out") as partial,
        TemporaryDirectory(".partial", f".{out.name}.", partial.parent) as scratch,
        locked(scratch),
    ):
        export = _of_gallery(retriever, dims, dtype, Path(scratch))
        if earlier:
            export = _only_new(retriever.gallery, export, earlier)
        WRITERS[out.suffix](partial, export, Path(scratch))
    return export.about | {
        "out": str(out),
        "images": len(export.sides["images"].rows),
        "captions": len(export.sides["captions"].rows),
        "shapes": export.shapes,
        "bytes": sum(file.stat().st_size for file in (out.iterdir() if folder else [out])),
    }


def _of_gallery(retriever: Retriever, dims: int | None, dtype: str, scratch: Path) -> Export:
    """Return what an export of the whole gallery holds.

    What follows from all embeddings, or is padded to the longest, lies in the folder `scratch` until it is written.
    """
    gallery, about, turn = retriever.gallery, _about(retriever, dtype), None
    blocks: dict[Modality, Iterator[Arrays]] = {side: _blocks(_embedded(retriever, side)) for side in MODALITIES}
    smaller, facts, items = dims is not None or dtype != "float32", dict[Modality, Any](), dict[Modality, Items]()
    if smaller or retriever.scale is not None or about["kind"] == "sequence":
        turn = None if dims is None else rotation(retriever, dims)
        for side in MODALITIES:
            facts[side] = Items.write(scratch / side, _embedded(retriever, side))
            learn_bias(retriever, scratch / side, side, Items(scratch / side, facts[side]))
            items[side] = Items(scratch / side, facts[side])
        if smaller:
            before = _recall(gallery, **items)
            for side in MODALITIES:
                if turn is not None:
                    learn_bias(retriever, scratch / side, side, items[side], turn)
                items[side] = Items(scratch / side, make_smaller(scratch / side, facts[side], turn, dtype))
            recalls = {"split": gallery.splits[-1], "before": before, "after": _recall(gallery, **items)}
            about |= {"dtype": dtype, "mean_recall": recalls}
        if retriever.scale is not None:
            about["hubness"] = retriever.scale
        blocks = {side: items[side].arrays() for side in MODALITIES}
    sides = {side: Side(_rows(gallery, side), blocks[side]) for side in MODALITIES}
    return Export(about, sides, None if turn is None else turn.cpu().numpy())


def _recall(gallery: Gallery, images: Items, captions: Items) -> float:
    biases = None
    if images.bias is not None and captions.bias is not None:
        biases = torch.from_numpy(images.bias), torch.from_numpy(captions.bias)
    return mean_recall(gallery, images, captions, biases)


def _embedded(retriever: Retriever, side: Modality) -> Iterator[Embedding]:
    """Yield the embeddings of a modality batch by batch; RunError where a number is not finite."""
    for batch in retriever.gallery.embedded(side):
        if not all(part.isfinite().all() for part in tensors_of(batch).values()):
            raise RunError(f"{retriever.name} gives embeddings that are not finite: it is damaged, train it again")
        yield batch


def _blocks(batches: Iterator[Embedding]) -> Iterator[Arrays]:
    while some := [*islice(batches, BATCHES)]:
        yield {part: tensor.cpu().numpy() for part, tensor in tensors_of(concatenate(some)).items()}


def _about(retriever: Retriever, dtype: str) -> About:
    """Return what every file says of itself."""
    gallery, run, compare = retriever.gallery, retriever.run, retriever.model.compare
    similarity = {"name": type(compare).__name__}
    if run is not None and run.info.average is None:
        similarity = dict(run.recipe.similarity)
    unit = compare.of_cosines and dtype != "int8"
    measure = "cosine" if compare.of_cosines and not unit else "dot product"
    return {
        "format": _FORMAT,
        "version": 1,
        "run": Path(retriever.name).resolve().name,
        "weights": retriever.digest,
        "recipe": retriever.title,
        "similarity": similarity,
        "dataset": gallery.dataset,
        "manifest_sha256": retriever.cache.manifest_sha256,
        "split": retriever.split,  # None: all
        "splits": gallery.rows_of_splits(),  # the rows of images of each, [first, last)
        "kind": kind_of(next(gallery.embedded("images"))),
        "unit": unit,  # whether vectors, elements, rows or means have unit length
        "measure": measure if compare.dot_product else f"{similarity['name']}: {compare.score}",
    }


def _rows(gallery: Gallery, side: Modality, places: np.ndarray | None = None) -> Looked[Row]:
    """Return the rows of a modality, or those in some places."""

    def look(at: np.ndarray) -> list[Row]:
        at = at if places is None else places[at]
        owners = at if side == "images" else gallery.image_of(at)
        images = zip(gallery.image_ids.look(owners), gallery.file_names.look(owners), strict=True)
        if side == "images":
            return [{"id": id_, "file_name": name} for id_, name in images]
        captions = zip(gallery.caption_ids.look(at), images, gallery.texts.look(at), strict=True)
        return [{"id": id_, "image_id": of, "file_name": name, "caption": text} for id_, (of, name), text in captions]

    return Looked(len(gallery.names(side)[0] if places is None else places), look)


def _only_new(gallery: Gallery, export: Export, earlier: dict[str | Path, Export]) -> Export:
    about, sides = dict(export.about), dict[Modality, Side]()
    about |= {"since": [Path(place).resolve().name for place in earlier], "gone": {}}
    for name in MODALITIES:
        known, ids = _known(name, earlier), gallery.names(name)[0]
        new, there = np.array([id_ not in known for id_ in ids], dtype=bool), {*ids}
        about["gone"][name] = gone = [id_ for id_ in known if id_ not in there]
        if gone:
            log.warning("no longer in the store, to be deleted from what grows: %s", _listed(name, gone))
        blocks = _new_blocks(name, export, new, known, earlier)
        sides[name] = Side(_rows(gallery, name, np.flatnonzero(new)), blocks)
        if name == "images":
            edges = np.append(0, np.cumsum(new)).tolist()
            about["splits"] = {split: (edges[a], edges[b]) for split, (a, b) in export.about["splits"].items()}
    return Export(about, sides)


def _new_blocks(
    name: Modality, export: Export, new: np.ndarray, known: Known, earlier: dict[str | Path, Export]
) -> Iterator[Arrays]:
    """Yield what is new of each block; RunError at the end where samples that are known have changed."""
    changed, first = defaultdict[str | Path, list[str]](list), 0
    for rows, arrays in export.blocks(name):
        for place, other in earlier.items():
            here = [at for at, row in enumerate(rows) if known.get(row["id"], ("", 0))[0] == place]
            there = [known[rows[at]["id"]][1] for at in here]
            changed[place] += _changed(other.sides[name], there, rows, arrays, here)
        yield {part: array[new[first : first + len(rows)]] for part, array in arrays.items()}
        first += len(rows)
    for place, ids in changed.items():
        if ids:
            raise RunError(
                f"{_listed(name, ids)} of {place} had another text, picture or embedding under the same"
                " id; write all without --since (new captions of a picture belong behind its old ones)"
            )


def _known(side: Modality, earlier: dict[str | Path, Export]) -> Known:
    """Return which export and row has each sample, by its id; without those that a later export says are gone."""
    known: Known = {}
    for place, export in earlier.items():
        for id_ in export.about.get("gone", {}).get(side, ()):
            known.pop(id_, None)
        known |= {row["id"]: (place, number) for number, row in enumerate(export.sides[side].rows)}
    return known


def _changed(before: Side, there: list[int], rows: list[Row], arrays: Arrays, here: list[int]) -> list[str]:
    """Return the ids of samples that are not what they were; they were in rows `there`, and are in rows `here`."""
    pairs = [(before.rows[old], rows[new]) for old, new in zip(there, here, strict=True)]
    changed = np.array([any(new[key] != old[key] for key in old) for old, new in pairs], dtype=bool)
    for part, values in chain.from_iterable(block.items() for block in before.blocks) if pairs else ():
        one, other = (array.reshape(len(pairs), -1) for array in (values[there], arrays[part][here]))
        width = min(one.shape[1], other.shape[1])  # sequences are padded to the longest of their export
        apart = np.linalg.norm(other[:, :width] - one[:, :width].astype(np.float64), axis=1)
        changed |= apart > _SAME * np.linalg.norm(one, axis=1).clip(1e-12)
    return [new["id"] for (_, new), differs in zip(pairs, changed, strict=True) if differs]


def _listed(side: Modality, ids: list[str]) -> str:
    return f"{counted(len(ids), side[:-1])} ({', '.join(some_of(ids))})"


def _read(path: Path, retriever: Retriever) -> Export:
    """Return an export of the same run, data set and splits; RunError where it is something else, or damaged."""
    try:
        export = READERS.get(path.suffix, READERS[""])(path)
        told, now = export.about, _about(retriever, "float32")
        others = [key for key in ("weights", "dataset", "split") if as_text(told.get(key)) != as_text(now[key])]
        names = {key: told["run" if key == "weights" else key] for key in others}
        for side in export.sides.values():
            if any({*map(len, arrays.values())} != {len(side.rows)} for arrays in side.blocks):
                raise ValueError("an array is not there")
    except (OSError, AttributeError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise RunError(f"{path} is no export, or damaged; name a file or folder that `xret export` wrote") from error
    if others:
        of = {"weights": "other weights than this run's", "dataset": "another data set", "split": "other splits"}
        key = others[0]
        raise RunError(f"{path} is of {of[key]} ({names[key] or 'all'}); write the whole of this one first")
    if "dtype" in told or "hubness" in told:
        raise RunError(f"{path} is fitted to its store by --dims, --dtype or --hubness, and nothing can be added to it")
    return export
