"""Count what becomes of random damage to stores, and of bad input of every kind: two tables, from a seed.

    PYTHONPATH=tests/support OMP_NUM_THREADS=1 python tests/benchmarks/damage_counts.py EMPTY_FOLDER \\
        --damages 1000 --inputs 10800

A damage is found by `verify`, harmless (`verify` finds nothing and all that readers give is right), or missed. A bad
input ends in a sentence, is accepted as what it still is, or gives a traceback or takes more than a minute. Exits with
1 if anything is missed or no sentence.
"""

import argparse
import csv
import io
import json
import random
import re
import shutil
import signal
import socket
import sys
import traceback
from collections import Counter, defaultdict
from contextlib import redirect_stderr, suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from damage import damaged
from PIL import Image
from region_sources import ARRAYS, World
from safetensors.torch import save_file
from small_runs import HEAD
from small_server import FakeRetriever, Running, picture_bytes, require_alive
from small_store import make_store

from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.training import train
from xret.pipeline.data.images import open_image
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.samples import read_samples
from xret.pipeline.encoders.weights import read_weights
from xret.pipeline.encoders.word_vectors import read_word_vectors
from xret.pipeline.errors import CacheError, QueryError, XretError
from xret.pipeline.exchange.importers import open_source
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.upkeep.verify import verify

LIMIT = 60  # seconds after which an input counts as one that hangs
SILENCE = 1.0  # seconds that a server which waits for the rest of a request is given


# --- Stores


def read_all(url):
    """Return everything that a reader can ask of a store."""
    cache = FeatureCache.open(str(url))
    found = [cache.ids(0, cache.images), cache.file_names(0, cache.images), cache.caption_texts(0, cache.captions)]
    arrays = [cache.caption_image, cache.caption_count, cache.sample_array("cocoid"), cache.sentids(0, cache.captions)]
    for path in cache.set_paths():
        features = cache.set_at(path)
        rows = np.arange(cache.images if features.modality == "images" else cache.captions)
        readers = [features.local, features.global_] if features.channels else []
        readers += [] if features.modality == "images" else [features.token]
        arrays += [features.done(), features.status, features.length, *(read(rows) for read in readers)]
    return [array.tobytes() for array in arrays], found


def swap_files(path, files, dice):
    other = dice.choice([one for one in files if one != path])
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)


def copy_over(path, files, dice):
    path.write_bytes(dice.choice([one for one in files if one != path]).read_bytes())


def flip(path, _files, dice):
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(bytes(data))


def cut(path, _files, dice):
    path.write_bytes(path.read_bytes()[: dice.randrange(path.stat().st_size)])


def zero(path, _files, _dice):
    path.write_bytes(bytes(path.stat().st_size))


def lengthen(path, _files, dice):
    path.write_bytes(path.read_bytes() + dice.randbytes(dice.randrange(1, 20)))


def empty(path, _files, _dice):
    path.write_bytes(b"")


def delete(path, _files, _dice):
    path.unlink()


def fold(path, _files, _dice):
    path.unlink()
    path.mkdir()


def scramble(path, _files, dice):
    path.write_bytes(damaged(path.read_bytes(), np.random.default_rng(dice.randrange(1 << 32))))


DAMAGES = (flip, cut, empty, zero, lengthen, delete, fold, swap_files, copy_over, scramble)


def after_damage(url, whole):
    """Return what becomes of a damaged store."""
    try:
        found = not verify(str(url)).ok
    except CacheError:
        found = True
    if found:
        return "found"
    try:
        return "harmless" if read_all(url) == whole else "missed"
    except CacheError:
        return "refused by readers only"


