"""A tiny BERT, and a copy of it to break."""

import shutil
from pathlib import Path

import pytest
from bert_family import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def copy(folder, tmp_path):
    """Return a copy of the tiny model to break."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))
