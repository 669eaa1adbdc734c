"""Shards on a Dask cluster, against one index and against a plain comparison with everything."""

import re
import shutil
import threading
from contextlib import closing

import pytest
import torch
from distributed import LocalCluster
from small_index import build_index

from xret.heads.modules.embedding import Gaussian
from xret.heads.modules.similarity import SmoothChamfer, Wasserstein
from xret.heads.retrieval.index import folder, sharded
from xret.heads.retrieval.index.build import IndexOptions
from xret.heads.retrieval.index.exact import RunCompare
from xret.heads.retrieval.index.folder import checksum
from xret.heads.retrieval.index.search import Index
from xret.heads.retrieval.index.sharded import ShardedSearch, shards_of
from xret.heads.retrieval.index.vectors import form_of
from xret.pipeline.errors import CacheError, RunError
from xret.pipeline.extraction import schedule as engine

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:distributed"),
]
SIZES = (40, 7, 33)  # of the shards
FACTS = {"weights": "w", "modality": "images"}
COMPARE = RunCompare(SmoothChamfer(), "images")


@pytest.fixture(scope="module")
def cluster():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster:
        yield cluster.scheduler_address
    torch.set_num_threads(threads)


def gallery():
    sets = torch.randn(sum(SIZES), 3, 8, generator=torch.Generator().manual_seed(0))
    sets[45] = sets[3]  # a tie between shards: of queries that are far from both, and of the set itself
    sets[60] = sets[3]
    return sets


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder, sets = tmp_path_factory.mktemp("shards"), gallery()
    for number, part in enumerate(sets.split(SIZES)):
        build_index(
            [part],
            [f"{number}/{row}" for row in range(len(part))],
            folder / f"shard-{number:04}",
            queries=torch.randn(10, 3, 8),
            compare=COMPARE,
            form=form_of(COMPARE.similarity),
            facts={**FACTS, "store": number},
            options=IndexOptions(kind="flat"),
        )
    return shards_of(folder)


@pytest.mark.parametrize("there", [True, False], ids=["cluster", "here"])
def test_merged_answers_are_those_of_one_gallery(shards, cluster, there):
    sets = gallery()
    ids = [f"{number}/{row}" for number, size in enumerate(SIZES) for row in range(size)]
    queries = torch.cat([sets[3:4], torch.randn(3, 3, 8, generator=torch.Generator().manual_seed(1))])
    with closing(ShardedSearch(shards, FACTS, COMPARE, cluster if there else None)) as search:
        assert len(search) == sum(SIZES)
        assert [part["samples"] for part in search.parts] == list(SIZES)
        for query in queries.split(1):
            scores = COMPARE(query, sets)[0]
            found = search.hits(query, 60)  # at 60 every sample of a shard is a candidate
            expected = sorted(range(len(sets)), key=lambda row: (-scores[row].item(), row))[:60]
            assert [hit.id for hit in found] == [hit.file_name for hit in found] == [ids[row] for row in expected]
            assert [hit.rank for hit in found] == list(range(1, 61))
            torch.testing.assert_close(torch.tensor([hit.score for hit in found]), scores[expected])
        assert [hit.id for hit in search.hits(sets[3:4], 60)[:3]] == [ids[row] for row in (3, 45, 60)]  # a tie


def test_indexes_do_not_stay_open_for_good(shards, tmp_path, monkeypatch):
    opened = sharded._open
    opened.clear()
    copies = [shutil.copytree(shard, tmp_path / shard.name) for shard in shards]
    with closing(ShardedSearch(copies, FACTS, COMPARE)):
        assert len(opened) == len(copies)
    assert opened == {}
    monkeypatch.setattr(sharded, "KEPT", 2)
    with closing(ShardedSearch([*shards, *copies], FACTS, COMPARE)) as search:
        assert len(search.hits(torch.randn(1, 3, 8), 5)) == 5
        assert list(opened) == [str(copy.resolve()) for copy in copies[-2:]]


