"""Anybody's embeddings: the recalls of a plain count over the cosines."""

import csv
import json

import numpy as np
import pytest
from command_line import refused, run


@pytest.fixture
def files(tmp_path):
    """Write thirty images of three captions each, near to their images; return the files and both matrices."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(30, 16)).astype(np.float32)
    captions = (np.repeat(images, 3, 0) + rng.normal(0, 1.4, (90, 16))).astype(np.float32)
    np.save(tmp_path / "i.npy", images * 7)  # whose length does not count
    np.save(tmp_path / "c.npy", captions)
    rows = [{"file_name": f"{row // 3}.jpg", "caption": f"caption {row}"} for row in range(90)]
    with (tmp_path / "index.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["file_name", "caption"])
        table.writeheader()
        table.writerows(rows)
    return [tmp_path / name for name in ("i.npy", "c.npy", "index.csv")], images, captions, rows


def recall(similarity, right, k):
    """Return in percent how many queries, the rows, have a right item among their first k."""
    order = np.argsort(-similarity, axis=1)[:, :k]
    return 100 * np.take_along_axis(right, order, 1).any(1).mean()


def test_recalls_of_all_lines_where_there_are_no_splits(files):
    paths, images, captions, _ = files
    cosine = (images / np.linalg.norm(images, axis=1, keepdims=True)) @ (
        captions / np.linalg.norm(captions, axis=1, keepdims=True)
    ).T
    right = np.arange(30)[:, None] == np.arange(90) // 3
    found = json.loads(run("eval", "--embeddings", *paths, "--json").stdout)
    (result,) = found["results"]
    assert (result["images"], result["captions"], found["store"]) == (30, 90, str(paths[2]))
    for k in (1, 5, 10):
        assert result["image_to_text"][f"R@{k}"] == pytest.approx(recall(cosine, right, k))
        assert result["text_to_image"][f"R@{k}"] == pytest.approx(recall(cosine.T, right.T, k))
    assert run("eval", "--embeddings", *paths).stdout.startswith(f"{paths[0]} and {paths[1]} on {paths[2]}\n")


def test_a_split_of_an_index_counts_alone(files, tmp_path):
    paths, *_, rows = files
    index = tmp_path / "index.jsonl"
    lines = [{**row, "split": "test" if number < 60 else "other"} for number, row in enumerate(rows)]
    index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = json.loads(run("eval", "--embeddings", *paths[:2], index, "--json").stdout)["results"][0]
    assert (found["images"], found["captions"]) == (20, 60)
    index.write_text(index.read_text().replace('"test"', '"validation"').replace('"other"', '"holdout"'))
    for split in ("val", "validation"):
        again = json.loads(run("eval", "--embeddings", *paths[:2], index, "--split", split, "--json").stdout)
        assert again["results"][0]["image_to_text"] == found["image_to_text"]
    index.write_text(index.read_text().replace('"validation"', '"test"'))
    assert "has no split 'val', but other, test" in refused("eval", "--embeddings", *paths[:2], index, "--split", "val")
    index.write_text(index.read_text().replace(', "split": "holdout"', ""))
    assert "some, such as that of '20.jpg', have none" in refused("eval", "--embeddings", *paths[:2], index)


def test_what_does_not_fit_is_refused(files, tmp_path):
    paths, images, *_ = files
    np.save(tmp_path / "narrow.npy", images[:, :8])
    assert "narrow.npy is 8 wide and" in refused("eval", "--embeddings", tmp_path / "narrow.npy", *paths[1:])
    np.savez(tmp_path / "two.npz", images, images)
    assert "two.npz holds several arrays" in refused("eval", "--embeddings", tmp_path / "two.npz", *paths[1:])
    np.save(tmp_path / "short.npy", images[:7])
    said = refused("eval", "--embeddings", tmp_path / "short.npy", *paths[1:])
    assert all(str(path) in said for path in (tmp_path / "short.npy", *paths[1:])), said
    (tmp_path / "cut.npy").write_bytes(paths[0].read_bytes()[:40])
    assert str(tmp_path / "cut.npy") in refused("eval", "--embeddings", tmp_path / "cut.npy", *paths[1:])
    (tmp_path / "index.parquet").write_bytes(b"PAR1")
    assert "index.parquet is no index" in refused("eval", "--embeddings", *paths[:2], tmp_path / "index.parquet")
    assert "name a RUN" in refused("eval", code=2)
