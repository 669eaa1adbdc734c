"""A run: the folder that a training leaves, and that evaluation reads.

    run.json            what was trained on what: {format, version, store, manifest_sha256, image_set, text_set,
                        fingerprints, seed, device, versions, shuffled, also, also_stores (where several are learnt
                        from), best_epoch, best_rsum, files (their SHA-256), sha256 (its own)}
    recipe.yaml         the resolved recipe
    config.json         recipe and feature facts: all that is needed to rebuild the model
    vocabulary.json     where words are used: the words by token id
    model.safetensors   the weights of the best epoch by validation RSUM
    state.pt            to go on from the last complete epoch, or a step after it; tensors and plain scalars only
    metrics.jsonl       one line an epoch; `collapsed` where the triplet loss sits at its constant
    tensorboard/        where runtime.log says so

The folder appears in one step. All files of an epoch count from the moment in which `run.json` is replaced (`files`):
after a kill they are those of one epoch. What is read has the SHA-256 that `run.json` says, or is refused; runs of
earlier versions say none.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from ...pipeline.documents import parse_json, read_json
from ...pipeline.errors import RecipeError, RunError
from ...pipeline.files import locked, making, partials_in, remove, write_text
from ..model import Facts, Model, build_model, facts_of_each
from ..recipes.blocks import Recipe
from .config import as_json, config_of, config_text, difference, recipe_text, write_config
from .files import REMEDY, Writer, find, replacing, run_inside, settle, sha256_of
from .info import FORMAT, VERSION, BranchName, RunInfo, sealed, unsealed

# When a run is resumed; the sets that data.image and data.text stand for are compared themselves.
MAY_CHANGE = ("data.image", "data.text", "runtime.cache", "runtime.checkpoint_steps", "runtime.log")
EMBEDDINGS = "embeddings"  # below it searches of folders of pictures keep theirs, also while another process trains
WEIGHTS, _STATE, _METRICS, _WORDS = "model.safetensors", "state.pt", "metrics.jsonl", "vocabulary.json"
_FOR_READERS = ("recipe.yaml", "README.md")  # no command reads them


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
                inside = run_inside(self.path)
                way = "name the folder of a run" + ("" if inside is None else f", such as {inside}")
            raise RunError(f"{path} is no run: it has no run.json; {way}")
        self.info = self._read_info()
        config = self._parsed(self.file("config.json"))
        try:
            self.recipe, self.image_facts, self.text_facts = config_of(config, self.info, f"{path}/config.json")
        except ValueError as error:
            raise self._damaged("config.json") from error
        words = [facts for facts in facts_of_each(self.text_facts) if facts.kind == "words"]
        self.vocabulary = self._vocabulary(words[0].vocabulary_size) if words else None

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
        """Make the folder, with all that is known before the first epoch.

        Raises:
            RunError: something is there already, or the folder cannot be written.
        """
        path = Path(path)
        require_free(path)
        try:
            with making(path, RunError, REMEDY) as partial:
                write_config(partial, recipe.to_dict(), image, text)
                if vocabulary is not None:
                    (partial / _WORDS).write_text(as_json(vocabulary), encoding="utf-8")
                write_info(partial, info)
        except RunError:
            require_free(path)  # another process may have made it meanwhile
            raise
        return cls(path)

    def refuse_difference(self, facts: dict[str, Any], recipe: Recipe) -> None:
        """Raise RunError, naming what differs, if the run was begun with another recipe or other `facts` of `info`.

        Keys of the recipe that no number depends on may differ.
        """
        then = self.recipe.to_dict() | {key: getattr(self.info, key) for key in facts}
        if said := difference(then, recipe.to_dict() | facts, MAY_CHANGE):
            raise RunError(f"{self.path} cannot be resumed, it was begun otherwise: {said}")

    def record(self, **values: Any) -> None:
        """Write down other values of fields of `info`."""
        info = replace(self.info, **values)
        write_json(self.path / "run.json", sealed(info.to_json()))
        self.info = info

    def lengthen(self, recipe: Recipe) -> None:
        """Write down a recipe that differs in the number of epochs."""
        if recipe.schedule.epochs == self.recipe.schedule.epochs:
            return
        new = replace(self.recipe, schedule=replace(self.recipe.schedule, epochs=recipe.schedule.epochs))
        text, file = config_text(new.to_dict(), self.image_facts, self.text_facts), self.path / "recipe.yaml"
        self._replace({"config.json": lambda path: path.write_text(text, encoding="utf-8")})
        write_text(file, recipe_text(new.to_dict()), RunError, REMEDY)
        self.recipe = new

    def has(self, name: str) -> bool:
        """Return whether the run has a file or folder of this name, or has lost it."""
        return name in (self.info.files or {}) or (self.path / name).exists()

    def file(self, name: str) -> Path:
        """Return where a file or folder of the run is.

        Raises:
            RunError: it is missing, or not what was written.
        """
        place, sha256 = self.path / name, (self.info.files or {}).get(name)
        found = find(self.path, name, sha256) if sha256 is not None else place if place.exists() else None
        if found is not None:
            return found
        if self._read_info() != self.info:
            raise RunError(f"{self.path} was trained on while it was read; run the command again")
        if place.exists():
            raise self._damaged(name)
        raise RunError(f"{self.path} has lost its {name}; restore it, or train with another --out")

    def backbone(self, branch: BranchName) -> Path | None:
        """Return where the run's own backbone of ``image`` or ``text`` is; None: it has none. Errors as of `file`."""
        names = (f"{branch}_backbone{suffix}" for suffix in ("", ".safetensors"))
        return next((self.file(name) for name in names if self.has(name)), None)

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
        """The file with the weights of the best epoch; RunError where no epoch is finished, else as of `file`."""
        if self.info.best_epoch is None:  # a killed run of an earlier version may have a file all the same
            command = "xret finetune" if self.info.finetuned else "xret train-head"
            raise RunError(f"{self.path} has no finished epoch yet; continue it with `{command} … --resume`")
        return self.file(WEIGHTS)

    def save_epoch(
        self, state: dict[str, Any], line: dict[str, Any], best_epoch: int, best_rsum: float, model: Model | None = None
    ) -> None:
        """Write down a complete epoch, all of it in one step.

        Args:
            state: tensors and plain scalars; `epoch` is the number of complete epochs.
            line: the epoch's line of metrics.jsonl.
            best_epoch: so far, counted from 1.
            best_rsum: its validation RSUM.
            model: that of the best epoch, where it is this one.
        """
        writers, values = ({}, {}) if model is None else self.best_files(model)
        writers |= _metrics_writer([*self.metrics()[: state["epoch"] - 1], line]) | _state_writer(state)
        self._replace(writers, **values, best_epoch=best_epoch, best_rsum=best_rsum)

    def best_files(self, model: Model) -> tuple[dict[str, Writer], dict[str, Any]]:
        """Return what writes the weights of the best epoch, by the names of files, and what changes in `info`."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        return {WEIGHTS: lambda path: safetensors.torch.save_file(tensors, path)}, {}

    def save_state(self, state: dict[str, Any]) -> None:
        """Write down where to go on from; tensors and plain scalars."""
        self._replace(_state_writer(state))

    def save_metrics(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write down the metrics of all epochs so far."""
        self._replace(_metrics_writer(lines))

    def _replace(self, writers: Mapping[str, Writer], **values: Any) -> None:
        """Replace files, and values of fields of `info`, in one step."""
        with replacing(self.path, writers) as made:
            self.record(**values, files={**(self.info.files or {}), **made})

    @property
    def begun(self) -> bool:
        """Whether there is something to go on from: a complete epoch, or a step that was written down."""
        return self.has(_STATE)

    @contextmanager
    def held(self, created: bool) -> Iterator[None]:
        """Lock the folder for whoever trains in it.

        A folder that was just `created` is removed where training fails before it has `begun`: the corrected command
        may then take the same --out. What is interrupted or killed stays, to be resumed.

        Raises:
            RunError: another process trains in it.
        """
        with locked(self.path, RunError(f"another process is training in {self.path}; wait until it has ended")):
            for left in partials_in(self.path):
                if self.path / EMBEDDINGS not in left.parents:
                    remove(left)
            self.info = self._read_info()  # it may have been trained on before the lock was free
            settle(self.path, self.info.files or {})
            try:
                yield
            except Exception:
                if created and not self.begun:
                    shutil.rmtree(self.path, ignore_errors=True)
                raise

    def load_state(self) -> dict[str, Any] | None:
        """Return where to go on from, in the host's memory, or None where nothing has `begun`.

        There an optimiser counts its steps: counted on a GPU, each would have to be waited for.

        Raises:
            RunError: it cannot be read.
        """
        if not self.begun:
            return None
        file = self.file(_STATE)
        try:
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch reports damage by many types
            raise self._damaged(_STATE) from error
        return state

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, oldest first.

        Raises:
            RunError: the file is damaged.
        """
        if not self.has(_METRICS):
            return []
        file = self.file(_METRICS)
        try:
            lines = [parse_json(line) for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise self._damaged(_METRICS) from error
        if not all(isinstance(line, dict) for line in lines):
            raise self._damaged(_METRICS)
        return lines

    def _vocabulary(self, size: int | None) -> tuple[str, ...]:
        words = self._parsed(self.file(_WORDS))
        texts = isinstance(words, list) and all(isinstance(word, str) for word in words)
        if not texts or len(words) != size:
            raise self._damaged(_WORDS)
        return tuple(words)

    def _read_info(self) -> RunInfo:
        file = self.path / "run.json"
        info = self._parsed(file)
        if not isinstance(info, dict):
            raise self._damaged(file.name)
        if (info.get("format"), info.get("version")) != (FORMAT, VERSION):
            raise RunError(f"{file} is not of format {FORMAT}, version {VERSION}; train it again")
        try:
            return RunInfo.from_json(unsealed(info))
        except (TypeError, ValueError) as error:
            raise self._damaged(file.name) from error

    def _parsed(self, file: Path) -> Any:
        try:
            return read_json(file)
        except (OSError, ValueError) as error:
            raise self._damaged(file.name) from error

    def _damaged(self, name: str) -> RunError:
        return RunError(f"{self.path / name} is missing or damaged; restore it, or train the run again")


def require_free(path: str | Path) -> None:
    """Raise RunError if a run cannot be made at `path`, because something is there."""
    if Path(path).exists():
        raise RunError(f"{path} exists; take another --out, or continue that run with --resume")


def write_info(folder: Path, info: RunInfo) -> None:
    """Write `run.json` in a new folder, with the SHA-256 of all that is there but what is for readers alone."""
    files = {path.name: sha256_of(path) for path in sorted(folder.iterdir()) if path.name not in _FOR_READERS}
    text = as_json(sealed(replace(info, files=files).to_json()))
    (folder / "run.json").write_text(text, encoding="utf-8")


def _state_writer(state: dict[str, Any]) -> dict[str, Writer]:
    def write(path: Path) -> None:
        try:
            torch.save(state, path)
        except RuntimeError as error:  # of a full disk it says how many bytes it missed
            raise OSError("not all of it reached the disk, which may be full") from error

    return {_STATE: write}


def _metrics_writer(lines: Sequence[dict[str, Any]]) -> dict[str, Writer]:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return {_METRICS: lambda path: path.write_text(text, encoding="utf-8")}


def write_json(path: Path, value: Any) -> None:
    """Write a value in one step.

    Raises:
        RunError: the file cannot be written.
    """
    write_text(path, as_json(value), RunError, REMEDY)
