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
    retriever.search("two red cubes", k=5)                          # five images of the store's test split
    retriever.search(Path("photo.jpg"), k=5)                        # five captions

Importing xret is cheap: torch, Zarr and Dask are imported by the functions, at their first call. All errors are
`xret.pipeline.errors.XretError`s, whose message is one sentence: what is wrong, where, and what to do.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from .heads.ablation.ablation import Ablation
    from .heads.evaluation.evaluation import evaluate
    from .heads.retrieval.retriever import Retriever
    from .heads.training.trainer import TrainSummary
    from .heads.tuning.tuning import Tuning
    from .pipeline.extraction.summary import Extraction
    from .pipeline.store import FeatureCache

    Settings = Mapping[str, Any] | Sequence[str]  # {"model.dim": 256}, or as on the command line: ["model.dim=256"]

__all__ = ["FeatureCache", "ablate", "evaluate", "extract", "finetune", "load", "train", "tune"]


def extract(
    dataset: "str | Path",
    store: "str | Path",
    *,
    data_root: "str | Path | None" = None,
    encoder: "str | Path | None" = None,
    **options: Any,
) -> "Extraction":
    """Encode the images and captions of a data set once, into a feature cache (``xret extract``).

    Stopped at any moment and called again with the same options, it goes on where it was.

    Args:
        dataset: a manifest's name (``coco``, ``flickr30k``, ``flickr8k``, ``rsicd``) or the path of a manifest.
        store: the cache: a local path or an fsspec URL.
        data_root: what the manifest's relative paths are relative to; None: the manifest's folder.
        encoder: of pictures and texts, ``hf:ID``, ``hf:DIR``, ``open_clip:ARCH/TAG``, or the folder of a run in which
            `finetune` left its backbones; in the place of `visual` and `text`.
        options: of `pipeline.extraction.options.build_options` and `Options`, with their defaults: ``visual``,
            ``visual_weights``, ``text``, ``text_weights``, ``layer``, ``image_size``, ``whole``, ``pool``, ``views``,
            ``regions``, ``frames``, ``prompt``, ``dtype``, ``trust``, ``splits``, ``batch_size``, ``device``,
            ``workers``, ``reuse``, ``on_error``, ``repair``.

    Returns:
        What was computed, and what was there already, by feature set.

    Raises:
        ManifestError, SampleError: the data set cannot be read.
        EncoderError: an encoder is unknown, or its weights cannot be loaded.
        CacheError: the store holds something else, or cannot be written; or there is nothing to extract.
        StoreError: an object store does not answer; so do all functions that read a store.
        TypeError: there is no such option.
    """
    from dataclasses import fields
    from inspect import signature
    from pathlib import Path

    from .pipeline.data.manifest import load_manifest
    from .pipeline.errors import nearest
    from .pipeline.extraction.extraction import extract
    from .pipeline.extraction.options import Options, build_options

    known = [*signature(build_options).parameters, *(field.name for field in fields(Options))]
    if strange := [name for name in options if name not in known]:
        raise TypeError(f"extract() has no option '{strange[0]}'{nearest(strange[0], known)}")
    run: Any = None
    if encoder is not None and (Path(encoder) / "run.json").is_file():
        from .heads.runs.encoders import specs_of_run

        run, encoder = specs_of_run(encoder), None
    chosen = build_options(encoder=None if encoder is None else str(encoder), run=run, **options)
    return extract(load_manifest(dataset, None if data_root is None else Path(data_root)), str(store), chosen)


def train(
    store: "str | Path | Sequence[str | Path]",
    *,
    recipe: "str | Path",
    out: "str | Path",
    settings: "Settings" = (),
    **options: Any,
) -> "TrainSummary":
    """Train a head on the features in a store, and keep its best epoch by validation RSUM (``xret train-head``).

    Args:
        store: the feature cache; its splits ``train`` and ``val`` are used. Of several, the splits ``train`` are
            learned together, and the first validates.
        recipe: a name that ``xret recipes`` lists, or the path of a YAML file.
        out: the run folder; must not exist, unless `resume`.
        settings: changes of the recipe, such as ``{"model.dim": 256}``.
        options: of `heads.training.train.TrainOptions`: ``device``, ``seed``, ``init_from``, ``resume``.

    Raises:
        RecipeError: the recipe, its settings or the feature sets do not fit.
        CacheError: the store cannot be used.
        RunError: `out` exists or does not fit, memory does not suffice, or the loss is not finite.
    """
    from .heads.recipes.recipe import load_recipe
    from .heads.training.train import train

    first, *others = map(str, _several(store))
    return train(first, load_recipe(str(recipe), settings), out, also=others, **options)


