"""The import contracts of `pyproject.toml` hold, and what they forbid is found."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="import-linter is not installed: make check installs it")

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("cli", "demo", "heads", "pipeline", "data_manifests")
ROOMS = "Rooms of the heads"
MATHEMATICS = "The mathematics imports torch, and of ours what sends values to a device"
CIRCLES = "No circles, also none through an import inside a function"


@pytest.fixture
def sources(tmp_path):
    """The package as it is built: its Python files alone."""
    for path in (*ROOT.glob("*.py"), *(file for room in FOLDERS for file in (ROOT / room).rglob("*.py"))):
        copy = tmp_path / "xret" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    return tmp_path / "xret"


def lint(package):
    """Run import-linter on a copy of the package, as `make check` does; return its exit code and what it prints."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    words = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": str(package.parent), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("heads/modules/embedding.py", "from ...pipeline import errors", MATHEMATICS),
        ("heads/modules/losses/triplet.py", "def late():\n    from ....pipeline import wording", MATHEMATICS),
        ("heads/modules/similarity/sets.py", "from ...recipes import schema", ROOMS),
        ("pipeline/data/manifest.py", "def late():\n    from . import samples", CIRCLES),
    ],
)
def test_a_bad_import_breaks_a_contract(sources, file, line, broken):
    path = sources / file
    path.write_text(f"{path.read_text()}\n\n{line}\n")
    code, printed = lint(sources)
    assert code == 1, printed
    assert f"{broken} BROKEN" in printed
