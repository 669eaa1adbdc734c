"""The index of a run: its gallery, images and captions, embedded batch by batch and never held as a whole."""

import functools
from collections.abc import Sequence as Several
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...pipeline.errors import RunError
from ..runs.info import absolute
from .hits import Modality
from .index.build import DEFAULTS, IndexOptions, IndexReport, add, write_candidates
from .index.candidates import load_faiss
from .index.folder import appearing, holds
from .index.items import Items, append
from .index.search import Index
from .index.sharded import ShardWorkers, shards_of
from .index.vectors import form_of
from .retriever import Retriever

MODALITIES: tuple[Modality, Modality] = ("images", "captions")
SAMPLE = 400  # queries that the recall is measured with


@dataclass(frozen=True)
class RunIndex:
    """What was built of a run.

    Attributes:
        run, out: the run, and the folder of its index.
        images, captions: what was built; None where nothing was to be added.
    """

    run: str
    out: str
    images: IndexReport | None = None
    captions: IndexReport | None = None


def index_run(
    run: str | Path,
    out: str | Path,
    store: str | None = None,
    *,
    split: str = "test",
    device: str = "auto",
    options: IndexOptions = DEFAULTS,
) -> RunIndex:
    """Make a folder with an index of a gallery's ``images`` and one of its ``captions``.

    The recall of either is measured with a sample of the other.

    Args:
        run: the run.
        out: the folder, which appears when it is whole.
        store: the feature cache; None: the one that the run was trained on.
        split: whose images and captions.
        device: ``auto``, ``cpu`` or ``cuda``, for embedding and comparing.
        options: how both are built.

    Raises:
        RunError: the run, its features or `out` cannot be used, or FAISS is missing.
        CacheError: the split is unknown, empty or not complete.
    """
    load_faiss()
    retriever = Retriever(run, store=store, split=split, device=device)
    gallery, form = retriever.gallery, form_of(retriever.model.compare)
    with appearing(Path(out)) as partial:
        records, queries = {}, {}
        for modality in MODALITIES:
            folder = partial / modality
            folder.mkdir()
            facts = retriever.index_facts(modality)
            records[modality] = append(folder, gallery.embedded(modality), *gallery.names(modality), facts)
            items = Items(folder, records[modality]["items"])
            rows = np.random.default_rng(options.seed).permutation(len(items))[:SAMPLE]
            queries[modality] = items.some(np.sort(rows))
        reports = {
            modality: write_candidates(
                partial / modality, records[modality], queries[other], retriever.comparison(modality), form, options
            )
            for modality, other in zip(MODALITIES, MODALITIES[::-1], strict=True)
        }
    return RunIndex(str(run), str(out), **reports)


def add_to_index(
    run: str | Path, out: str | Path, store: str | None = None, *, split: str = "test", device: str = "auto"
) -> RunIndex:
    """Add another split, or another store's, to the indexes that `index_run` made at `out`; else as there.

    Stopped in between, the images are in and the captions are not: the same call again adds what is missing.

    Raises:
        RunError: also where there is no index, it is of another run, damaged, or has these samples already.
    """
    if shards := shards_of(out):
        raise RunError(f"{out} holds {len(shards)} shards, each with an index: name one of them as --out {shards[0]}")
    retriever = Retriever(run, store=store, split=split, device=device)
    gallery, facts = retriever.gallery, {modality: retriever.index_facts(modality) for modality in MODALITIES}
    parts = {
        modality: Index(Path(out, modality), {"weights": facts[modality]["weights"]}).parts for modality in MODALITIES
    }
    missing = [modality for modality in MODALITIES if not holds(parts[modality], facts[modality])] or MODALITIES
    reports = {
        modality: add(
            Path(out, modality),
            gallery.embedded(modality),
            *gallery.names(modality),
            facts[modality],
            retriever.comparison(modality),
        )
        for modality in missing
    }
    return RunIndex(str(run), str(out), **reports)


def index_shards(
    run: str | Path,
    stores: Several[str | None],
    out: str | Path,
    *,
    split: str = "test",
    device: str = "auto",
    options: IndexOptions = DEFAULTS,
    scheduler: str | None = None,
) -> list[RunIndex]:
    """Make a folder with an index for every store, each built by a worker; it appears when all are done.

    Args:
        run: the run, where the workers see it.
        stores: the feature caches, likewise; None: the one that the run was trained on.
        out: the folder, likewise; its shards are in the order of the stores.
        split, device, options: of `index_run`.
        scheduler: the address of a Dask scheduler; None: build here, one after the other.

    Raises:
        RunError, CacheError: as for `index_run` and `ShardedSearch`.
    """
    places = [store and absolute(store) for store in stores]
    if twice := [place for place in places if places.count(place) > 1]:
        raise RunError(
            f"{twice[0] or 'the store of the run'} is named twice, and would give each hit twice; leave one out"
        )
    names = [f"shard-{number:04}" for number in range(len(stores))]
    with closing(ShardWorkers(scheduler)) as workers, appearing(Path(out).resolve()) as partial:
        source = str(Path(run).resolve())
        build = functools.partial(index_run, split=split, device=device, options=options)
        tasks = [(source, str(partial / name), place) for name, place in zip(names, places, strict=True)]
        made = workers.run(build, tasks)
    return [replace(one, run=str(run), out=f"{out}/{name}") for name, one in zip(names, made, strict=True)]
