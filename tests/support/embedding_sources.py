"""Embeddings in files, as others write them: with numpy and pyarrow alone."""

import csv
import json

import numpy as np
import pyarrow as pa
from pyarrow import parquet

WIDTH = 16


class Pairs:
    """Pairs whose image and caption lie close to each other in one space, and the files of them.

    Attributes:
        names: of the images; texts: of a caption each; images, captions: [N, 16], float32.
    """

    def __init__(self, count=120, dtype=np.float16, seed=0):
        rng = np.random.default_rng(seed)
        self.images = _unit(rng.normal(size=(count, WIDTH))).astype(dtype)
        self.captions = _unit(self.images + 0.2 * rng.normal(size=(count, WIDTH))).astype(dtype)
        self.names = [f"{k // 10:05d}/{k:09d}.jpg" for k in range(count)]
        self.texts = [f"caption number {k}" for k in range(count)]

    def clip_retrieval(self, folder, parts=3, root="", flat=False):
        """Write the folder of clip-retrieval."""
        for number, rows in enumerate(np.array_split(np.arange(len(self.names)), parts)):
            files = {
                kind: folder / ("" if flat else kind) / f"{kind}_{number:02d}{suffix}"
                for kind, suffix in (("img_emb", ".npy"), ("text_emb", ".npy"), ("metadata", ".parquet"))
            }
            for path in files.values():
                path.parent.mkdir(parents=True, exist_ok=True)
            np.save(files["img_emb"], self.images[rows])
            np.save(files["text_emb"], self.captions[rows])
            table = {"image_path": [root + self.names[k] for k in rows], "caption": [self.texts[k] for k in rows]}
            parquet.write_table(pa.table({**table, "similarity": rows.astype(float)}), files["metadata"])
        return folder

    def folder(self, folder, lines=None, index="csv", splits=None):
        """Write the folder of `--from embeddings`; `lines` are (name, text) if not those of the pairs."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, matrix in (("images", self.images), ("captions", self.captions)):
            np.save(folder / f"{name}.npy", matrix)
        lines = list(zip(self.names, self.texts, strict=True)) if lines is None else lines
        rows = [{"file_name": name, "caption": text} for name, text in lines]
        if splits is not None:
            rows = [row | {"split": split} for row, split in zip(rows, splits, strict=True)]
        path = folder / f"index.{index}"
        with path.open("w", newline="", encoding="utf-8") as file:
            if index == "csv":
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
            else:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        return folder


def _unit(values):
    return values / np.linalg.norm(values, axis=1, keepdims=True)