def count_damages(folder, number, dice):
    """Return {kind: {what became of it: times}}."""
    counts = defaultdict(Counter)
    whole = make_store(folder / "whole.zarr", text=("words", "tokens"), broken=(3,))
    truth = read_all(whole)
    for turn in range(number):
        kind, url = DAMAGES[turn % len(DAMAGES)], folder / "damaged.zarr"
        shutil.rmtree(url, ignore_errors=True)
        shutil.copytree(whole, url)
        files = sorted(path for path in url.rglob("*") if path.is_file())
        path = dice.choice([path for path in files if path.stat().st_size])
        before = path.read_bytes()
        kind(path, files, dice)
        if path.is_file() and path.read_bytes() == before:
            outcome = "changed nothing"
        elif "/done/c/" in str(path) and kind is delete:
            outcome = "says: not done"
        else:
            outcome = guarded(lambda url=url: after_damage(url, truth))
        counts[kind.__name__][outcome] += 1
        if outcome in ("missed", "traceback", "hangs"):
            print(f"damage {turn}: {kind.__name__} of {path.relative_to(url)}: {outcome}", flush=True)
    return counts


# --- Inputs


def guarded(work):
    """Return what `work` returns; ``traceback`` or ``hangs`` where it ends in anything but a sentence."""

    def stop(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        with redirect_stderr(io.StringIO()):  # bars and notes
            return work()
    except TimeoutError:
        return "hangs"
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return "traceback"
    finally:
        signal.alarm(0)


def make_inputs(folder):
    """Return by kind a good file and what reads it."""
    images, entries = folder / "data" / "images", []
    images.mkdir(parents=True)
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(images / f"{number}.jpg")
        split = ("train", "val", "test")[number % 3]
        entries.append({"filename": f"{number}.jpg", "imgid": number, "split": split, "sentences": [{"raw": "a cat"}]})
    data = folder / "data"
    (data / "k.json").write_text(json.dumps({"dataset": "x", "images": entries}))
    with (data / "c.csv").open("w") as file:
        rows = [(entry["filename"], "a cat, sitting", entry["split"]) for entry in entries]
        csv.writer(file).writerows([("file_name", "caption", "split"), *rows])
    lines = [{"file_name": entry["filename"], "caption": "a cat", "split": entry["split"]} for entry in entries]
    (data / "l.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for kind, captions in (("karpathy", "k.json"), ("csv", "c.csv"), ("jsonl", "l.jsonl")):
        (data / f"{kind}.yaml").write_text(f"name: x\nimages: images\ncaptions: {captions}\n")
    for form in ("png", "webp", "gif", "tiff", "bmp"):
        Image.open(images / "0.jpg").save(folder / f"p.{form}")
    state = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}
    save_file(state, folder / "w.safetensors")
    torch.save(state, folder / "w.pth")
    torch.save(state, folder / "old.pth", _use_new_zipfile_serialization=False)
    (folder / "vectors.txt").write_text("2 3\na 1 2 3\ncat 4 5 6\n")
    recipe = load_recipe("vsepp", HEAD)
    store = make_store(folder / "s.zarr", train=12, val=4, test=6)
    train(store, recipe, folder / "run", device="cpu")
    shutil.copyfile(folder / "run" / "recipe.yaml", folder / "r.yaml")

    def samples(kind):
        return lambda _path: read_samples(load_manifest(data / f"{kind}.yaml"))

    def run(_path):
        opened = Run(folder / "run")
        opened.metrics()
        opened.model(torch.device("cpu"))

    inputs = {
        "manifest": (data / "csv.yaml", samples("csv")),
        "captions, Karpathy": (data / "k.json", samples("karpathy")),
        "captions, CSV": (data / "c.csv", samples("csv")),
        "captions, JSON lines": (data / "l.jsonl", samples("jsonl")),
        "recipe": (folder / "r.yaml", lambda path: load_recipe(str(path))),
        "word vectors": (folder / "vectors.txt", lambda path: read_word_vectors(path, ("<unk>", "a", "cat"))),
        "store": (folder / "s.zarr" / "zarr.json", lambda _path: read_all(folder / "s.zarr")),
    }
    inputs |= {f"weights, {name}": (folder / name, read_weights) for name in ("w.safetensors", "w.pth", "old.pth")}
    inputs["picture, jpg"] = (images / "0.jpg", open_image)
    inputs |= {f"picture, {form}": (folder / f"p.{form}", open_image) for form in ("png", "webp", "gif", "tiff", "bmp")}
    names = ("run.json", "config.json", "recipe.yaml", "metrics.jsonl", "model.safetensors", "vocabulary.json")
    inputs |= {f"run, {name}": (folder / "run" / name, run) for name in names}
    world = World(folder / "world")
    sources = {"hdf5": world.hdf5(), "butd-tsv": world.tsv(lxmert=False), "scan": world.scan()}
    for kind, source in sources.items():
        file = source / "train_ims.npy" if source.is_dir() else source
        arrays = ARRAYS if kind == "hdf5" else {}
        inputs[f"import, {kind}"] = (file, lambda _p, k=kind, s=source, a=arrays: open_source(k, s, "world", a))
    server, picture = Running(FakeRetriever(folder)), picture_bytes()
    always = b"HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    (folder / "text.http").write_bytes(b"GET /api/search?q=a+blue+thing&k=3 " + always + b"\r\n")
    head = b"Content-Type: image/png\r\nContent-Length: %d\r\n\r\n" % len(picture)
    (folder / "picture.http").write_bytes(b"POST /api/search?k=3 " + always + head + picture)
    inputs |= {f"request, {what}": (folder / f"{what}.http", partial(ask, server)) for what in ("text", "picture")}
    return inputs


def ask(server, path):
    """Send a request; one that is answered with an error, or waited for after its end, is refused."""
    received = b""
    sending = socket.create_connection(server.address, timeout=SILENCE)
    with sending as connection, suppress(ConnectionError, TimeoutError):
        connection.sendall(path.read_bytes())
        while part := connection.recv(1 << 16):
            received += part
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]
    assert all(status < 500 for status in statuses), received
    require_alive(server)
    if not statuses or max(statuses) >= 400:
        raise QueryError("refused")


