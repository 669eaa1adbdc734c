"""xret: cache frozen features once, train image-text retrieval heads in minutes.

What the command line does, Python does with the same options and defaults:

    import xret

    xret.extract("holiday.yaml", "holiday.zarr", visual="resnet50", text="words")    # stage one: features into a store
    xret.train("holiday.zarr", recipe="setdiv", out="run", settings={"model.dim": 256})   # stage two: a head from it
    print(xret.evaluate("run"))                                                      # the table

    retriever = xret.load("run", data_root="DIR")
    captions = retriever.encode_text(["two red cubes", "a disc"])   # [2, D]; [2, K, D] where embeddings are sets
    images = retriever.encode_images(["photo.jpg"])                 # [1, D]; [1, K, D]
    retriever.similarity(images, captions)                          # [1, 2]; larger is closer
    retriever.search("two red cubes", k=5)                          # five images of the store
    retriever.search(Path("photo.jpg"), k=5)                        # five captions

The parts are there for loops of your own: `xret.nn`, `xret.similarities`, `xret.losses`, `xret.metrics`, and
`xret.FeatureDataset` and `xret.batches` for what a store holds. `xret.testing` has the contracts of parts and encoders.

Importing xret is cheap: torch, Zarr and Dask are imported with the first function that is asked for. All errors are
`xret.errors.XretError`s, whose message is one sentence: what is wrong, where, and what to do.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from . import errors as errors
    from . import losses as losses
    from . import metrics as metrics
    from . import nn as nn
    from . import similarities as similarities
    from . import testing as testing
    from .heads.ablation.ablation import ablate as ablate
    from .heads.evaluation.alignment import align as align
    from .heads.evaluation.averaging import average as average
    from .heads.evaluation.evaluation import evaluate as evaluate
    from .heads.fit.fit import fit as fit
    from .heads.retrieval.retriever import load as load
    from .heads.runs.features import batches as batches
    from .heads.training.callbacks import Callback as Callback
    from .heads.training.finetuning.finetuning import finetune as finetune
    from .heads.training.train import train as train
    from .heads.tuning.tuning import tune as tune
    from .pipeline.data.manifest import Manifest
    from .pipeline.extraction.options import Options
    from .pipeline.extraction.plan import Plan
    from .pipeline.extraction.summary import Extraction
    from .pipeline.reading.dataset import FeatureDataset as FeatureDataset
    from .pipeline.store import FeatureCache as FeatureCache

_LAZY = {  # what is imported when it is asked for
    "Callback": "heads.training.callbacks",
    "FeatureCache": "pipeline.store",
    "FeatureDataset": "pipeline.reading.dataset",
    "ablate": "heads.ablation.ablation",
    "align": "heads.evaluation.alignment",
    "average": "heads.evaluation.averaging",
    "batches": "heads.runs.features",
    "evaluate": "heads.evaluation.evaluation",
    "finetune": "heads.training.finetuning.finetuning",
    "fit": "heads.fit.fit",
    "load": "heads.retrieval.retriever",
    "train": "heads.training.train",
    "tune": "heads.tuning.tuning",
}
_MODULES = ("errors", "losses", "metrics", "nn", "similarities", "testing")

__all__ = [*_LAZY, *_MODULES, "extract", "plan"]


def extract(
    dataset: "str | Path",
    store: "str | Path",
    *,
    visual: str | None = "resnet152",
    text: str | None = "bert",
    encoder: "str | Path | None" = None,
    visual_weights: str | None = None,
    text_weights: str | None = None,
    layers: Sequence[int] = (-1,),
    image_size: int | None = None,
    whole: bool = False,
    pool: tuple[int, int] | None = None,
    views: str | None = None,
    regions: tuple[int, int] | None = None,
    frames: int | None = None,
    prompt: str | None = None,
    dtype: str = "float16",
    trust: bool = False,
    splits: str | Sequence[str] = ("train", "val", "test"),
    batch_size: int = 64,
    device: str = "auto",
    workers: int | str | None = None,
    reuse: str | None = None,
    on_error: Literal["fail", "skip"] = "fail",
    repair: bool = False,
    data_root: "str | Path | None" = None,
) -> "Extraction":
    """Encode the images and captions of a data set once, into a feature store (``xret extract``).

    Call it again with the same options to resume after a stop.

    Args:
        dataset: a manifest's name (``coco``, ``flickr30k``, ``flickr8k``, ``rsicd``) or the path of a manifest.
        store: a local path or an fsspec URL.
        visual, text: the encoders, as ``xret list encoders`` names them; None skips a side.
        encoder: of pictures and texts, ``hf:ID``, ``hf:DIR``, ``open_clip:ARCH/TAG``, or the folder of a run in which
            `finetune` left its backbones; in the place of `visual` and `text`.
        layers: whose local features are stored, as a set each, of each encoder but ``words``; -1: the last.
        visual_weights, text_weights, image_size, whole, pool, views, regions, frames, prompt, dtype, trust: of the
            encoders, see `xret.pipeline.encoders.spec.EncoderSpec`.
        splits: names, or one text with commas.
        batch_size: samples encoded at once.
        device: ``auto``, ``cpu`` or ``cuda``.
        workers: threads that read pictures, or the address of a Dask scheduler.
        reuse: a store with features of the same pictures and captions, which are copied.
        on_error: ``fail``, or ``skip`` to record samples that cannot be read and go on.
        repair: compute damaged chunks and failed samples again.
        data_root: the folder that the manifest's paths start from; None: the manifest's own.

    Returns:
        What was computed, and what was there already, by feature set.

    Raises:
        ManifestError, SampleError: the data set cannot be read.
        EncoderError: an encoder is unknown, or its weights cannot be loaded.
        CacheError: the store holds something else, or there is nothing to extract.
        OutputError: the store cannot be written.
        StoreError: an object store does not answer; so do all functions that read a store.
    """
    given = dict(locals())
    from .pipeline.extraction.extraction import extract

    return extract(*_asked(**given))


def plan(dataset: "str | Path", store: "str | Path", *, price: float | None = None, **options: Any) -> "Plan":
    """Foresee what `extract` will take: samples, bytes, tasks, hours and cost (``xret extract --plan``).

    A hundred pictures are encoded, on this machine or on a worker of the cluster; nothing is written to the store.

        print(xret.plan("rsicd", "rsicd.zarr", data_root="DIR", workers="tcp://host:8786", price=0.5))

    Args:
        dataset, store: as of `extract`; what the store has already is left out.
        price: of an hour of a worker, or of this machine.
        options: as of `extract`.

    Returns:
        What is left to do of each side, and all together; ``print`` shows it.

    Raises:
        XretError: as `extract` does.
    """
    from .pipeline.extraction.plan import plan

    return plan(*_asked(dataset, store, **options), price)


def _asked(
    dataset: "str | Path",
    store: "str | Path",
    *,
    data_root: "str | Path | None" = None,
    encoder: "str | Path | None" = None,
    **given: Any,
) -> "tuple[Manifest, str, Options]":
    """Return what an extraction is asked for."""
    from pathlib import Path

    from .pipeline.data.manifest import load_manifest
    from .pipeline.extraction.options import build_options

    run = None
    if encoder is not None and (Path(encoder) / "run.json").is_file():
        from .heads.runs.encoders import specs_of_run

        run, encoder = specs_of_run(encoder, given.get("trust", False)), None
    options = build_options(**given, encoder=encoder, run=run)
    return load_manifest(dataset, None if data_root is None else Path(data_root)), str(store), options


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
