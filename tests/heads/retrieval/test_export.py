"""Exported embeddings, read back by other libraries: the gallery's numbers, and what they belong to."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from small_store import make_store

from xret.cli import main
from xret.heads.recipes.recipe import load_recipe
from xret.heads.retrieval.export import export_embeddings
from xret.heads.retrieval.retriever import Retriever
from xret.heads.training.train import train
from xret.pipeline.errors import RunError

SETTINGS = ["model.dim=16", "data.batch_size=16", "adapter.words.word_dim=8", "schedule.epochs=1"]
KINDS = {"vsepp": "vector", "setdiv": "set", "gaussian-vsepp": "gaussian", "scan": "sequence"}


@pytest.fixture(scope="module", params=KINDS)
def retriever(request, tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("export")
    store = make_store(folder / "small.zarr", train=16, val=4, test=6, broken=(21,))
    train(store, load_recipe(request.param, SETTINGS), folder / "run", device="cpu")
    yield Retriever(folder / "run", device="cpu")
    torch.set_num_threads(threads)


def arrays(retriever, modality):
    """Return what is expected, by the part of an array's name behind the modality."""
    embedding = getattr(retriever.gallery, modality)
    if isinstance(embedding, torch.Tensor):
        return {"": embedding.numpy()}
    return {f".{name}": part.numpy() for name, part in embedding._asdict().items()}


def test_a_folder_of_npy(retriever, tmp_path):
    summary = export_embeddings(retriever, tmp_path / "out")
    gallery = retriever.gallery
    assert summary["kind"] == KINDS[retriever.run.recipe.name]
    for modality in ("images", "captions"):
        for name, expected in arrays(retriever, modality).items():
            np.testing.assert_array_equal(np.load(tmp_path / f"out/{modality}{name}.npy"), expected)
            assert summary["shapes"][modality + name] == list(expected.shape)
    images, captions = (
        [json.loads(line) for line in (tmp_path / f"out/{modality}.jsonl").read_text().splitlines()]
        for modality in ("images", "captions")
    )
    assert [(line["id"], line["file_name"]) for line in images] == [
        *zip(gallery.image_ids, gallery.file_names, strict=True)
    ]
    assert [(line["id"], line["caption"]) for line in captions] == [
        *zip(gallery.caption_ids, gallery.texts, strict=True)
    ]
    assert [line["image_id"] for line in captions] == [gallery.image_ids[row] for row in gallery.caption_image]
    assert json.loads((tmp_path / "out/about.json").read_text())["split"] == "test"
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_safetensors(retriever, tmp_path):
    file = tmp_path / "out.safetensors"
    export_embeddings(retriever, file)
    gallery = retriever.gallery
    with safe_open(file, "numpy") as opened:
        for modality in ("images", "captions"):
            for name, expected in arrays(retriever, modality).items():
                np.testing.assert_array_equal(opened.get_tensor(modality + name), expected)
        np.testing.assert_array_equal(opened.get_tensor("caption_image"), gallery.caption_image)
        metadata = opened.metadata()
    assert json.loads(metadata["captions"]) == gallery.texts
    assert json.loads(metadata["image_ids"]) == gallery.image_ids
    assert metadata["recipe"] == retriever.run.recipe.name


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
        for row, sample in enumerate(found):
            if ".rows" in expected:
                own = expected[".rows"][row][: expected[".length"][row]]
                np.testing.assert_array_equal(np.array(sample["embedding"], dtype=np.float32), own)
            else:
                for name, values in expected.items():
                    column = np.array(sample[name.removeprefix(".") or "embedding"], dtype=np.float32)
                    np.testing.assert_array_equal(column, values[row])


def test_it_is_written_whole_or_not_at_all(retriever, tmp_path, monkeypatch):
    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(RunError, match="out cannot be written: No space left on device"):
        export_embeddings(retriever, tmp_path / "out")
    with pytest.raises(RunError, match=r"x\.safetensors cannot be written: .*choose another --out"):
        export_embeddings(retriever, Path("/proc/x.safetensors"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("retriever", ["vsepp"], indirect=True)
def test_damaged_embeddings_are_not_exported(retriever, tmp_path):
    damaged = Retriever(retriever.run.path, device="cpu")
    for parameter in damaged.model.parameters():
        parameter.data.fill_(torch.nan)
    with pytest.raises(RunError, match="not finite"):
        export_embeddings(damaged, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("retriever", ["vsepp"], indirect=True)
def test_the_command(retriever, tmp_path):
    def call(*words, code=0):
        result = CliRunner().invoke(main, ["export", str(retriever.run.path), *map(str, words)], catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result

    out = tmp_path / "out.safetensors"
    assert call("--out", out).stdout.startswith(f"{out}: 5 images and 12 captions as vectors (images 5x16, captions")
    assert json.loads(call("--out", tmp_path / "x.npy", "--split", "val", "--json").stdout)["images"] == 4
    assert "exists already; name another --out" in call("--out", out, code=1).stderr
    assert "ending in .parquet or .safetensors, or to a folder" in call("--out", "x.csv", code=1).stderr
    assert "no split 'tset'" in call("--out", tmp_path / "y", "--split", "tset", code=1).stderr
    assert not (tmp_path / "y").exists()
