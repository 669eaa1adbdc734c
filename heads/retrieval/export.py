"""The embeddings of a gallery in files that others read: .npy, Parquet or safetensors.

Each file says in its metadata, or in `about.json` beside the arrays, what it holds. The arrays are called ``images``
and ``captions``; of a Gaussian ``images.mean`` and ``images.log_variance``, of a sequence ``images.rows`` and
``images.length``. Where hubness is corrected, ``images.bias`` is to be added to the scores of each image as an answer.

    FILE.parquet       a row a sample: modality (image, caption), id, image_id, file_name, caption, and its embedding:
                       lists of D numbers in the column `embedding` (sets and sequences: a list of such lists), or in
                       `mean` and `log_variance`; a `rotation` is a list of its rows in the metadata
    FILE.safetensors   the arrays, `caption_image` (the row of each caption's image), and in the metadata JSON lists
                       image_ids, file_names, caption_ids, captions
    FOLDER             an .npy of each array, images.jsonl and captions.jsonl with a line a row, and README.md, the
                       card that the Hugging Face hub shows of a data set
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor
from torch.nn import functional

from ...pipeline.errors import QueryError, RunError, require_pyarrow
from ...pipeline.files import making, making_file, require_new
from ..average import NO_VECTOR
from ..evaluation.scoring import MODALITIES
from ..modules.embedding import Embedding, Sequence, kind_of, tensors_of
from ..modules.padding import valid_rows
from .gallery import Gallery
from .retriever import Retriever
from .smaller import made_smaller, mean_recall, require_cosines, rotation

_HEADER = 90_000_000  # bytes of metadata that readers of safetensors surely take
_pyarrow = partial(require_pyarrow, RunError, "Parquet needs", ", or export to .safetensors")

_CARD = """\
---
tags:
- image-text-retrieval
- xret
configs:
- config_name: images
  data_files: images.jsonl
  default: true
- config_name: captions
  data_files: captions.jsonl
---

# Embeddings of {dataset}{part}

Each image and caption is a {kind}, made by the recipe `{recipe}` with xret. What compares
them is: {measure}; larger is closer.

| file | shape |
|---|---|
{files}

