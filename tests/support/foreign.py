"""Programs that nobody here wrote: packages of the extra ``foreign``, and Node with those of `tests/foreign`."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Warnings of others are theirs.
of_others = [pytest.mark.foreign, pytest.mark.filterwarnings("ignore")]


def needed(package):
    """Import a package, or skip the test."""
    return pytest.importorskip(package, reason=f"{package} is not here: make foreign")


def node(script, *words):
    """Run a module of JavaScript, whose arguments begin at `process.argv[2]`; return the JSON that it prints."""
    folder = Path(sys.prefix, "node")
    if shutil.which("node") is None or not (folder / "node_modules").is_dir():
        pytest.skip("Node or its packages are not here: make foreign")
    command = ["node", "--input-type=module", "-", *map(str, words)]
    done = subprocess.run(command, input=script, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
