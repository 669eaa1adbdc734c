"""One data set in every form: a folder, tars, Parquet, and what `datasets` saves; each written by another's library."""

import io
import itertools
import json
import tarfile

import datasets
import numpy as np
import pyarrow as pa
import webdataset
from PIL import Image
from pyarrow import parquet

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.sources import open_pictures

SPLITS = ("train", "val", "test")


class PackedData:
    """Pictures with captions and a split each, which take turns.

    Attributes:
        folder: where everything is written.
        rows: of each picture its name, bytes, captions and split.
    """

    def __init__(self, folder, count=30):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.rows = []
        for number in range(count):
            pixels = np.random.default_rng(number).integers(0, 256, (20, 24, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG")
            captions = [f"a dog {number} runs", "two cats"][: 1 + number % 2]
            self.rows.append((f"{number:06d}.png", file.getvalue(), captions, SPLITS[number % 3]))

    def manifest(self, name, **keys):
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps({"name": "packed", **keys}))
        return path

    def as_folder(self):
        (self.folder / "photos").mkdir()
        for name, data, *_ in self.rows:
            (self.folder / "photos" / name).write_bytes(data)
        lines = [
            json.dumps({"file_name": name, "caption": text, "split": split})
            for name, _, captions, split in self.rows
            for text in captions
        ]
        (self.folder / "captions.jsonl").write_text("\n".join(lines))
        return self.manifest("folder", images="photos", captions="captions.jsonl")

    def parts(self, files):
        """Return the rows in so many parts, which are of unequal length."""
        cuts = [round(len(self.rows) * (number / files) ** 2) for number in range(files + 1)]
        return [self.rows[a:b] for a, b in itertools.pairwise(cuts)]

    def as_tars(self, files=3):
        for number, part in enumerate(self.parts(files)):
            write_tar(self.folder / f"shard-{number:02d}.tar", members_of(part))
        return self.manifest("tar", tar=f"shard-{{00..{files - 1:02d}}}.tar")

    def as_webdataset(self, files=3):
        for number, part in enumerate(self.parts(files)):
            with webdataset.TarWriter(str(self.folder / f"web-{number}.tar")) as writer:
                for name, data, captions, split in part:
                    document = {"captions": captions, "split": split, "width": 24}
                    writer.write({"__key__": name[:-4], "png": data, "json": document, "cls": 3})
        return self.manifest("web", tar="web-*.tar")

    def as_parquet(self, files=3, group=4, path=True):
        for number, part in enumerate(self.parts(files)):
            parquet.write_table(self.table(part, path), self.folder / f"part-{number}.parquet", row_group_size=group)
        columns = {"image_column": "image", "caption_columns": ["texts"], "split_column": "split"}
        return self.manifest("parquet", parquet="part-*.parquet", **columns)

    def table(self, rows, path=True):
        images = [{"bytes": data, "path": name} if path else data for name, data, *_ in rows]
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())]) if path else pa.large_binary()
        return pa.table(
            {
                "image": pa.array(images, kind),
                "texts": pa.array([captions for *_, captions, _ in rows], pa.list_(pa.string())),
                "split": [split for *_, split in rows],
            }
        )

    def dataset(self, rows):
        features = datasets.Features(
            {"image": datasets.Image(), "caption": datasets.Sequence(datasets.Value("string"))}
            | {"split": datasets.Value("string")}
        )
        columns = {
            "image": [{"bytes": data, "path": name} for name, data, *_ in rows],
            "caption": [captions for *_, captions, _ in rows],
            "split": [split for *_, split in rows],
        }
        return datasets.Dataset.from_dict(columns, features=features)

    def as_saved(self):
        self.dataset(self.rows).save_to_disk(self.folder / "saved", num_shards=3)
        return self.manifest("saved", dataset="saved", split_column="split")

    def as_saved_splits(self):
        parts = {split: self.dataset([row for row in self.rows if row[3] == split]) for split in SPLITS}
        datasets.DatasetDict(parts).save_to_disk(self.folder / "splits")
        return self.manifest("splits", dataset="splits")

    def as_imagefolder(self):
        for split in SPLITS:
            (self.folder / "images" / split).mkdir(parents=True)
        for name, data, _, split in self.rows:
            (self.folder / "images" / split / name).write_bytes(data)
        for split in SPLITS:
            lines = [{"file_name": name, "text": captions} for name, _, captions, of in self.rows if of == split]
            (self.folder / "images" / split / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return self.manifest("imagefolder", dataset="images", caption_columns="text")


def pictures_of(samples, manifest):
    """Return what opens the pictures of samples that were just read."""
    return open_pictures(samples.source, manifest.images, {image.file_name: image.place for image in samples.images})


def write_tar(path, members, mode="w", **options):
    """Write a tar of members, by their names or as pairs of name and content; a text is written as UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, **options) as archive:
        for name, content in members.items() if isinstance(members, dict) else members:
            content = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def members_of(rows):
    """Return what a tar has of these rows: pictures with JSON documents."""
    for name, data, captions, split in rows:
        yield name, data
        yield f"{name[:-4]}.json", json.dumps({"captions": captions, "split": split})


def manifest_with(folder, keys):
    """Write a manifest of a name and these keys into a folder, and load it."""
    (folder / "packed.yaml").write_text(f"name: packed\n{keys}\n")
    return load_manifest(folder / "packed.yaml")
