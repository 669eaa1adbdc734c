"""Exported embeddings, read back by other libraries: the gallery's numbers, and what they belong to."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import refused
from command_line import run as call
from huggingface_hub import DatasetCard
from safetensors import safe_open
from scores import score
from small_disk import small_disk
from small_runs import make_pictures, make_store

from xret.heads.modules.embedding import Sequence, tensors_of
from xret.heads.modules.padding import valid_rows
from xret.heads.retrieval import export, gallery, index
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


@first_only
def test_it_is_written_whole_or_not_at_all(retriever, tmp_path):
    for name in ("out", "out.safetensors", "out.parquet"):
        with small_disk(300), pytest.raises(RunError, match=f"{name} cannot be written: .*File too large"):
            export_embeddings(retriever, tmp_path / name)
    with pytest.raises(RunError, match=r"x\.safetensors cannot be written: .*choose another `out`"):
        export_embeddings(retriever, Path("/proc/x.safetensors"))
    damaged = Retriever(retriever.run.path, split="test", device="cpu")
    for parameter in damaged.model.parameters():
        parameter.data.fill_(torch.nan)
    with pytest.raises(RunError, match="not finite"):
        export_embeddings(damaged, tmp_path / "out.safetensors")
    assert not list(tmp_path.iterdir())


def content(path):
    """Return what an export holds by modality and id, as other libraries read it."""
    if path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not here: pip install 'xret[parquet]'")
        return {(row["modality"], row["id"]): row for row in parquet.read_table(path).to_pylist()}
    if path.suffix:
        with safe_open(path, "numpy") as opened:
            arrays, about = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
        ids = {"images": json.loads(about["image_ids"]), "captions": json.loads(about["caption_ids"])}
        owners = zip(json.loads(about["caption_image_ids"]), arrays.pop("caption_image"), strict=True)
        assert all(row < 0 or ids["images"][row] == id_ for id_, row in owners)
        lines = {"images": json.loads(about["file_names"]), "captions": json.loads(about["captions"])}
    else:
        arrays = {file.stem: np.load(file) for file in path.glob("*.npy")}
        names = ("images", "captions")
        lines = {name: [*map(json.loads, (path / f"{name}.jsonl").read_text().splitlines())] for name in names}
        ids = {name: [line["id"] for line in lines[name]] for name in names}
    found = {}
    for name, array in arrays.items():
        side = name.partition(".")[0]
        for id_, line, values in zip(ids[side], lines[side], array, strict=True):
            found.setdefault((side, id_), {"line": line})[name] = values
    return found


@pytest.fixture(scope="module")
def grown(made, tmp_path_factory):
    """The store of `made` with three pictures more, one of them in the middle of its rows."""
    folder = tmp_path_factory.mktemp("grown")
    manifest = make_pictures(folder / "pictures", test=9)
    file = folder / "pictures" / "captions.json"
    images = json.loads(file.read_text())["images"]
    images[22]["split"] = "val"
    images[3]["sentences"] += [{"raw": "a new one of an old picture", "sentid": 7}]
    file.write_text(json.dumps({"dataset": "pictures", "images": images}))
    return make_store(manifest, folder / "grown.zarr", reuse=made.store())


@pytest.mark.parametrize(
    ("recipe", "suffix"),
    [("vsepp", ""), ("vsepp", ".safetensors"), *((recipe, ".parquet") for recipe in KINDS), ("scan", "")],
)
def test_what_is_new_and_what_was_there_are_all(made, grown, tmp_path, monkeypatch, recipe, suffix):
    old, new, whole, none = (tmp_path / f"{name}{suffix}" for name in ("old", "new", "whole", "none"))
    export_embeddings(Retriever(made.run(recipe), device="cpu"), old)
    for module, name, value in ((gallery, "BATCH", 4), (export, "BATCHES", 2), (index, "VALUES", 500)):
        monkeypatch.setattr(module, name, value)  # from here on in several blocks
    retriever = Retriever(made.run(recipe), store=grown, device="cpu")
    summary = export_embeddings(retriever, new, since=[old])
    export_embeddings(retriever, whole)
    assert (summary["images"], summary["captions"], summary["splits"]["val"]) == (3, 5, (0, 1))
    assert summary["gone"] == {"images": [], "captions": []}
    before, after, all_ = map(content, (old, new, whole))
    assert not before.keys() & after.keys()
    assert before.keys() | after.keys() == all_.keys()
    for key, expected in all_.items():
        for name, values in (before | after)[key].items():
            if isinstance(values, str | dict | None):
                assert values == expected[name]
            else:
                one, other = np.atleast_1d(values), np.atleast_1d(expected[name])
                rows = min(len(one), len(other))  # sequences are padded to the longest of their export
                np.testing.assert_allclose(one[:rows], other[:rows], rtol=0, atol=1e-5)
    again = export_embeddings(retriever, none, since=[new, old])
    assert (again["images"], again["captions"], content(none)) == (0, 0, {})
    assert export_embeddings(retriever, tmp_path / "last", since=[old, new, none])["images"] == 0


def test_what_cannot_be_added_to_is_refused(made, grown, tmp_path, caplog):
    def edited(name, change):
        folder = shutil.copytree(tmp_path / "old", tmp_path / name)
        change(folder)
        return folder

    def other_caption(folder):
        file = folder / "captions.jsonl"
        file.write_text(file.read_text().replace("beside", "besides", 1))

    def other_picture(folder):
        images = np.load(folder / "images.npy")
        images[4] = images[5]
        np.save(folder / "images.npy", images)

    run, other = Retriever(made.run(), device="cpu"), Retriever(made.run("setdiv"), device="cpu")
    export_embeddings(run, tmp_path / "old")
    export_embeddings(run, tmp_path / "small", dims=4)
    export_embeddings(other, tmp_path / "sets.safetensors")
    export_embeddings(Retriever(made.run(), split="test", device="cpu"), tmp_path / "part.safetensors")
    (tmp_path / "x.csv").write_text("a,b")
    (tmp_path / "x.parquet").write_text("a,b")
    for place, message in {
        "sets.safetensors": "of other weights than this run's (setdiv-words); write",
        "part.safetensors": "of other splits (test); write",
        "small": "is fitted to its store by --dims",
        "x.csv": "x.csv is no export, or damaged; name",
        "x.parquet": "x.parquet is no export, or damaged; name",
        edited("text", other_caption): "1 caption (1",
        edited("picture", other_picture): "1 image (4) of",
        edited("lost", lambda folder: (folder / "images.npy").unlink()): "lost is no export, or damaged",
    }.items():
        words = ("export", made.run(), "--store", grown, "--since", tmp_path / place, "--out", tmp_path / "out")
        assert message in refused(*words), place
        assert not (tmp_path / "out").exists()
    assert "--since adds to others; leave one out" in refused(*words, "--dims", 2)
    more = Retriever(made.run(), store=grown, device="cpu")
    export_embeddings(more, tmp_path / "more")
    summary = export_embeddings(run, tmp_path / "less", since=tmp_path / "more")
    assert (summary["gone"]["images"], summary["images"]) == (["22", "23", "24"], 0)
    back = export_embeddings(more, tmp_path / "back.safetensors", since=[tmp_path / "more", tmp_path / "less"])
    assert (back["images"], back["gone"]["images"]) == (3, [])
    assert "to be deleted from what grows: 3 images (22, 23, 24)" in caplog.text


@first_only
def test_the_command(retriever, tmp_path):
    words, out = ("export", retriever.run.path, "--out"), tmp_path / "out.safetensors"
    assert call(*words, out, "--split", "all").stdout.startswith(
        f"{out}: 22 images and 33 captions as vectors (images 22x16, captions"
    )
    assert json.loads(call(*words, tmp_path / "x.npy", "--split", "val", "--json").stdout)["images"] == 4
    assert "exists already; name another --out" in refused(*words, out)
    assert "ending in .parquet or .safetensors, or to a folder" in refused(*words, "x.csv")
    assert "no split 'tset'" in refused(*words, tmp_path / "y", "--split", "tset")
    assert not (tmp_path / "y").exists()