Row i belongs to line i of `images.jsonl` or `captions.jsonl`, which have ids, file names and texts. `about.json` has
what made them.
"""

Arrays = dict[str, np.ndarray]
About = dict[str, Any]


def export_embeddings(
    retriever: Retriever, out: str | Path, *, dims: int | None = None, dtype: str = "float32"
) -> About:
    """Write the embeddings of a gallery's images and captions, and what they belong to; whole, or not at all.

    `out` is a new ``.parquet`` or ``.safetensors`` file, or a folder (without a suffix, or ending in ``.npy``).

    Returns:
        What every file says of itself, and `out`, how many `images` and `captions`, the `shapes` of the arrays, and the
        `bytes` of all; of smaller ones also the `mean_recall` before and after.

    `dims` and `dtype` (``float32``, ``int8``) make smaller ones, see `smaller`; a rotation is written as ``rotation``.

    Raises:
        OutputError: `out` exists already.
        QueryError: an average has no vectors.
        RunError: it ends in something else or cannot be written; or the run is damaged.
    """
    out = Path(out)
    writers: dict[str, Callable[[Path, Gallery, Arrays, About], None]]
    writers = {".parquet": _write_parquet, ".safetensors": _write_safetensors, "": _write_folder, ".npy": _write_folder}
    if out.suffix not in writers:
        raise RunError(f"{out}: export to a file ending in .parquet or .safetensors, or to a folder of .npy files")
    folder = writers[out.suffix] is _write_folder
    require_new(out, folder=folder)
    smaller = dims is not None or dtype != "float32"
    if smaller:
        require_cosines(retriever)
    if out.suffix == ".parquet":
        _pyarrow()
    if retriever.model.compare.embedding == "joint":
        raise QueryError(NO_VECTOR)
    gallery, about = retriever.gallery, _about(retriever, dtype)
    both: list[Embedding] = [gallery.images, gallery.captions]
    turn = None if dims is None else rotation(retriever, dims)
    if smaller:
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
    with (making if folder else making_file)(out, RunError, "choose another --out") as partial:
        writers[out.suffix](partial, gallery, arrays, about)
    return about | {
        "out": str(out),
        "images": len(gallery.image_ids),
        "captions": len(gallery.texts),
        "shapes": {name: list(array.shape) for name, array in arrays.items()},
        "bytes": sum(file.stat().st_size for file in (out.iterdir() if folder else [out])),
    }


def _about(retriever: Retriever, dtype: str) -> About:
    """Return what every file says of itself."""
    gallery, run, compare = retriever.gallery, retriever.run, retriever.model.compare
    similarity = {"name": type(compare).__name__}
    if run is not None and run.info.average is None:
        similarity = dict(run.recipe.similarity)
    unit = compare.of_cosines and dtype != "int8"
    measure = "cosine" if compare.of_cosines and not unit else "dot product"
    return {
        "format": "xret-embeddings",
        "version": 1,
        "run": Path(retriever.name).resolve().name,
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


def _write_folder(folder: Path, gallery: Gallery, arrays: Arrays, about: About) -> None:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    images = zip(gallery.image_ids, gallery.file_names, strict=True)
    captions = zip(gallery.caption_ids, gallery.caption_image.tolist(), gallery.texts, strict=True)
    rows = {
        "images": [{"id": id_, "file_name": name} for id_, name in images],
        "captions": [{"id": id_, "image_id": gallery.image_ids[row], "caption": text} for id_, row, text in captions],
    }
    for modality, lines in rows.items():
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{modality}.jsonl").write_text(text, encoding="utf-8")
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    files = "\n".join(f"| `{name}.npy` | {' × '.join(map(str, array.shape))} |" for name, array in arrays.items())
    card = _CARD.format(**about, part=gallery.part, files=files)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _write_safetensors(path: Path, gallery: Gallery, arrays: Arrays, about: About) -> None:
    names = {"image_ids": gallery.image_ids, "file_names": gallery.file_names, "caption_ids": gallery.caption_ids}
    values = {**about, **names, "captions": gallery.texts}
    metadata = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    if len(json.dumps(metadata)) > _HEADER:
        raise RunError(f"{gallery.dataset} has too many captions for the header of a safetensors file; take .parquet")
    save_file(arrays | {"caption_image": gallery.caption_image.astype(np.int64)}, path, metadata=metadata)


def _write_parquet(path: Path, gallery: Gallery, arrays: Arrays, about: About) -> None:
    pa = _pyarrow()
    images, captions = len(gallery.image_ids), len(gallery.texts)
    owners = gallery.caption_image.tolist()
    columns = {
        "modality": ["image"] * images + ["caption"] * captions,
        "id": gallery.image_ids + gallery.caption_ids,
        "image_id": gallery.image_ids + [gallery.image_ids[row] for row in owners],
        "file_name": gallery.file_names + [gallery.file_names[row] for row in owners],
        "caption": [None] * images + gallery.texts,
    }
    table = {name: pa.array(values, pa.string()) for name, values in columns.items()}
    whole = "dtype" not in about
    images_, captions_ = (
        (gallery.images, gallery.captions) if whole else map(torch.from_numpy, (arrays["images"], arrays["captions"]))
    )
    sides = [_columns(pa, embedding) for embedding in (images_, captions_)]
    table |= {name: pa.chunked_array([side[name] for side in sides]) for name in sides[0]}
    if "images.bias" in arrays:
        table["bias"] = pa.array(np.concatenate([arrays["images.bias"], arrays["captions.bias"]]))
    if "rotation" in arrays:
        about = about | {"rotation": arrays["rotation"].tolist()}
    pa.parquet.write_table(pa.table(table).replace_schema_metadata({"xret": json.dumps(about)}), path)


def _columns(pa: Any, embedding: Embedding) -> dict[str, Any]:
    """Return the columns that hold an embedding, by name."""

    def lists(rows: Tensor) -> Any:
        return pa.FixedSizeListArray.from_arrays(pa.array(rows.cpu().numpy().reshape(-1)), rows.shape[1])

    if isinstance(embedding, Sequence):
        rows, length = embedding.rows[valid_rows(*embedding)], embedding.length
    elif isinstance(embedding, Tensor) and embedding.ndim == 3:
        rows, length = embedding.flatten(0, 1), torch.full(embedding.shape[:1], embedding.shape[1])
    else:
        return {name: lists(part) for name, part in tensors_of(embedding).items()}
    offsets = functional.pad(length.cumsum(0), (1, 0)).cpu().numpy()
    return {"embedding": pa.LargeListArray.from_arrays(offsets, lists(rows))}
