"""A run: the folder that a training leaves, and that evaluation reads.

    checkpoint.pt       all that a training goes on from, in one file: state, metrics and best weights
    model.safetensors   exported from it: the weights of the best epoch by validation RSUM
    metrics.jsonl       exported: a line an epoch; ``collapsed`` where the triplet loss sits at its constant
    run.json            exported last: what was trained on what, and how far it is, see `info.RunInfo`
    config.json         recipe and feature facts: all that is needed to rebuild the model
    recipe.yaml         the resolved recipe, for readers
    vocabulary.json     where words are used: the words by token id
    train.log           for readers: what was done when
    tensorboard/        where runtime.log says so

`checkpoint.pt` is replaced in one step, and it alone says where a training is. If a kill comes before all of an epoch
is exported, the next save or resume exports it.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_type_hints

import safetensors.torch
import torch
import yaml
from safetensors import SafetensorError
from torch import Tensor

from ...pipeline.errors import RecipeError, RunError
from ...pipeline.files import locked, making, remove, writing
from ..model import Facts, FeatureFacts, Model, build_model, facts_of_each
from ..recipes.blocks import Recipe
from ..recipes.recipe import resolve
from ..recipes.schema import convert, difference
from .info import FORMAT, VERSION, BranchName, RunInfo, as_tuple

# When a run is resumed; the sets that data.image and data.text stand for are compared themselves.
MAY_CHANGE = ("data.image", "data.text", "runtime.cache", "runtime.checkpoint_steps", "runtime.log")
EMBEDDINGS = "embeddings"  # below it searches of folders of pictures keep theirs, also while another process trains
WEIGHTS, CHECKPOINT = "model.safetensors", "checkpoint.pt"
_REMEDY = "make room, or take another --out"


class Run:
    """A run folder, opened.

    Attributes:
        path: the folder.
        info: `run.json`.
        recipe: the resolved recipe.
        image_facts, text_facts: of the feature sets that it was trained on.
        vocabulary: the words by token id; None where no text features are words.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the run at `path`.

        Raises:
            RunError: there is none, it is of another version, or a file of it is missing or damaged.
        """
        self.path = Path(path)
        if not (self.path / "run.json").is_file():
            way = f"make one with `xret train-head … --out {path}`"
            if self.path.exists():
                inside = next(self.path.glob("[!.]*/run.json"), None) or next(self.path.glob("[!.]*/*/run.json"), None)
                way = "name the folder of a run" + ("" if inside is None else f", such as {inside.parent}")
            raise RunError(f"{path} is no run: it has no run.json; {way}")
        self.info = self._read("run.json", self._info)
        self.recipe, self.image_facts, self.text_facts = self._read("config.json", self._config)
        words = any(facts.kind == "words" for facts in facts_of_each(self.text_facts))
        self.vocabulary: tuple[str, ...] | None = self._read("vocabulary.json", tuple) if words else None

    @classmethod
    def create(
        cls,
        path: str | Path,
        info: RunInfo,
        recipe: Recipe,
        image: Facts,
        text: Facts,
        vocabulary: tuple[str, ...] | None,
    ) -> "Run":
        """Make the folder, whole, with all that is known before the first epoch.

        Raises:
            RunError: something is there already, or the folder cannot be written.
        """
        path = Path(path)
        require_free(path)
        with making(path, RunError, _REMEDY) as partial:
            write_facts(partial, info, recipe.to_dict(), image, text)
            if vocabulary is not None:
                (partial / "vocabulary.json").write_text(as_json(vocabulary), encoding="utf-8")
        return cls(path)

    def refuse_difference(self, facts: dict[str, Any], recipe: Recipe) -> None:
        """Raise RunError, naming what differs, if the run has another recipe or other `facts` of `info`.

        Keys of the recipe that no number depends on may differ.
        """
        then = self.recipe.to_dict() | {key: getattr(self.info, key) for key in facts}
        if said := difference(then, recipe.to_dict() | facts, MAY_CHANGE):
            raise RunError(f"{self.path} cannot be resumed, it was begun otherwise: {said}")

    def record(self, **values: Any) -> None:
        """Change fields of `info`."""
        info = replace(self.info, **values)
        write_json(self.path / "run.json", info.to_json())
        self.info = info

    def lengthen(self, epochs: int) -> None:
        """Change the recipe's number of epochs."""
        self.recipe = replace(self.recipe, schedule=replace(self.recipe.schedule, epochs=epochs))
        values = self.recipe.to_dict()
        write_json(self.path / "config.json", _config_of(values, self.image_facts, self.text_facts))
        self._put("recipe.yaml", lambda path: path.write_text(recipe_text(values), encoding="utf-8"))

    def has(self, name: str) -> bool:
        """Return whether the run has a file or folder of this name."""
        return (self.path / name).exists()

    def file(self, name: str) -> Path:
        """Return where a file or folder of the run is; RunError where it is missing."""
        if not self.has(name):
            raise RunError(f"{self.path} has lost its {name}; restore it, or train with another --out")
        return self.path / name

    def backbone(self, branch: BranchName) -> Path | None:
        """Return where the run's own backbone of ``image`` or ``text`` is; None where it has none."""
        names = (f"{branch}_backbone{suffix}" for suffix in ("", ".safetensors"))
        return next((self.path / name for name in names if self.has(name)), None)

    def model(self, device: torch.device, recipe: Recipe | None = None) -> Model:
        """Return the model with the weights of the best epoch, ready to embed.

        Args:
            device: where it shall be.
            recipe: of a training that goes on from these weights; None: the run's own.

        Raises:
            RunError: no epoch is finished yet, or the weights are damaged or do not fit.
        """
        file = self.weights
        try:
            model = build_model(recipe or self.recipe, self.image_facts, self.text_facts)
            model.load_state_dict(safetensors.torch.load_file(file))
        except (SafetensorError, RuntimeError, TypeError, RecipeError) as error:
            raise RunError(f"{file} does not fit the run's config.json or is damaged; train the run again") from error
        return model.to(device).eval()

    @property
    def has_weights(self) -> bool:
        """Whether there are weights of a best epoch."""
        return self.info.best_epoch is not None and self.has(WEIGHTS)

    @property
    def weights(self) -> Path:
        """The file with the weights of the best epoch; RunError where no epoch is finished."""
        if self.info.best_epoch is None:
            command = "xret finetune" if self.info.finetuned else "xret train-head"
            raise RunError(f"{self.path} has no finished epoch yet; continue it with `{command} … --resume`")
        return self.file(WEIGHTS)

    @property
    def begun(self) -> bool:
        """Whether there is something to go on from: a complete epoch, or a step that was written down."""
        return self.has(CHECKPOINT)

    def save(self, checkpoint: Mapping[str, Any]) -> None:
        """Replace `checkpoint.pt` in one step: tensors and plain values, by ``state``, ``metrics``, ``best``, ``info``.

        Raises:
            RunError: it cannot be written.
        """

        def write(path: Path) -> None:
            try:
                torch.save(dict(checkpoint), path)
            except RuntimeError as error:  # of a full disk it says how many bytes it missed
                raise OSError("not all of it reached the disk, which may be full") from error

        self._put(CHECKPOINT, write)

    def export(self, checkpoint: Mapping[str, Any], model: Model, *, weights: bool = True) -> None:
        """Write the files that others read: best weights (if they changed), metrics, and last `run.json`.

        Args:
            checkpoint: what was saved.
            model: with its best weights, where `weights` are written.
            weights: whether they are.
        """
        if weights and checkpoint["best"] is not None:
            self.export_weights(checkpoint["best"], model)
        text = "".join(json.dumps(line) + "\n" for line in checkpoint["metrics"])
        self._put("metrics.jsonl", lambda path: path.write_text(text, encoding="utf-8"))
        self.record(**checkpoint["info"])

    def export_weights(self, tensors: dict[str, Tensor], model: Model) -> None:
        """Write `model.safetensors`, with the weights of `model` by name."""
        self._put(WEIGHTS, lambda path: safetensors.torch.save_file(tensors, path))

    def facts_of(self, model: Model) -> dict[str, Any]:
        """Return what changes in `info` with the weights of a better epoch."""
        return {}

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Return what was last saved, in the host's memory, or None where nothing was; RunError if it is damaged.

        There an optimiser counts its steps: counted on a GPU, each would have to be waited for.
        """
        if not self.begun:
            return None
        try:
            checkpoint: dict[str, Any] = torch.load(self.path / CHECKPOINT, map_location="cpu", weights_only=True)
        except Exception as error:  # torch reports damage by many types
            raise self._damaged(CHECKPOINT) from error
        return checkpoint

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, oldest first; RunError if the file is damaged."""
        try:
            text = (self.path / "metrics.jsonl").read_text(encoding="utf-8") if self.has("metrics.jsonl") else ""
            return [json.loads(line) for line in text.splitlines()]
        except (OSError, ValueError) as error:
            raise self._damaged("metrics.jsonl") from error

    @contextmanager
    def locked(self, created: bool = False) -> Iterator[None]:
        """Lock the folder for a training.

        A folder that was just `created` is removed where training fails before there is anything to go on from: the
        corrected command may then take the same --out. What is interrupted or killed stays, to be resumed.

        Raises:
            RunError: another training has locked it.
        """
        with locked(self.path, RunError(f"another process is training in {self.path}; wait until it has ended")):
            for left in self.path.glob(".*.partial"):
                remove(left)
            try:
                yield
            except Exception:
                if created and not self.begun:
                    shutil.rmtree(self.path, ignore_errors=True)
                raise

    def _put(self, name: str, write: Callable[[Path], Any]) -> None:
        with writing(self.path / name, RunError, _REMEDY) as partial:
            write(partial)

    def _read(self, name: str, convert: Callable[[Any], Any]) -> Any:
        file = self.path / name
        try:
            return convert(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._damaged(name) from error

    def _info(self, values: Any) -> RunInfo:
        if (values["format"], values["version"]) != (FORMAT, VERSION):
            raise RunError(f"{self.path}/run.json is not of format {FORMAT}, version {VERSION}; train it again")
        return RunInfo.from_json(values)

    def _config(self, values: Any) -> tuple[Recipe, Facts, Facts]:
        try:
            recipe = resolve(values["recipe"], title=f"{self.path}/config.json")
        except RecipeError as error:
            raise RunError(str(error)) from error
        kinds = get_type_hints(FeatureFacts, include_extras=True)
        sides = []
        for side in ("image", "text"):
            several = [
                {key: convert(value, kinds[key]) for key, value in one.items()} for one in as_tuple(values[side])
            ]
            facts = tuple(FeatureFacts(**one) for one in several)
            sides.append(facts[0] if len(facts) == 1 else facts)
        return recipe, sides[0], sides[1]

    def _damaged(self, name: str) -> RunError:
        return RunError(f"{self.path / name} is missing or damaged; restore it, or train the run again")


def require_free(path: str | Path) -> None:
    """Raise RunError if a run cannot be made at `path`, because something is there."""
    if Path(path).exists():
        raise RunError(f"{path} exists; take another --out, or continue that run with --resume")


def write_facts(folder: Path, info: RunInfo, recipe: Mapping[str, Any], image: Facts, text: Facts) -> None:
    """Write `run.json`, `config.json` and `recipe.yaml` in a new folder."""
    (folder / "run.json").write_text(as_json(info.to_json()), encoding="utf-8")
    (folder / "config.json").write_text(as_json(_config_of(recipe, image, text)), encoding="utf-8")
    (folder / "recipe.yaml").write_text(recipe_text(recipe), encoding="utf-8")


def _config_of(recipe: Mapping[str, Any], image: Facts, text: Facts) -> dict[str, Any]:
    sides = {
        side: [asdict(one) for one in facts] if isinstance(facts, tuple) else asdict(facts)
        for side, facts in (("image", image), ("text", text))
    }
    return {"recipe": recipe, **sides}


def recipe_text(recipe: Mapping[str, Any]) -> str:
    """Return `recipe.yaml`."""
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)


def as_json(value: Any) -> str:
    """Return a value as the files of a run have it."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write a value in one step; RunError where the file cannot be written."""
    with writing(path, RunError, _REMEDY) as partial:
        partial.write_text(as_json(value), encoding="utf-8")
