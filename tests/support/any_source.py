"""A few captioned pictures in each form that a manifest can name, written by other libraries."""

import csv
import json
from pathlib import Path

import datasets
import pyarrow as pa
from packed_data import manifest_with, write_tar
from pyarrow import parquet

FORMS = (".csv", ".tsv", ".jsonl", "karpathy", "coco", "imagefolder", "tar", "parquet", "saved")


def write_source(form: str, folder: Path, rows: list[dict], more: str = ""):
    """Write rows in a form and load their manifest; the first values of a row are a picture's name and its caption."""
    for name in ("images", "data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    names, captions, *_ = zip(*(row.values() for row in rows), strict=True)
    rest = [dict(list(row.items())[2:]) for row in rows]
    key = list(rows[0])[1]
    file = folder / f"captions{form if form.startswith('.') else '.json'}"
    keys = f"images: images\ncaptions: {file.name}"
    if form in (".csv", ".tsv"):
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, rows[0].keys(), delimiter="," if form == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    elif form == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "karpathy":
        listed = zip(names, captions, rest, strict=True)
        images = [{"filename": name, "sentences": [{key: text}], **more} for name, text, more in listed]
        file.write_text(json.dumps({"images": images}))
    elif form == "coco":
        listed = enumerate(zip(names, rest, strict=True))
        images = [{"id": number, "file_name": name, **more} for number, (name, more) in listed]
        annotations = [{"id": number, "image_id": number, key: text} for number, text in enumerate(captions)]
        file.write_text(json.dumps({"images": images, "annotations": annotations}))
    elif form == "imagefolder":
        (folder / "data" / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        keys = "dataset: data"
    elif form == "tar":
        documents = [json.dumps({key: text, **more}) for text, more in zip(captions, rest, strict=True)]
        named = {f"{Path(name).stem}.json": document for name, document in zip(names, documents, strict=True)}
        write_tar(folder / "data.tar", dict.fromkeys(names, "picture") | named)
        keys = "tar: data.tar"
    else:
        columns = {name: [row[name] for row in rest] for name in rest[0]}
        pictures = pa.array([{"bytes": b"picture", "path": name} for name in names])
        table = pa.table({"image": pictures, key: pa.array(captions, pa.string()), **columns})
        if form == "parquet":
            parquet.write_table(table, folder / "data.parquet")
        else:
            datasets.Dataset(table).save_to_disk(folder / "data")
        keys = "parquet: data.parquet" if form == "parquet" else "dataset: data"
    return manifest_with(folder, f"{keys}\n{more}")