def test_candidates_of_the_shards_merge_as_those_of_each(shards, cluster):
    query = torch.randn(1, 3, 8)
    own = [Index(shard).hits(query, 5, COMPARE) for shard in shards]
    expected = sorted((hit for hits in own for hit in hits), key=lambda hit: -hit.score)[:5]
    with closing(ShardedSearch(shards, FACTS, COMPARE, cluster)) as search:
        found = search.hits(query, 5)
    assert [(hit.id, hit.score) for hit in found] == [(hit.id, hit.score) for hit in expected]


def test_gaussians_come_with_their_uncertainty(tmp_path, cluster):
    compare = RunCompare(Wasserstein(), "captions")
    some = Gaussian(torch.randn(9, 4), torch.arange(9.0)[:, None].repeat(1, 4))
    options = {"queries": some, "compare": compare, "form": form_of(compare.similarity)}
    facts, options = {**FACTS, "modality": "captions"}, {**options, "options": IndexOptions(kind="flat")}
    build_index([some], list("abcdefghi"), tmp_path / "shard-0000", facts=facts, **options)
    with closing(ShardedSearch(shards_of(tmp_path), facts, compare, cluster)) as search:
        found = search.hits(Gaussian(some.mean[4:5], some.log_variance[4:5]), 2)
    assert found[0].id == "e"
    for hit in found:
        assert hit.caption == hit.id
        assert hit.uncertainty == pytest.approx(4 * "abcdefghi".index(hit.id))


def test_a_damaged_or_foreign_shard_is_the_same_sentence_from_a_worker(shards, cluster, tmp_path):
    copies = [shutil.copytree(shard, tmp_path / shard.name) for shard in shards]
    with pytest.raises(
        RunError, match="is an index of another run: the weights there have the SHA-256 w…, those of this run other…"
    ):
        ShardedSearch(copies, {**FACTS, "weights": "other"}, COMPARE, cluster)
    with (copies[1] / "embedding.bin").open("r+b") as file:
        file.write(b"x")
    with pytest.raises(RunError, match=re.escape(f"{copies[1]}/embedding.bin is missing or damaged")):
        ShardedSearch(copies, FACTS, COMPARE, cluster)
    shutil.rmtree(copies[2])
    with pytest.raises(RunError, match=re.escape(f"{copies[2]} is not an index")):
        ShardedSearch(copies[2:], FACTS, COMPARE, cluster)


def test_no_scheduler_and_no_worker(shards, monkeypatch):
    monkeypatch.setattr(engine, "PATIENCE", 1.0)
    with pytest.raises(CacheError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"):
        ShardedSearch(shards, FACTS, COMPARE, "tcp://127.0.0.1:9")
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as empty,
        pytest.raises(CacheError, match="has no worker; start some with"),
    ):
        ShardedSearch(shards, FACTS, COMPARE, empty.scheduler_address)


def test_workers_of_another_version_or_without_xret(shards, cluster, monkeypatch):
    def version(_):
        if threading.current_thread() is not threading.main_thread():  # on a worker
            return there()
        return "1.0"

    monkeypatch.setattr(engine, "version", version)
    there = "0.9".strip
    with pytest.raises(CacheError, match=r"have xret 0\.9; install 1\.0 there"):
        ShardedSearch(shards, FACTS, COMPARE, cluster)
    there = {}.popitem  # raises
    with pytest.raises(CacheError, match=r"cannot import xret; install xret 1\.0 there"):
        ShardedSearch(shards, FACTS, COMPARE, cluster)


def test_an_open_shard_is_not_read_again_however_many_there_are(shards, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(folder, "checksum", lambda path, size: read.append(path) or checksum(path, size))
    copies = [shutil.copytree(shards[1], tmp_path / f"{number}") for number in range(70)]
    with closing(ShardedSearch(copies, FACTS, COMPARE)) as search:
        assert {path.parent for path in read} == set(copies)
        read.clear()
        search.hits(torch.randn(1, 3, 8), 3)
        assert read == []
        shutil.rmtree(copies[5])
        shutil.copytree(shards[2], copies[5])  # another index at the same place
        search.hits(torch.randn(1, 3, 8), 3)
        assert {path.parent for path in read} == {copies[5]}
