"""Where features lie while a head is trained."""

import pytest
import torch
from small_batches import ALL, EPOCHS, as_remote, assert_equal, batches_of, large, rows_of

from xret.pipeline.errors import RunError
from xret.pipeline.reading import placement as placement_module
from xret.pipeline.reading.batches import stored_batches
from xret.pipeline.reading.features import Stored, concatenate
from xret.pipeline.reading.placement import Column, Resident, choose_placement

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return large(tmp_path_factory.mktemp("stores"))


@pytest.mark.parametrize("words", EPOCHS)
def test_batches_are_the_same_wherever_the_features_lie(cache, words):
    mapped, held = batches_of(cache, "memory"), batches_of(as_remote(cache), "memory")
    for one, two in zip(mapped.epoch(**words), held.epoch(**words), strict=True):
        images, captions = rows_of(cache, one, mapped)
        assert_equal(one.images, images)
        assert_equal(one.captions, captions)
        assert_equal(one, two)


@pytest.mark.parametrize("placement", ["memory", "stream"])
def test_evaluation_reads_in_the_order_of_the_rows(cache, placement):
    batches = batches_of(cache, placement, split="val")
    images, texts = cache.image_set(), cache.caption_set()
    got = concatenate(list(batches.image_features(5)))
    assert torch.equal(got.local, torch.from_numpy(images.local(batches.image_rows)))
    assert torch.equal(got.global_, torch.from_numpy(images.global_(batches.image_rows)))
    got = concatenate(list(batches.caption_features(7)))
    assert got.length.tolist() == texts.length[batches.caption_rows].tolist()
    packed = torch.cat([rows[:length] for rows, length in zip(got.local, got.length, strict=True)])
    assert torch.equal(packed, torch.from_numpy(texts.local(batches.caption_rows)))


def test_batches_that_are_kept_stay_as_they_are(cache):
    for store in (cache, as_remote(cache)):
        kept = [batch.images.local[:, 1:] for batch in batches_of(store, "memory").epoch(**EPOCHS[0])]
        again = batches_of(store, "memory").epoch(**EPOCHS[0])
        assert all(torch.equal(one, two.images.local[:, 1:]) for one, two in zip(kept, again, strict=True))


def of_size(size):
    """Return an array of so many bytes, in a list."""
    return [Column("these", None, 1, None, size)]


@pytest.mark.parametrize(
    ("processes", "device", "is_local", "size", "expected"),
    [
        (1, "cuda", True, 60, ("memory", "device")),
        (1, "cuda", True, 61, ("memory", "host")),
        (1, "cuda", False, 600, ("memory", "host")),
        (1, "cuda", True, 601, ("stream", "store")),
        (1, "cpu", True, 600, ("memory", "store")),
        (1, "cpu", False, 600, ("memory", "host")),
        (1, "cpu", True, 601, ("stream", "store")),
        (1, "cpu", False, 601, ("stream", "store")),
        (4, "cuda", True, 15, ("memory", "device")),  # a quarter of what one alone would fill
        (4, "cuda", True, 16, ("memory", "store")),  # one copy for all
        (4, "cuda", True, 601, ("stream", "store")),
        (4, "cuda", False, 150, ("memory", "host")),
        (4, "cuda", False, 151, ("stream", "store")),
        (4, "cpu", True, 600, ("memory", "store")),
        (4, "cpu", False, 151, ("stream", "store")),
    ],
)
def test_auto_takes_the_first_place_that_the_features_fit(processes, device, is_local, size, expected, monkeypatch):
    monkeypatch.setattr(placement_module, "free_host_memory", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 10**9))
    assert (
        choose_placement("auto", of_size(size), torch.device(device), is_local, "these", Resident(processes))
        == expected
    )


def test_memory_that_is_too_small_for_every_process(monkeypatch):
    monkeypatch.setattr(placement_module, "free_host_memory", lambda: 1000)
    assert choose_placement("memory", of_size(250), torch.device("cpu"), False, "these", Resident(4)) == (
        "memory",
        "host",
    )
    with pytest.raises(RunError, match="in each of 4 processes"):
        choose_placement("memory", of_size(251), torch.device("cpu"), False, "these", Resident(4))


