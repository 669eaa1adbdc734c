"""Exported embeddings, read back by other libraries: the gallery's numbers, and what they belong to."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import refused
from command_line import run as call
from huggingface_hub import DatasetCard
from safetensors import safe_open

from xret.heads.modules.embedding import tensors_of
from xret.heads.retrieval.export import export_embeddings
from xret.heads.retrieval.retriever import Retriever
from xret.pipeline.errors import RunError

KINDS = {"vsepp": "vector", "setdiv": "set", "gaussian-vsepp": "gaussian", "scan": "sequence"}
first_only = pytest.mark.parametrize("retriever", ["vsepp"], indirect=True)


@pytest.fixture(params=KINDS)
def retriever(request, made):
    return Retriever(made.run(request.param), device="cpu")


def arrays(retriever, modality):
    """Return what is expected, by the part of an array's name behind the modality."""
    parts = tensors_of(retriever.gallery.of(modality)).items()
    return {"" if name == "embedding" else f".{name}": part.numpy() for name, part in parts}


def test_folders_and_safetensors(retriever, tmp_path):
    summary, gallery = export_embeddings(retriever, tmp_path / "out"), retriever.gallery
    export_embeddings(retriever, tmp_path / "out.safetensors")
    with safe_open(tmp_path / "out.safetensors", "numpy") as opened:
        for modality in ("images", "captions"):
            for name, expected in arrays(retriever, modality).items():
                np.testing.assert_array_equal(np.load(tmp_path / f"out/{modality}{name}.npy"), expected)
                np.testing.assert_array_equal(opened.get_tensor(modality + name), expected)
                assert summary["shapes"][modality + name] == list(expected.shape)
        np.testing.assert_array_equal(opened.get_tensor("caption_image"), gallery.caption_image)
        metadata = opened.metadata()
    images, captions = (
        [json.loads(line) for line in (tmp_path / f"out/{modality}.jsonl").read_text().splitlines()]
        for modality in ("images", "captions")
    )
    assert [line["id"] for line in images] == gallery.image_ids == json.loads(metadata["image_ids"])
    assert [line["file_name"] for line in images] == gallery.file_names
    assert [line["id"] for line in captions] == gallery.caption_ids
    assert [line["caption"] for line in captions] == gallery.texts == json.loads(metadata["captions"])
    assert [line["image_id"] for line in captions] == [gallery.image_ids[row] for row in gallery.caption_image]
    assert json.loads((tmp_path / "out/about.json").read_text())["split"] == "test"
    card = DatasetCard.load(tmp_path / "out/README.md")
    assert "xret" in card.data.tags
    for name, shape in summary["shapes"].items():
        assert f"| `{name}.npy` | {' × '.join(map(str, shape))} |" in card.text
    assert (metadata["recipe"], summary["kind"]) == (retriever.run.recipe.name, KINDS[retriever.run.recipe.name])


def test_parquet(retriever, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not here: pip install 'xret[parquet]'")
    export_embeddings(retriever, tmp_path / "out.parquet")
    table, gallery = parquet.read_table(tmp_path / "out.parquet"), retriever.gallery
    rows = table.to_pylist()
    images, captions = ([row for row in rows if row["modality"] == what] for what in ("image", "caption"))
    assert [row["id"] for row in images] == [row["image_id"] for row in images] == gallery.image_ids
    assert [(row["id"], row["caption"]) for row in captions] == [*zip(gallery.caption_ids, gallery.texts, strict=True)]
    assert [row["file_name"] for row in captions] == [gallery.file_names[row] for row in gallery.caption_image]
    assert json.loads(table.schema.metadata[b"xret"])["kind"] == KINDS[retriever.run.recipe.name]
    for modality, found in (("images", images), ("captions", captions)):
        expected = arrays(retriever, modality)
        if ".rows" in expected:
            expected = {"": [own[:length] for own, length in zip(*expected.values(), strict=True)]}
        for row, sample in enumerate(found):
            for name, values in expected.items():
                column = np.array(sample[name.removeprefix(".") or "embedding"], dtype=np.float32)
                np.testing.assert_array_equal(column, values[row])


@first_only
def test_it_is_written_whole_or_not_at_all(retriever, tmp_path, monkeypatch):
    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(RunError, match="out cannot be written: No space left on device"):
        export_embeddings(retriever, tmp_path / "out")
    with pytest.raises(RunError, match=r"x\.safetensors cannot be written: .*choose another --out"):
        export_embeddings(retriever, Path("/proc/x.safetensors"))
    damaged = Retriever(retriever.run.path, device="cpu")
    for parameter in damaged.model.parameters():
        parameter.data.fill_(torch.nan)
    with pytest.raises(RunError, match="not finite"):
        export_embeddings(damaged, tmp_path / "out.safetensors")
    assert not list(tmp_path.iterdir())


@first_only
def test_the_command(retriever, tmp_path):
    words, out = ("export", retriever.run.path, "--out"), tmp_path / "out.safetensors"
    assert call(*words, out).stdout.startswith(f"{out}: 6 images and 9 captions as vectors (images 6x16, captions")
    assert json.loads(call(*words, tmp_path / "x.npy", "--split", "val", "--json").stdout)["images"] == 4
    assert "exists already; name another --out" in refused(*words, out)
    assert "ending in .parquet or .safetensors, or to a folder" in refused(*words, "x.csv")
    assert "no split 'tset'" in refused(*words, tmp_path / "y", "--split", "tset")
    assert not (tmp_path / "y").exists()
