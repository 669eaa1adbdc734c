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
from scores import score

from xret.heads.modules.embedding import Sequence, tensors_of
from xret.heads.modules.padding import valid_rows
from xret.heads.retrieval.export import export_embeddings
from xret.heads.retrieval.retriever import Retriever
from xret.pipeline.errors import RunError

KINDS = {"vsepp": "vector", "setdiv": "set", "gaussian-vsepp": "gaussian", "scan": "sequence"}
first_only = pytest.mark.parametrize("retriever", ["vsepp"], indirect=True)


@pytest.fixture(params=KINDS)
def retriever(request, made):
    return Retriever(made.run(request.param), split="test", device="cpu")


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
    about = json.loads((tmp_path / "out/about.json").read_text())
    assert (about["split"], about["splits"]) == ("test", {"test": [0, 6]})
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


@pytest.mark.parametrize("recipe", ["vsepp", "setdiv", "maxmatch", "scan", "pcmepp", "pcme", "gaussian-vsepp"])
def test_length_is_one_where_only_the_direction_counts(made, tmp_path, recipe):
    """Scores stay those of the head's own embeddings, however these are."""
    retriever, raw = Retriever(made.run(recipe), split="test", device="cpu"), score(made.run(recipe), device="cpu")
    told, gallery = export_embeddings(retriever, tmp_path / "e"), retriever.gallery
    torch.testing.assert_close(retriever.similarity(gallery.images, gallery.captions), raw.similarity)
    texts = retriever.encode_text(gallery.texts)
    for ours, own in ((gallery.images, raw.image.embedding), (gallery.captions, raw.text.embedding), (texts, None)):
        rows = ours.rows[valid_rows(*ours)] if isinstance(ours, Sequence) else next(iter(tensors_of(ours).values()))
        if told["unit"]:
            torch.testing.assert_close(torch.linalg.vector_norm(rows, dim=-1), torch.ones(rows.shape[:-1]))
        elif own is not None:
            torch.testing.assert_close(ours, own)
    assert told["unit"] == (recipe not in ("pcme", "gaussian-vsepp"))
    if recipe == "pcmepp":
        torch.testing.assert_close(gallery.images.log_variance, raw.image.embedding.log_variance)


def test_a_dot_product_ranks_as_the_run_does(made, tmp_path):
    faiss = pytest.importorskip("faiss", reason="FAISS is not here: pip install 'xret[index]'")
    retriever = Retriever(made.run(), device="cpu")
    assert export_embeddings(retriever, tmp_path / "e")["measure"] == "dot product"
    images, captions = (np.load(tmp_path / f"e/{name}.npy") for name in ("images", "captions"))
    index = faiss.IndexFlatIP(images.shape[1])
    index.add(images)
    ids = [json.loads(line)["id"] for line in (tmp_path / "e/images.jsonl").read_text().splitlines()]
    assert len(ids) == 22
    found, rows = index.search(captions, len(ids))
    np.testing.assert_allclose(found, -np.sort(-(captions @ images.T), 1), atol=1e-6)
    for row, text in enumerate(retriever.gallery.texts):
        hits = {hit.id: hit.score for hit in retriever.search(text, len(ids))}
        assert found[row].tolist() == pytest.approx([hits[ids[one]] for one in rows[row]], abs=2e-3)


@pytest.mark.filterwarnings("ignore")  # of datasets
def test_the_hub_reads_a_folder_by_its_card(made, tmp_path):
    datasets = pytest.importorskip("datasets")
    export_embeddings(retriever := Retriever(made.run(), device="cpu"), tmp_path / "e")
    for name in ("images", "captions"):
        rows = datasets.load_dataset(str(tmp_path / "e"), name, split="train", cache_dir=str(tmp_path / "cache"))
        assert rows["id"] == retriever.gallery.names(name)[0]


@first_only
def test_it_is_written_whole_or_not_at_all(retriever, tmp_path, monkeypatch):
    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(RunError, match="out cannot be written: No space left on device"):
        export_embeddings(retriever, tmp_path / "out")
    with pytest.raises(RunError, match=r"x\.safetensors cannot be written: .*choose another --out"):
        export_embeddings(retriever, Path("/proc/x.safetensors"))
    damaged = Retriever(retriever.run.path, split="test", device="cpu")
    for parameter in damaged.model.parameters():
        parameter.data.fill_(torch.nan)
    with pytest.raises(RunError, match="not finite"):
        export_embeddings(damaged, tmp_path / "out.safetensors")
    assert not list(tmp_path.iterdir())


@first_only
def test_the_command(retriever, tmp_path):
    words, out = ("export", retriever.run.path, "--out"), tmp_path / "out.safetensors"
    assert call(*words, out).stdout.startswith(f"{out}: 22 images and 33 captions as vectors (images 22x16, captions")
    assert json.loads(call(*words, tmp_path / "x.npy", "--split", "val", "--json").stdout)["images"] == 4
    assert "exists already; name another --out" in refused(*words, out)
    assert "ending in .parquet or .safetensors, or to a folder" in refused(*words, "x.csv")
    assert "no split 'tset'" in refused(*words, tmp_path / "y", "--split", "tset")
    assert not (tmp_path / "y").exists()
