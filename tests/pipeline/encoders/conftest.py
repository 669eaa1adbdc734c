"""Checkpoints that are written once, and three photographs."""

import shutil

import pytest
from encoder_contract import SIZES, picture


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Return where `save(path, name)` has written a checkpoint, which it does once."""
    root = tmp_path_factory.mktemp("made")

    def find(save, name):
        path = root / save.__name__ / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            save(path, name)
        return path

    return find


@pytest.fixture
def copy(made, tmp_path):
    """Return a copy of a checkpoint's folder to break."""
    return lambda save, name: shutil.copytree(made(save, name), tmp_path / "copy")


@pytest.fixture
def photographs(tmp_path):
    return [picture(tmp_path / f"{number}.jpg", size, number) for number, size in enumerate(SIZES)]