def count_inputs(folder, number, dice):
    """Return {kind: {what became of it: times}}."""
    counts, inputs = defaultdict(Counter), make_inputs(folder)
    rng = np.random.default_rng(dice.randrange(1 << 32))
    good = {path: path.read_bytes() for path, _ in inputs.values()}
    for turn in range(number):
        kind = list(inputs)[turn % len(inputs)]
        path, read = inputs[kind]
        path.write_bytes(damaged(good[path], rng))

        def work(read=read, path=path):
            try:
                read(path)
            except XretError as error:
                assert "\n" not in str(error), error
                return "sentence"
            return "accepted"

        outcome = guarded(work)
        counts[kind][outcome] += 1
        if outcome in ("traceback", "hangs"):
            shutil.copyfile(path, folder / f"bad-{turn}{path.suffix}")
            print(f"input {turn}, {kind}: {outcome}; kept as bad-{turn}{path.suffix}", flush=True)
        path.write_bytes(good[path])
    return counts


def show(title, counts):
    outcomes = list(dict.fromkeys(outcome for of_kind in counts.values() for outcome in of_kind))
    print(f"\n{title:22} " + " ".join(f"{outcome:>16}" for outcome in outcomes))
    for kind, of_kind in counts.items():
        print(f"{kind:22} " + " ".join(f"{of_kind[outcome]:16}" for outcome in outcomes))
    print(f"{'together':22} " + " ".join(f"{sum(c[o] for c in counts.values()):16}" for o in outcomes), flush=True)
    return sum(of_kind[what] for of_kind in counts.values() for what in ("missed", "traceback", "hangs"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--inputs", type=int, default=10_800)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    folder, dice = asked.folder.resolve(), random.Random(asked.seed)
    bad = show("damage", count_damages(folder, asked.damages, dice)) if asked.damages else 0
    bad += show("bad input", count_inputs(folder, asked.inputs, dice)) if asked.inputs else 0
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