def finetune(
    run: "str | Path",
    *,
    out: "str | Path",
    reattach: Sequence[str] = (),
    data_root: "str | Path | None" = None,
    **options: Any,
) -> "TrainSummary":
    """Put the backbones of a trained head back, and train all of it from images and captions (``xret finetune``).

    Args:
        run: the head's run folder.
        out: the new run folder; must not exist, unless `resume`.
        reattach: which of ``image`` and ``text``; none: those that the recipe's `finetune` block trains.
        data_root: the folder of the images, or the one that the manifest's relative paths start from.
        options: of `heads.training.finetuning.finetuning.FinetuneOptions`: ``settings``, ``visual_weights``,
            ``text_weights``, ``store``, ``device``, ``resume``.

    Raises:
        RecipeError: the settings do not fit, or change what the head was trained for.
        CacheError, EncoderError, SampleError: a backbone cannot be put back, or images are missing.
        RunError: a run does not fit, memory does not suffice, or the loss is not finite.
    """
    from pathlib import Path

    from .heads.training.finetuning.finetuning import finetune

    root = None if data_root is None else Path(data_root)
    return finetune(run, out, reattach=_several(reattach), data_root=root, **options)


def ablate(store: "str | Path", *, out: "str | Path", **options: Any) -> "Ablation":
    """Train a recipe in many variants and with several seeds, and evaluate each (``xret ablate``).

    What is finished in `out` stays: more values or seeds cost only themselves.

    Args:
        store: the feature cache.
        out: the folder of all runs.
        options: of `heads.ablation.plan.make_plan`: ``recipe``, ``vary``, such as ``{"model.dim": [256, 512]}``, or
            ``grid``; ``settings``, ``baselines``, ``split``, ``views``. And of `heads.ablation.ablation.ablate`:
            ``seeds``, ``device``, ``jobs``.

    Returns:
        Every cell's numbers, or why it failed; ``print`` shows the table.

    Raises:
        RecipeError: a variant does not fit; all faults at once, before anything is trained.
        CacheError: the store or the cluster cannot be used.
        RunError: `out` belongs to something else, or is in use.
    """
    from .heads.ablation.ablation import ablate
    from .heads.ablation.plan import make_plan

    planned = {key: options.pop(key) for key in ("vary", "grid", "split", "views") if key in options}
    recipe, settings = options.pop("recipe", None), options.pop("settings", None)
    beside = [*map(str, _several(options.pop("baselines", ())))]
    plan = make_plan(None if recipe is None else str(recipe), settings=settings, baselines=beside, **planned)
    return ablate(str(store), plan, out, **options)


def tune(store: "str | Path", *, recipe: "str | Path", out: "str | Path", **options: Any) -> "Tuning":
    """Find the values of a recipe that suit a store, by validation RSUM, and keep the best run (``xret tune``).

    Called again with the same options, it resumes, also in several processes at once. More ``trials`` add to those that
    are there.

    Args:
        store: the feature cache.
        recipe: a name that ``xret recipes`` lists, or the path of a YAML file.
        out: the folder.
        options: of `heads.tuning.tuning.tune`: ``settings``, ``trials``, ``space``, such as
            ``{"optimizer.lr": "1e-4:1e-2:log", "model.dim": [256, 512]}``, ``seed``, ``device``.

    Returns:
        Every trial, and what the best run reaches on the test split; ``print`` shows the tables.

    Raises:
        RecipeError, CacheError, RunError: as `ablate`; or no trial could be trained.
    """
    from .pipeline.errors import require_packages

    require_packages("tuning needs", {"Optuna": "optuna"}, "tune")
    from .heads.tuning.tuning import tune

    return tune(str(store), str(recipe), out, **options)


def load(run: "str | Path", **options: Any) -> "Retriever":
    """Open a run, ready to embed and to search (``xret search``, ``xret serve``).

    Args:
        run: its folder, or a model of the Hugging Face hub, ``user/name``, that `heads.retrieval.hub.push` put there.
        options: of `heads.retrieval.retriever.Retriever`: ``store``, ``split``, ``device``, ``data_root``,
            ``visual_weights``, ``text_weights``, ``images``, ``index``, ``trust``.
            The folder ``images`` is looked through once: pictures that are added later are seen by a new `load`.

    Raises:
        RunError: there is no such run, or it is damaged.
    """
    from .heads.retrieval.hub import local_folder
    from .heads.retrieval.retriever import Retriever

    return Retriever(local_folder(run), **options)


def __getattr__(name: str) -> Any:
    if name == "FeatureCache":
        from .pipeline.store import FeatureCache

        return FeatureCache
    if name == "evaluate":
        from .heads.evaluation.evaluation import evaluate

        return evaluate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _several(given: Any) -> Sequence[Any]:
    """Return the items of what is given, None being none; a text, and what has no items, is the only one."""
    if given is None:
        return []
    return [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
