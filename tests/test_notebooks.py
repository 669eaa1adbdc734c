"""The notebooks: each runs from its first cell to its last, is committed without outputs, and is listed on the site."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    for page in ("index.md", f"notebooks/{path.name}"):  # the way in, and the badge's own address
        assert f"notebooks/{path.name})" in (ROOT / "docs" / page).read_text(encoding="utf-8")
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    said = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("RSUM" in text for text in said)
    if path.stem == "loop":  # the picture that its query finds first shows what it says
        (query,) = re.findall(r'search\("(a .*?)"', "".join(cell.source for cell in notebook.cells))
        (first,) = [found for text in said for found in re.findall(r"^1 0\.\d+ (\S+\.jpg)$", text, re.MULTILINE)]
        images = json.loads((tmp_path / "scenes" / "dataset_scenes.json").read_text())["images"]
        shown = next(image for image in images if image["filename"] == first)
        assert query in [sentence["raw"] for sentence in shown["sentences"]]
        assert any("val RSUM" in text for text in said)  # of the training's progress
