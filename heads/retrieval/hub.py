"""Runs in the layout of the Hugging Face hub: a folder that says by itself what it is and what its features came from.

    model.safetensors                as in every run
    run.json, recipe.yaml            the same; without paths of the machine that it was trained on
    image_backbone*, text_backbone*  of a run that was fine-tuned
    README.md                        the model card

Such a folder is a run: every command takes it. What only serves to go on training is left out.
"""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from ...pipeline.encoders.origin import Origin
from ...pipeline.errors import RunError
from ...pipeline.files import making
from ...pipeline.wording import reason
from ..runs.encoders import weights_of_each
from ..runs.info import BRANCHES, BranchName, RunInfo
from ..runs.run import write_facts
from .download import COPIED, hub_errors
from .retriever import Retriever

_CARD = """\
---
library_name: xret
tags:
- image-text-retrieval
- xret
---

# {name}

An image-text retrieval head of the recipe `{recipe}`, trained on `{dataset}` with xret.
Its best epoch is {epoch}, with a validation RSUM of {rsum:.1f} (the sum of recall@1, 5 and 10 in both directions).

It embeds images from `{image}` and captions from `{text}`; `recipe.yaml` has every value.

```python
import xret

retriever = xret.load("{repo}"{options})
captions = retriever.encode_text(["a red square beside a blue circle"])
images = retriever.encode_images(["photo.jpg"])
print(retriever.similarity(images, captions))
```
"""


def save_to_folder(retriever: Retriever, folder: str | Path, repo: str | None = None) -> Path:
    """Write a run as the hub has models, into a new folder; `repo` is what the model card calls it, ``user/name``.

    Weights of an encoder that were named to `retriever` by a hub id are named in the folder, too; a file or folder
    of this machine must be named again where the run is loaded. RunError where the folder exists or cannot be
    written; or the run has no finished epoch, or is damaged.
    """
    folder, run = Path(folder), retriever.run
    if run is None:
        raise RunError(f"{retriever.name} is a model without a run folder, which is what the hub gets")
    if run.info.average is not None:
        raise RunError(f"{run.path} is an average, whose runs the hub does not get; push one of them")
    if folder.exists():
        raise RunError(f"{folder} exists; take another folder")
    run.model(retriever.device)  # damaged weights are refused here, not where the folder is loaded
    for branch in filter(run.info.tuned, BRANCHES):  # likewise, the backbones of a fine-tuned run
        _ = retriever.image_encoders if branch == "image" else retriever.text_encoders
    info = _portable(run.info, retriever.weights)
    with making(folder, RunError, "choose another folder") as partial:
        for name in filter(run.has, COPIED):
            file = run.file(name)
            (shutil.copytree if file.is_dir() else shutil.copyfile)(file, partial / name)
        write_facts(partial, info)
        (partial / "README.md").write_text(_card(info, repo or str(folder)), encoding="utf-8")
    return folder


def push(retriever: Retriever, repo: str, *, private: bool = False) -> str:
    """Put a run on the hub as ``user/name``, by the account of `hf auth login`; return its address.

    A repository that is not there yet is made, `private` or not. Errors are those of `save_to_folder`, and RunError
    where the hub refuses or is not reached.
    """
    with tempfile.TemporaryDirectory() as parent:
        folder = save_to_folder(retriever, Path(parent, "run"), repo)
        try:
            hub = HfApi()
            address = hub.create_repo(repo, private=private, exist_ok=True)
            hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"{retriever.title} by xret")
        except hub_errors() as error:
            raise RunError(
                f"{repo} cannot be pushed to the hub ({reason(error)}); check the name, the connection and"
                " `hf auth whoami`"
            ) from error
    return str(address)


def _portable(info: RunInfo, weights: Mapping[BranchName, str | None]) -> RunInfo:
    """Return `info` without paths of this machine; `weights` that are hub ids name the encoders."""
    adapter = {  # word vectors were read
        kind: {**block, "vectors": Path(block["vectors"]).name} if block.get("vectors") else block
        for kind, block in info.recipe.adapter.items()
    }
    sides: dict[str, Any] = {}
    for branch in BRANCHES:
        origins, named = info.origins(branch), iter(weights_of_each(weights[branch], info.origins(branch), branch))
        sides[branch] = tuple(origin if origin.kind == "words" else _naming(origin, next(named)) for origin in origins)
    return replace(
        info,
        recipe=replace(info.recipe, adapter=adapter),
        store=Path(info.store).name,
        also_stores=info.also_stores and [Path(store).name for store in info.also_stores],
        head=info.head and Path(info.head).name,
        distil=info.distil and Path(info.distil).name,
        init_from=info.init_from and Path(info.init_from).name,
        **sides,
    )


def _naming(origin: Origin, weights: str | None) -> Origin:
    if weights is not None and origin.spec is not None and not Path(weights).exists():  # a path means nothing elsewhere
        origin = replace(origin, spec=origin.spec.with_source(weights))
    return origin.without_folders()


def _card(info: RunInfo, repo: str) -> str:
    """Return the model card; its example names the weights that lie in a file or folder of this machine."""
    options = ""
    for branch in BRANCHES:
        sources = [origin.spec.source or "" for origin in info.origins(branch) if origin.spec]
        if not info.tuned(branch) and any(source.startswith(("/", "./")) for source in sources):
            options += f', {"visual" if branch == "image" else "text"}_weights="…"'
    return _CARD.format(
        name=repo.rpartition("/")[2],
        repo=repo,
        recipe=info.recipe.name,
        dataset=Path(info.store).name,
        epoch=info.best_epoch,
        rsum=info.best_rsum,
        image=" + ".join(info.names("image")),
        text=" + ".join(info.names("text")),
        options=options,
    )
