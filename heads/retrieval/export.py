"""The embeddings of a gallery, exported whole, smaller, or as far as earlier exports have them not."""

import logging
from collections.abc import Sequence
from itertools import compress
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from ...pipeline.errors import QueryError, RunError
from ...pipeline.files import making, making_file, require_new
from ...pipeline.wording import counted, option, some_of
from ..average import NO_VECTOR
from ..evaluation.scoring import MODALITIES, Modality
from ..modules.embedding import Embedding, kind_of, tensors_of
from .export_files import READERS, WRITERS, About, Export, Rows, as_text, pyarrow
from .gallery import Gallery
from .retriever import Retriever
from .smaller import made_smaller, mean_recall, require_cosines, rotation

log = logging.getLogger("xret")

_FORMAT = "xret-embeddings"
_SAME = 1e-3  # of its length, by which an embedding may differ from an earlier one of the same sample


def export_embeddings(
    retriever: Retriever,
    out: str | Path,
    *,
    dims: int | None = None,
    dtype: str = "float32",
    since: Sequence[str | Path] = (),
) -> About:
    """Write the embeddings of a gallery's images and captions, and what they belong to; whole, or not at all.

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
        words = f"{option('dims')}, {option('dtype')} and {option('hubness')}"
        raise RunError(f"{words} fit numbers to the whole store, and {option('since')} adds to others; leave one out")
    if smaller:
        require_cosines(retriever)
    if out.suffix == ".parquet":
        pyarrow()
    if retriever.model.compare.embedding == "joint":
        raise QueryError(NO_VECTOR)
    earlier = {place: _read(Path(place), retriever) for place in since}
    export = _embedded(retriever, dims, dtype)
    if earlier:
        export = _only_new(export, earlier)
    with (making if folder else making_file)(out, RunError, "choose another --out") as partial:
        WRITERS[out.suffix](partial, export)
    return export.about | {
        "out": str(out),
        "images": len(export.rows["images"]),
        "captions": len(export.rows["captions"]),
        "shapes": {name: list(array.shape) for name, array in export.arrays.items()},
        "bytes": sum(file.stat().st_size for file in (out.iterdir() if folder else [out])),
    }


def _embedded(retriever: Retriever, dims: int | None, dtype: str) -> Export:
    """Return what an export of the whole gallery holds; RunError where a number is not finite."""
    gallery, about = retriever.gallery, _about(retriever, dtype)
    both: list[Embedding] = [gallery.images, gallery.captions]
    turn = None if dims is None else rotation(retriever, dims)
    if dims is not None or dtype != "float32":
        before, both = mean_recall(gallery, *both), [made_smaller(one, turn, dtype) for one in both]
        recalls = {"split": gallery.splits[-1], "before": before, "after": mean_recall(gallery, *both)}
        about |= {"dtype": dtype, "mean_recall": recalls}
    arrays = {
        modality if name == "embedding" else f"{modality}.{name}": part.cpu().numpy()
        for modality, embedding in zip(MODALITIES, both, strict=True)
        for name, part in tensors_of(embedding).items()
    }
    arrays |= {} if turn is None else {"rotation": turn.cpu().numpy()}
    if retriever.scale is not None:
        about["hubness"] = retriever.scale
        for side in MODALITIES:
            bias = retriever.bias_of(side, gallery.of(side), gallery.owners(side), turn)
            arrays[f"{side}.bias"] = bias.cpu().numpy()
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise RunError(f"{retriever.name} gives embeddings that are not finite: it is damaged, train it again")
    return Export(about, _rows(gallery), arrays)


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
        "kind": kind_of(gallery.images),
        "unit": unit,  # whether vectors, elements, rows or means have unit length
        "measure": measure if compare.dot_product else f"{similarity['name']}: {compare.score}",
    }


def _rows(gallery: Gallery) -> Rows:
    names = list(zip(gallery.image_ids, gallery.file_names, strict=True))
    captions = zip(gallery.caption_ids, gallery.caption_image.tolist(), gallery.texts, strict=True)
    return {
        "images": [{"id": id_, "file_name": name} for id_, name in names],
        "captions": [
            {"id": id_, "image_id": names[row][0], "file_name": names[row][1], "caption": text}
            for id_, row, text in captions
        ],
    }


def _only_new(export: Export, earlier: dict[str | Path, Export]) -> Export:
    about, rows, arrays = dict(export.about), dict(export.rows), dict(export.arrays)
    about |= {"since": [Path(place).resolve().name for place in earlier], "gone": {}}
    for side in MODALITIES:
        new, about["gone"][side] = _new_and_gone(side, export, earlier)
        rows[side] = [*compress(export.rows[side], new)]
        arrays |= {name: array[new] for name, array in arrays.items() if name.partition(".")[0] == side}
        if side == "images":
            edges = np.append(0, np.cumsum(new)).tolist()
            about["splits"] = {name: (edges[a], edges[b]) for name, (a, b) in export.about["splits"].items()}
    return Export(about, rows, arrays)


def _new_and_gone(side: Modality, export: Export, earlier: dict[str | Path, Export]) -> tuple[np.ndarray, list[str]]:
    """Return which samples no earlier export has, and which of theirs are gone; RunError where one has changed."""
    row_of = {row["id"]: number for number, row in enumerate(export.rows[side])}
    known = _known(side, earlier)
    for place, other in earlier.items():
        ids = {id_: number for id_, (last, number) in known.items() if last == place and id_ in row_of}
        if changed := _changed(side, other, [*ids.values()], export, [row_of[id_] for id_ in ids]):
            raise RunError(
                f"{_listed(side, changed)} of {place} had another text, picture or embedding under the same"
                f" id; write all without {option('since')} (new captions of a picture belong behind its old ones)"
            )
    gone = [id_ for id_ in known if id_ not in row_of]
    if gone:
        log.warning("no longer in the store, to be deleted from what grows: %s", _listed(side, gone))
    return np.array([id_ not in known for id_ in row_of], dtype=bool), gone


def _known(side: Modality, earlier: dict[str | Path, Export]) -> dict[str, tuple[str | Path, int]]:
    """Return which export and row has each sample, by its id; without those that a later export says are gone."""
    known: dict[str, tuple[str | Path, int]] = {}
    for place, export in earlier.items():
        for id_ in export.about.get("gone", {}).get(side, ()):
            known.pop(id_, None)
        known |= {row["id"]: (place, number) for number, row in enumerate(export.rows[side])}
    return known


def _changed(side: Modality, before: Export, there: list[int], now: Export, here: list[int]) -> list[str]:
    """Return the ids of samples that are not what they were; they were in rows `there`, and are in rows `here`."""
    pairs = [(before.rows[side][old], now.rows[side][new]) for old, new in zip(there, here, strict=True)]
    changed = np.array([any(new[key] != old[key] for key in old) for old, new in pairs], dtype=bool)
    later = now.of(side)
    for part, values in before.of(side).items() if pairs else ():
        one, other = (array.reshape(len(pairs), -1) for array in (values[there], later[part][here]))
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
        if any({len(array) for array in export.of(side).values()} != {len(export.rows[side])} for side in MODALITIES):
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
