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

    def datacomp(self, folder, parts=3, **changed):
        """Write shards of DataComp's metadata; `changed` are arrays of the last shard, None: it lacks one."""
        folder.mkdir(parents=True)
        for number, rows in enumerate(np.array_split(np.arange(len(self.names)), parts)):
            arrays = {"l14_img": self.images[rows], "l14_txt": self.captions[rows], "dedup": self.images[rows, :8]}
            arrays |= {"b32_img": -self.images[rows, :8], "b32_txt": -self.captions[rows, :8]}
            arrays |= changed if number == parts - 1 else {}
            save = np.savez_compressed if number % 2 else np.savez
            save(folder / f"{number:032x}.npz", **{name: array for name, array in arrays.items() if array is not None})
            table = {"uid": [self.names[k] for k in rows], "text": [self.texts[k] for k in rows]}
            table |= {"url": [f"https://x.org/{k}" for k in rows], "clip_l14_similarity_score": rows.astype(float)}
            table |= {"face_bboxes": [[[0.1, 0.2, 0.3, 0.4]]] * len(rows)}
            parquet.write_table(pa.table(table), folder / f"{number:032x}.parquet")
        return folder

    def embedding_reader(self, folder, layout, parts=3):
        """Write both sides as embedding-reader reads each: ``npy``, ``parquet`` or ``parquet_npy``.

        ``parquet_npy_beside`` has the metadata beside the captions; ``table`` is Parquet files that hold both.
        """
        for name in ("images", "captions", "metadata"):
            (folder / name).mkdir(parents=True)
        for number, rows in enumerate(np.array_split(np.arange(len(self.names)), parts)):
            table = {"image_path": [self.names[k] for k in rows], "caption": [self.texts[k] for k in rows]}
            for name, matrix in (("images", self.images[rows]), ("captions", self.captions[rows])):
                if layout == "parquet":
                    one = pa.table({**table, "embedding": list(matrix)})
                    parquet.write_table(one, folder / name / f"{number}.parquet", row_group_size=7)
                elif layout != "table":
                    np.save(folder / name / f"{number}.npy", matrix)
            if layout.startswith("parquet_npy"):
                beside = "captions" if layout.endswith("beside") else "metadata"
                parquet.write_table(pa.table(table), folder / beside / f"{number}.parquet")
            if layout == "table":
                both = {"image_embedding": list(self.images[rows]), "text_embedding": list(self.captions[rows])}
                parquet.write_table(pa.table({**table, **both}), folder / f"part-{number}.parquet", row_group_size=7)
        if layout == "npy":
            self.write_index(folder / "index.csv", zip(self.names, self.texts, strict=True))
        return folder

    def folder(self, folder, lines=None, index="csv", splits=None):
        """Write the folder of `--from embeddings`; `lines` are (name, text) if not those of the pairs."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, matrix in (("images", self.images), ("captions", self.captions)):
            np.save(folder / f"{name}.npy", matrix)
        lines = list(zip(self.names, self.texts, strict=True)) if lines is None else lines
        self.write_index(folder / f"index.{index}", lines, splits)
        return folder

    @staticmethod
    def write_index(path, lines, splits=None):
        """Write an index of lines (name, text) as CSV or JSON lines."""
        rows = [{"file_name": name, "caption": text} for name, text in lines]
        if splits is not None:
            rows = [row | {"split": split} for row, split in zip(rows, splits, strict=True)]
        with path.open("w", newline="", encoding="utf-8") as file:
            if path.suffix == ".csv":
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
            else:
                file.writelines(json.dumps(row) + "\n" for row in rows)


def _unit(values):
    return values / np.linalg.norm(values, axis=1, keepdims=True)