def test_what_lies_in_memory_already_needs_no_more(cache, monkeypatch):
    resident, remote = Resident(), as_remote(cache)
    sets = remote.image_set(), remote.caption_set()

    def again(placement, wanted=ALL):
        return stored_batches(*sets, "train", placement=placement, resident=resident, **wanted)

    again("memory", {"image_fields": {"local"}, "caption_fields": {"token"}})
    monkeypatch.setattr(placement_module, "free_host_memory", lambda: 25_000)  # local rows of images take 20 kB
    with pytest.raises(RunError, match=r"set runtime\.cache to stream"):
        again("memory")
    monkeypatch.setattr(placement_module, "free_host_memory", lambda: 10**9)
    second = again("memory")
    monkeypatch.setattr(placement_module, "free_host_memory", lambda: 0)
    third = again("auto")
    for source in ("image_source", "caption_source"):
        columns = [getattr(one, source).columns for one in (second, third)]
        assert all(columns[0][field].table is columns[1][field].table is not None for field in columns[0])


def test_what_torch_keeps_of_a_gpu_s_memory_is_free(monkeypatch):
    free = [100]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 10**9))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.__setitem__(0, 10**9))
    assert choose_placement("memory", of_size(10**8), torch.device("cuda"), True, "features", Resident()) == (
        "memory",
        "device",
    )


def test_the_bytes_are_those_of_the_arrays(cache):
    batches = batches_of(cache, "memory")
    for features, rows, fields in (
        (cache.image_set(), batches.parts[0].images, {"local", "global"}),
        (cache.caption_set(), batches.parts[0].captions, {"local", "global", "token"}),
    ):
        for field, column in Stored(features, rows, fields).columns.items():
            assert column.nbytes == getattr(features, "global_" if field == "global" else field)(rows.whole()).nbytes


def test_what_does_not_fit_is_a_sentence(cache, monkeypatch):
    monkeypatch.setattr(placement_module, "free_host_memory", lambda: 50_000)
    with pytest.raises(RunError, match=r"take 93\.3 kB, and 50\.0 kB .* free; set runtime\.cache to stream"):
        batches_of(cache, "memory")
    assert batches_of(cache, "auto").placement == "stream"


def test_in_a_container_what_is_used_is_not_free(tmp_path, monkeypatch):
    monkeypatch.setattr(placement_module, "CGROUP", tmp_path)

    def free(limit):
        (tmp_path / "memory.max").write_text(limit)
        return placement_module.free_host_memory()

    (tmp_path / "memory.current").write_text("700\n")  # of which 250 are a cache of files, which makes room
    (tmp_path / "memory.stat").write_text("anon 400\nactive_file 50\ninactive_file 200\nunevictable 50\n")
    assert free("1000\n") == 550
    assert free("100\n") == 0
    for without in ("max\n", f"{1 << 62}\n"):  # what the machine has
        assert 1 << 20 < free(without) < 1 << 50


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("words", EPOCHS)
@pytest.mark.parametrize("placement", ["memory", "stream"])
def test_a_gpu_has_the_batches_of_a_cpu(cache, words, placement):
    here, there = batches_of(cache, placement), batches_of(cache, placement, device="cuda")
    for one, other in zip(here.epoch(**words), there.epoch(**words), strict=True):
        assert other.images.local.is_cuda and other.captions.token.is_cuda
        assert_equal(one, other)


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_that_is_slow_gets_no_overwritten_batch(cache):
    for placement in ("memory", "stream"):
        batches = batches_of(cache, placement, device="cuda")
        expected = [batch.images.local.double().sum().item() for batch in batches.epoch(**EPOCHS[0])]
        sums = []
        for batch in batches.epoch(**EPOCHS[0]):
            torch.cuda._sleep(20_000_000)
            sums.append(batch.images.local.double().sum())
            del batch
        assert [total.item() for total in sums] == expected
