"""A store after any order of work, kills and damage, against a simple model of what must be there."""

import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import small_encoder
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from small_extraction import SMALL, files

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError, XretError
from xret.pipeline.exchange.exporters.export import export
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.storage.store import Store
from xret.pipeline.store.upkeep.contents import remove_set
from xret.pipeline.store.upkeep.merge import merge
from xret.pipeline.store.upkeep.verify import verify

SPLITS = ("train", "val", "test")
SETS = {"images": {"text": None}, "captions": {"visual": None}}


class Killed(BaseException):
    """What nobody catches."""


class StoreMachine(RuleBasedStateMachine):
    """Of each set the model knows which splits must be whole; damage makes a set suspect until it is repaired."""

    manifest = whole = None

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.url = str(self.folder / "a.zarr")
        self.done = {"images": set(), "captions": set()}
        self.damaged = set()

    def teardown(self):
        shutil.rmtree(self.folder)

    @initialize()
    def begin(self):
        self.extract("images", {"train"})

    def options(self, modality, splits, **more):
        return replace(SMALL, shard_images=8, splits=tuple(splits), **SETS[modality], **more)

    @rule(modality=st.sampled_from(list(SETS)), splits=st.sets(st.sampled_from(SPLITS), min_size=1))
    @precondition(lambda self: not self.damaged)
    def extract(self, modality, splits):
        extract(self.manifest, self.url, self.options(modality, sorted(splits)))
        self.done[modality] |= splits

    @rule(modality=st.sampled_from(list(SETS)), after=st.integers(0, 30))
    @precondition(lambda self: not self.damaged)
    def extract_and_die(self, modality, after):
        write, left = Store.write_shard, [after]

        def dying(store, name, shard, values):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            write(store, name, shard, values)

        Store.write_shard = dying
        try:
            extract(self.manifest, self.url, self.options(modality, SPLITS, workers=1))
            self.done[modality] |= set(SPLITS)
        except Killed:
            pass
        finally:
            Store.write_shard = write

    @rule(seed=st.integers(0, 10**6), kind=st.sampled_from(["flip", "cut", "empty", "remove"]))
    @precondition(lambda self: not self.damaged)
    def damage(self, seed, kind):
        dice = random.Random(seed)
        marked = [path for path in self.paths() for mark in self.marks(path) if mark]
        if not marked:
            return
        path = dice.choice(marked)
        shard = dice.choice([number for number, mark in enumerate(self.marks(path)) if mark])
        below = Path(self.url, path)
        data = sorted(file for file in below.glob(f"*/c/{shard}/**/*") if file.is_file())
        data += [file for file in below.glob(f"*/c/{shard}") if file.is_file() and "done" not in file.parts]
        file = dice.choice(data)
        old = file.read_bytes()
        at = dice.randrange(len(old))
        new = {"flip": old[:at] + bytes([old[at] ^ 1]) + old[at + 1 :], "cut": old[:at], "empty": b""}
        file.unlink() if kind == "remove" else file.write_bytes(new[kind])
        self.damaged.add(path)
        assert not verify(self.url).ok

    @rule()
    @precondition(lambda self: self.damaged)
    def repair(self):
        for modality, splits in self.done.items():
            if splits:
                extract(self.manifest, self.url, self.options(modality, SPLITS, repair=True))
                self.done[modality] = set(SPLITS)
        for path in self.paths():  # damage of a set that had begun and finished no split
            if path in self.damaged:
                extract(self.manifest, self.url, self.options(path.split("/")[0], SPLITS, repair=True))
                self.done[path.split("/")[0]] = set(SPLITS)
        self.damaged = set()

    @rule(modality=st.sampled_from(list(SETS)))
    def remove(self, modality):
        for path in self.paths(modality):
            remove_set(self.url, path)
            self.damaged.discard(path)
        self.done[modality] = set()

    @rule()
    def merge(self):
        target = self.folder / "merged.zarr"
        try:
            merge(str(target), [self.url])
        except CacheError:
            assert self.damaged
        else:
            assert not self.damaged
            assert verify(str(target)).ok
            merged = {name: data for name, data in files(target).items() if "/c/" in name}
            assert merged.items() <= {name: self.whole[name] for name in merged}.items()
        shutil.rmtree(target, ignore_errors=True)

    @rule(modality=st.sampled_from(list(SETS)))
    def export(self, modality):
        paths = self.paths(modality)
        splits = sorted(self.done[modality], key=SPLITS.index)
        if paths and splits:
            try:
                export(self.url, "hdf5", self.folder / "e.h5", sets=paths, splits=tuple(splits))
            except XretError:
                assert self.damaged
            assert not list(self.folder.glob(".*partial"))
            (self.folder / "e.h5").unlink(missing_ok=True)

    def paths(self, *modalities):
        return FeatureCache.open(self.url).set_paths(*modalities)

    def marks(self, path):
        return FeatureCache.open(self.url).set_at(path).done().tolist()

    @invariant()
    def it_holds_what_it_must(self):
        if not Path(self.url).exists():
            return
        assert verify(self.url).ok == (not self.damaged)
        for path in self.paths():
            features = FeatureCache.open(self.url).set_at(path)
            assert all(features.complete(split) for split in self.done[features.modality])
        there = files(self.url)
        suspect = tuple(f"{path}/" for path in self.damaged)
        for name, data in there.items():
            group, _, shard = name.partition("/done/c/")
            if shard and data == self.whole[name] and not name.startswith(suspect or "none"):
                of_shard = [one for one in self.whole if one.startswith(f"{group}/") and f"/c/{shard}/" in f"{one}/"]
                assert all(there.get(one) == self.whole[one] for one in of_shard), name


@pytest.mark.parametrize("orders", [3, pytest.param(150, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_any_order(tiny_dataset, tmp_path, monkeypatch, orders):
    small_encoder.use(monkeypatch)
    monkeypatch.setattr(small_encoder.SmallEncoder, "pause", 0)
    manifest = load_manifest(tiny_dataset(train=20, val=6, test=6))
    extract(manifest, str(tmp_path / "whole.zarr"), replace(SMALL, shard_images=8))
    StoreMachine.manifest, StoreMachine.whole = manifest, files(tmp_path / "whole.zarr")
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=orders, stateful_step_count=10, deadline=None)
    )
