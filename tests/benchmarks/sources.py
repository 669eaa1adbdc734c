"""What it costs to read pictures from tars and Parquet, against a folder, and to look through them.

Each command prints one JSON line:

    python tests/benchmarks/sources.py rate --pictures 2048
    python tests/benchmarks/sources.py read
    python tests/benchmarks/sources.py memory
    python tests/benchmarks/sources.py index --members 1000000
"""

import io
import json
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import closing
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

from xret.pipeline.data.images import open_image
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.samples import read_samples
from xret.pipeline.extraction.extraction import Options, extract


@click.group()
def main() -> None:
    """Benchmarks of sources."""


@main.command()
@click.option("--pictures", default=2048, show_default=True)
@click.option("--side", default=320, show_default=True, help="of a picture, pixels")
@click.option("--visual", default="mobilenet_v2", show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--workers", default=2, show_default=True)
@click.option("--device", default="cpu", show_default=True)
def rate(pictures: int, side: int, visual: str, rounds: int, workers: int, device: str) -> None:
    """Extract the same pictures from a folder, tars and Parquet in turn; print pictures a second and their ratios."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifests = {form: load_manifest(path) for form, path in _write(folder, pictures, side).items()}
        rates: dict[str, list[float]] = {form: [] for form in manifests}
        options = Options(visual, "random:0", text=None, splits=("train",), workers=workers, device=device)
        for number in range(rounds + 1):  # the first one warms up
            for form, manifest in manifests.items():
                found = extract(manifest, str(folder / f"{form}-{number}.zarr"), options).sets[0].per_second
                rates[form] += [found] if number else []
    medians = {form: statistics.median(found) for form, found in rates.items()}
    ratios = {form: round(found / medians["folder"], 3) for form, found in medians.items()}
    _say(pictures=pictures, per_second={form: round(found, 1) for form, found in medians.items()}, ratios=ratios)


@main.command()
@click.option("--pictures", default=1024, show_default=True)
@click.option("--side", default=320, show_default=True, help="of a picture, pixels")
@click.option("--rounds", default=5, show_default=True)
def read(pictures: int, side: int, rounds: int) -> None:
    """Open and decode the same pictures from each form in turn; print CPU time a picture and ratios of rates."""
    with tempfile.TemporaryDirectory() as name:
        manifests = {form: load_manifest(path) for form, path in _write(Path(name), pictures, side).items()}
        samples = {form: read_samples(manifest) for form, manifest in manifests.items()}
        seconds: dict[str, list[float]] = {form: [] for form in manifests}
        for number in range(rounds + 1):  # the first one warms up
            for form, manifest in manifests.items():
                began = time.process_time()
                with closing(samples[form].open_pictures(manifest.images, pictures)) as reader:
                    for image in samples[form].images:
                        open_image(reader.open(image.file_name))
                seconds[form] += [time.process_time() - began] if number else []
    medians = {form: statistics.median(found) for form, found in seconds.items()}
    ratios = {form: round(medians["folder"] / found, 3) for form, found in medians.items()}
    _say(
        pictures=pictures, ms={form: round(1e3 * found / pictures, 3) for form, found in medians.items()}, ratios=ratios
    )


def _write(folder: Path, pictures: int, side: int) -> dict[str, Path]:
    """Write the pictures in each form, 256 in a file and 64 in a row group; return the manifests."""
    names = [f"{number:07d}.jpg" for number in range(pictures)]
    contents = [_picture(number, side) for number in range(pictures)]
    (folder / "images").mkdir()
    for name, content in zip(names, contents, strict=True):
        (folder / "images" / name).write_bytes(content)
    lines = [json.dumps({"file_name": name, "caption": "a dog", "split": "train"}) for name in names]
    (folder / "captions.jsonl").write_text("\n".join(lines))
    for number, first in enumerate(range(0, pictures, 256)):
        part = list(zip(names, contents, strict=True))[first : first + 256]
        with tarfile.open(folder / f"{number:05d}.tar", "w") as archive:
            for name, content in part:
                _add(archive, name, content)
                _add(archive, f"{name[:-4]}.txt", b"a dog")
        table = pa.table(
            {
                "image": [{"bytes": content, "path": name} for name, content in part],
                "caption": ["a dog"] * len(part),
            }
        )
        parquet.write_table(table, folder / f"{number:05d}.parquet", row_group_size=64)
    return {
        "folder": _manifest(folder, "folder", images="images", captions="captions.jsonl"),
        "tar": _manifest(folder, "tar", tar={"train": "*.tar"}),
        "parquet": _manifest(folder, "parquet", parquet={"train": "*.parquet"}),
    }


@main.command()
@click.option("--few", default=10_000, show_default=True, help="rows in 10 files")
@click.option("--many", default=100_000, show_default=True, help="rows in 100 files")
@click.option("--kind", type=click.Choice(["tar", "parquet"]), default="parquet", show_default=True)
def memory(few: int, many: int, kind: str) -> None:
    """Print the peak memory of extracting few and many rows, each in a process of its own, with a small encoder."""
    peaks = {}
    for rows, files in ((few, 10), (many, 100)):
        with tempfile.TemporaryDirectory() as name:
            path = _write_rows(Path(name), rows, files, kind)
            words = [sys.executable, __file__, "extract-once", str(path), str(Path(name, "s.zarr"))]
            done = subprocess.run(words, check=True, capture_output=True, text=True)
            peaks[rows] = int(done.stdout.splitlines()[-1])
    _say(kind=kind, mb={rows: round(peak / 1e6, 1) for rows, peak in peaks.items()}, ratio=peaks[many] / peaks[few])


def _write_rows(folder: Path, rows: int, files: int, kind: str) -> Path:
    """Write the same small picture many times."""
    content, each = _picture(0, 64), rows // files
    for file in range(files):
        names = [f"{file * each + number:08d}" for number in range(each)]
        if kind == "tar":
            with tarfile.open(folder / f"{file:05d}.tar", "w") as archive:
                for name in names:
                    _add(archive, f"{name}.jpg", content)
                    _add(archive, f"{name}.txt", b"a dog")
        else:
            table = pa.table({"image": pa.array([content] * each, pa.binary()), "caption": ["a dog"] * each})
            parquet.write_table(table, folder / f"{file:05d}.parquet", row_group_size=250)
    return _manifest(folder, kind, **{kind: {"train": f"*.{kind}"}})


@main.command("extract-once", hidden=True)
@click.argument("manifest")
@click.argument("store")
def extract_once(manifest: str, store: str) -> None:
    """Extract with a tiny input and print the peak of this process's memory in bytes."""
    options = Options("resnet18", "random:0", image_size=64, text=None, splits=("train",), workers=1)
    extract(load_manifest(manifest), store, options)
    click.echo(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


@main.command()
@click.option("--members", default=1_000_000, show_default=True, help="of tars, half of them pictures")
@click.option("--files", default=100, show_default=True)
def index(members: int, files: int) -> None:
    """Look through tars whose pictures are a few bytes; print seconds and the bytes that an entry takes in a store."""
    with tempfile.TemporaryDirectory() as name:
        folder, each = Path(name), members // files // 2
        for file in range(files):
            with tarfile.open(folder / f"{file:05d}.tar", "w") as archive:
                for number in range(each):
                    _add(archive, f"{file * each + number:08d}.jpg", b"none")
                    _add(archive, f"{file * each + number:08d}.txt", b"a dog runs over a field")
        manifest = load_manifest(_manifest(folder, "tar", tar={"train": "*.tar"}))
        began = time.perf_counter(), time.process_time()
        samples = read_samples(manifest)
        seconds, busy = time.perf_counter() - began[0], time.process_time() - began[1]
        places = np.array([image.place for image in samples.images], dtype=np.int64)
    rounded = {"seconds": round(seconds, 1), "cpu_seconds": round(busy, 1)}
    _say(members=members, **rounded, bytes_an_entry=places.itemsize * 3)


def _manifest(folder: Path, name: str, **keys: object) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({"name": "bench", **keys}))
    return path


def _picture(number: int, side: int) -> bytes:
    file, rng = io.BytesIO(), np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8))
    coarse.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _say(**found: object) -> None:
    click.echo(json.dumps(found))


if __name__ == "__main__":
    main()
