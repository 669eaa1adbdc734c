"""A run: the folder that a training leaves, and that evaluation reads.

    checkpoint.pt       all that a training goes on from, in one file: state, metrics and best weights
    model.safetensors   exported from it: the weights of the best epoch by validation RSUM
    metrics.jsonl       exported: a line an epoch; ``collapsed`` where the triplet loss sits at its constant
    run.json            exported last: all that rebuilds the model, and how far it is, see `info.RunInfo`
    recipe.yaml         the resolved recipe, for readers, and beside it the files of parts of one's own
    train.log           for readers: what was done when
    members/            of an average, in the place of weights and metrics: the runs that it averages
    tensorboard/        where runtime.log says so

`checkpoint.pt` is replaced in one step, and it alone says where a training is. If a kill comes before all of an epoch
is exported, the next save or resume exports it.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import safetensors.torch
import torch
import yaml
from safetensors import SafetensorError
from torch import Tensor

from ...pipeline.device import drawing
from ...pipeline.encoders.origin import Origin
from ...pipeline.errors import RecipeError, RunError
from ...pipeline.files import locked, making, remove, require_run, writing
from ...pipeline.wording import reason
from ..average import Reads, average_of
from ..model import Model, build_model
from ..recipes.blocks import Recipe
from ..recipes.own import file_of, remember
from ..recipes.recipe import own_names
from .info import BRANCHES, FORMAT, BranchName, RunInfo

EMBEDDINGS = "embeddings"  # below it searches of folders of pictures keep theirs, also while another process trains
WEIGHTS, CHECKPOINT, MEMBERS = "model.safetensors", "checkpoint.pt", "members"
_REMEDY = "make room, or take another --out"


class Run:
    """A run folder, opened.

    Attributes:
        path: the folder.
        info: `run.json`; its recipe, facts and vocabulary are attributes, too.
        exports_model: whether `export_weights` reads weights of the model, which must not learn meanwhile.
    """

    exports_model = False

    def __init__(self, path: str | Path, trust: bool = False) -> None:
        """Open the run at `path`; RunError if there is none, of another version, or its `run.json` is damaged.

        RunError, too, where it has parts of one's own, which run, that were not trained with here, or have changed
        since; unless `trust`.
        """
        self.path, self._trust, file = Path(path), trust, Path(path, "run.json")
        require_run(path)
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            if (known := values.pop("format")) != FORMAT:
                raise RunError(f"{file} is of format '{known}', not '{FORMAT}'; train the run again")
            self._hold(RunInfo.from_json(values, title=str(file), folder=self.path, trust=trust))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, RecipeError) and own_names(values["recipe"]):  # a part of one's own is not to be had
                raise RunError(str(error)) from error
            raise self._damaged("run.json", error) from error

    @classmethod
    def create(cls, path: str | Path, info: RunInfo) -> Self:
        """Make the folder, whole, with all that is known before the first epoch; RunError where that is impossible."""
        require_free(path)
        with making(Path(path), RunError, _REMEDY) as partial:
            write_facts(partial, info)
        remember(info.recipe.code)
        return cls(path, trust=True)

    def record(self, **values: Any) -> None:
        """Change fields of `info`."""
        info = replace(self.info, **values)
        self._put("run.json", lambda path: path.write_text(_json_of(info), encoding="utf-8"))
        if "recipe" in values:
            self._put("recipe.yaml", lambda path: path.write_text(recipe_text(info.recipe.to_dict()), "utf-8"))
        self._hold(info)

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

        A training that goes on from these weights may have another `recipe`. RunError where no epoch is finished yet,
        or the weights are damaged or do not fit.
        """
        if self.info.average is not None and recipe is None:
            members = self.members
            models = [member.model(device) for member in members]
            return average_of(models, [*map(self._reads, members)], [*self.info.average.values()])
        file = self.weights
        try:
            with drawing(torch.device("cpu"), 0):  # weights that are replaced; the caller's draws stay what they were
                model = build_model(recipe or self.recipe, self.image_facts, self.text_facts)
            model.load_state_dict(safetensors.torch.load_file(file))
        except (SafetensorError, RuntimeError, TypeError, RecipeError) as error:
            raise RunError(f"{file} does not fit the run's run.json or is damaged; train the run again") from error
        return model.to(device).eval()

    @property
    def members(self) -> "list[Run]":
        """The runs that an average averages; none of another run."""
        return [Run(self.file(f"{MEMBERS}/{number}"), self._trust) for number in range(len(self.info.average or ()))]

    def _reads(self, member: "Run") -> Reads:
        image, text = (
            [self.info.fingerprints(side).index(one) for one in member.info.fingerprints(side)] for side in BRANCHES
        )
        return image, text

    @property
    def weights(self) -> Path:
        """The file with the weights of the best epoch; RunError where no epoch is finished."""
        if self.info.average is not None:
            raise RunError(f"{self.path} is an average and has no weights of its own; name one of its runs")
        if self.info.best_epoch is None:
            command = "xret finetune" if self.info.finetuned else "xret train-head"
            raise RunError(f"{self.path} has no finished epoch yet; continue it with `{command} … --resume`")
        return self.file(WEIGHTS)

    @property
    def weights_digest(self) -> str:
        """The SHA-256 of the weights, in hexadecimal; errors as of `weights`."""
        if self.info.average is not None:
            digests = [*self.info.average.values(), *(member.weights_digest for member in self.members)]
            return sha256(repr(digests).encode()).hexdigest()
        return sha256(self.weights.read_bytes()).hexdigest()

    @property
    def begun(self) -> bool:
        """Whether there is something to go on from: a complete epoch, or a step that was written down."""
        return self.has(CHECKPOINT)

    def save(self, checkpoint: Mapping[str, Any]) -> None:
        """Replace `checkpoint.pt` in one step: tensors and plain values, by ``state``, ``metrics``, ``best``, ``info``.

        RunError where it cannot be written.
        """

        def write(path: Path) -> None:
            try:
                torch.save(dict(checkpoint), path)
            except RuntimeError as error:  # of a full disk it says how many bytes it missed
                raise OSError("not all of it reached the disk, which may be full") from error

        self._put(CHECKPOINT, write)

    def export(self, checkpoint: Mapping[str, Any], model: Model, *, weights: bool = True) -> None:
        """Write the files that others read: best weights, where `weights` have changed, metrics, and last `run.json`.

        The `checkpoint` is what was saved, and `model` has its best weights where they are written.
        """
        if weights and checkpoint["best"] is not None:
            self.export_weights(checkpoint["best"], model)
        text = "".join(json.dumps(line) + "\n" for line in checkpoint["metrics"])
        self._put("metrics.jsonl", lambda path: path.write_text(text, encoding="utf-8"))
        told = {
            key: tuple(map(Origin.from_json, value)) if key in BRANCHES else value
            for key, value in checkpoint["info"].items()
        }
        self.record(**told)

    def export_weights(self, tensors: dict[str, Tensor], model: Model) -> None:
        """Write `model.safetensors`, with the weights of `model` by name."""
        self._put(WEIGHTS, lambda path: safetensors.torch.save_file(tensors, path))

    def facts_of(self, model: Model) -> dict[str, Any]:
        """Return what changes in `run.json` with the weights of a better epoch."""
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
            raise self._damaged(CHECKPOINT, error) from error
        return checkpoint

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, oldest first; RunError if the file is damaged."""
        try:
            text = (self.path / "metrics.jsonl").read_text(encoding="utf-8") if self.has("metrics.jsonl") else ""
            return [json.loads(line) for line in text.splitlines()]
        except (OSError, ValueError) as error:
            raise self._damaged("metrics.jsonl", error) from error

    @contextmanager
    def locked(self, created: bool = False) -> Iterator[None]:
        """Lock the folder for a training.

        A folder that was just `created` is removed where training fails before there is anything to go on from: the
        corrected command may then take the same --out. What is interrupted or killed stays, to be resumed. RunError
        where another training has locked it.
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

    def _hold(self, info: RunInfo) -> None:
        self.info, self.recipe, self.vocabulary = info, info.recipe, info.vocabulary
        self.image_facts, self.text_facts = info.image_facts, info.text_facts

    def _put(self, name: str, write: Callable[[Path], Any]) -> None:
        with writing(self.path / name, RunError, _REMEDY) as partial:
            write(partial)

    def _damaged(self, name: str, error: Exception) -> RunError:
        return RunError(f"{self.path / name} is damaged ({reason(error)}); restore it, or train the run again")


def require_free(path: str | Path) -> None:
    """Raise RunError if a run cannot be made at `path`, because something is there."""
    if Path(path).exists():
        raise RunError(f"{path} exists; take another --out, or continue that run with --resume")


def write_facts(folder: Path, info: RunInfo) -> None:
    """Write `run.json`, `recipe.yaml` and the files of parts of one's own in a new folder."""
    (folder / "run.json").write_text(_json_of(info), encoding="utf-8")
    (folder / "recipe.yaml").write_text(recipe_text(info.recipe.to_dict()), encoding="utf-8")
    copy_sources(info.recipe, folder)


def copy_sources(recipe: Recipe, folder: Path) -> None:
    """Copy the files of a recipe's parts of one's own beside it, but for what is installed."""
    for module, file in recipe.sources.items():
        if file:
            (copy := folder / file_of(module)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def recipe_text(recipe: Mapping[str, Any]) -> str:
    """Return `recipe.yaml`."""
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)


def _json_of(info: RunInfo) -> str:
    return json.dumps({"format": FORMAT, **info.to_json()}, indent=1, ensure_ascii=False) + "\n"
