"""A run: the folder that a training leaves, and that evaluation reads.

    run.json            what was trained on what: {format, version, store, manifest_sha256, image_set, text_set,
                        fingerprints, seed, device, versions, shuffled, also, also_stores (where several are learnt
                        from), best_epoch, best_rsum}
    recipe.yaml         the resolved recipe
    config.json         recipe and feature facts: all that is needed to rebuild the model
    vocabulary.json     where words are used: the words by token id
    model.safetensors   the weights of the best epoch by validation RSUM
    state.pt            to go on from the last complete epoch, or a step after it; tensors and plain scalars only
    metrics.jsonl       one line an epoch; `collapsed` where the triplet loss sits at its constant
    tensorboard/        where runtime.log says so

Every file is replaced in one step, and the folder appears in one step, so that a kill leaves nothing half-written.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml
from safetensors import SafetensorError
from torch import nn

from ...pipeline.cache.lease import locked
from ...pipeline.documents import parse_json, read_json
from ...pipeline.errors import RunError
from ...pipeline.files import making, partials_in, remove, write_text, writing
from ...pipeline.wording import some_of
from ..model import Facts, FeatureFacts, Model, build_model, facts_of_each
from ..recipes.blocks import Recipe
from ..recipes.recipe import resolve
from .info import FORMAT, VERSION, RunInfo, several

# When a run is resumed; the sets that data.image and data.text stand for are compared themselves.
MAY_CHANGE = ("data.image", "data.text", "runtime.cache", "runtime.checkpoint_steps", "runtime.log")
_NAMED = 5  # of what differs
_REMEDY = "make room, or take another --out"  # where a file cannot be written


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
                way = "name another folder, or remove it"
            raise RunError(f"{path} is no run: it has no run.json; {way}")
        info = self._read_json("run.json")
        if not isinstance(info, dict):
            raise self._damaged("run.json")
        if (info.get("format"), info.get("version")) != (FORMAT, VERSION):
            raise RunError(f"{path}/run.json is not of format {FORMAT}, version {VERSION}; train it again")
        try:
            self.info = RunInfo.from_json(info)
        except (TypeError, AttributeError) as error:
            raise self._damaged("run.json") from error
        config = self._read_json("config.json")
        try:
            self.recipe = resolve(config["recipe"], title=f"{path}/config.json")
            self.image_facts = _facts(config["image"], len(self.info.names("image")))
            self.text_facts = _facts(config["text"], len(self.info.names("text")))
        except (KeyError, TypeError) as error:
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
        with making(path, RunError, _REMEDY) as partial:
            (partial / "run.json").write_text(_json(info.to_json()), encoding="utf-8")
            write_recipe(partial, recipe.to_dict(), image, text)
            if vocabulary is not None:
                (partial / "vocabulary.json").write_text(_json(vocabulary), encoding="utf-8")
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
        self.info = replace(self.info, **values)
        write_json(self.path / "run.json", self.info.to_json())

    def model(self, device: torch.device) -> Model:
        """Return the model with the weights of the best epoch, ready to embed.

        Raises:
            RunError: no epoch is finished yet, or the weights do not fit.
        """
        model = build_model(self.recipe, self.image_facts, self.text_facts)
        file = self.path / "model.safetensors"
        self.require_weights()
        try:
            model.load_state_dict(safetensors.torch.load_file(file))
        except (SafetensorError, RuntimeError) as error:
            raise RunError(f"{file} does not fit the run's config.json or is damaged; train the run again") from error
        return model.to(device).eval()

    @property
    def has_weights(self) -> bool:
        """Whether the weights of a best epoch are there."""
        return (self.path / "model.safetensors").is_file()

    def require_weights(self) -> None:
        """Raise RunError where there are no weights of a best epoch, and say what to do."""
        if self.has_weights:
            return
        if self.info.best_epoch is not None:
            raise RunError(f"{self.path} has lost its model.safetensors; restore it, or train with another --out")
        command = "xret finetune" if self.info.finetuned else "xret train-head"
        raise RunError(f"{self.path} has no finished epoch yet; continue it with `{command} … --resume`")

    def save_best(self, model: nn.Module) -> None:
        """Write the weights of the best epoch."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        with writing(self.path / "model.safetensors", RunError, _REMEDY) as partial:
            safetensors.torch.save_file(tensors, partial)

    def save_epoch(self, state: dict[str, Any], line: dict[str, Any], best_epoch: int, best_rsum: float) -> None:
        """Write down a complete epoch: its metrics, then the state, which is what makes the epoch count.

        Args:
            state: tensors and plain scalars; `epoch` is the number of complete epochs.
            line: the epoch's line of metrics.jsonl.
            best_epoch: so far, counted from 1.
            best_rsum: its validation RSUM.
        """
        self.save_metrics([*self.metrics()[: state["epoch"] - 1], line])
        self.record(best_epoch=best_epoch, best_rsum=best_rsum)
        self.save_state(state)

    def save_state(self, state: dict[str, Any]) -> None:
        """Write down where to go on from; tensors and plain scalars."""
        with writing(self.path / "state.pt", RunError, _REMEDY) as partial:
            try:
                torch.save(state, partial)
            except RuntimeError as error:  # of a full disk it says how many bytes it missed
                raise OSError("not all of it reached the disk, which may be full") from error

    def save_metrics(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write down the metrics of all epochs so far."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_text(self.path / "metrics.jsonl", text, RunError, _REMEDY)

    @property
    def begun(self) -> bool:
        """Whether there is something to go on from: a complete epoch, or a step that was written down."""
        return (self.path / "state.pt").exists()

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
                remove(left)
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
        file = self.path / "state.pt"
        try:
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch reports damage by many types
            raise RunError(f"{file} is damaged; train again with another --out") from error
        return state

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, oldest first.

        Raises:
            RunError: the file is damaged.
        """
        file = self.path / "metrics.jsonl"
        if not file.exists():
            return []
        try:
            lines = [parse_json(line) for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise self._damaged(file.name) from error
        if not all(isinstance(line, dict) for line in lines):
            raise self._damaged(file.name)
        return lines

    def _vocabulary(self, size: int | None) -> tuple[str, ...]:
        words = self._read_json("vocabulary.json")
        texts = isinstance(words, list) and all(isinstance(word, str) for word in words)
        if not texts or len(words) != size:
            raise self._damaged("vocabulary.json")
        return tuple(words)

    def _read_json(self, name: str) -> Any:
        try:
            return read_json(self.path / name)
        except (OSError, ValueError) as error:
            raise self._damaged(name) from error

    def _damaged(self, name: str) -> RunError:
        return RunError(f"{self.path / name} is missing or damaged; train the run again")


def require_free(path: str | Path) -> None:
    """Raise RunError if a run cannot be made at `path`, because something is there."""
    if Path(path).exists():
        raise RunError(f"{path} exists; take another --out, or continue that run with --resume")


def difference(then: dict[str, Any], now: dict[str, Any], ignored: Sequence[str] = ()) -> str:
    """Say in which dotted keys, but for those `ignored`, nested values differ; an empty text where in none."""
    before, after = flat(then), flat(now)
    differing = [
        f"{key} is {before.get(key)} there and {after.get(key)} now"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and key not in ignored
    ]
    return "; ".join(some_of(differing, _NAMED))


def flat(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested values by their dotted keys."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return out


def write_recipe(folder: Path, recipe: Mapping[str, Any], image: Facts, text: Facts) -> None:
    """Write a resolved recipe, and the facts of the features that a model is built with, as a run has them."""
    sides = {
        side: [asdict(one) for one in facts] if isinstance(facts, tuple) else asdict(facts)
        for side, facts in (("image", image), ("text", text))
    }
    config = {"recipe": recipe, **sides}
    (folder / "config.json").write_text(_json(config), encoding="utf-8")
    text_form = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    (folder / "recipe.yaml").write_text(text_form, encoding="utf-8")


def _facts(told: Any, sets: int) -> Facts:
    """Return the facts of so many feature sets as config.json has them; TypeError where they are not as many."""
    found = tuple(FeatureFacts(**one) for one in several(told))
    if len(found) != sets:
        raise TypeError("run.json names another number of feature sets")
    return found[0] if len(found) == 1 else found


def write_json(path: Path, value: Any) -> None:
    """Write a value in one step.

    Raises:
        RunError: the file cannot be written.
    """
    write_text(path, _json(value), RunError, _REMEDY)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
