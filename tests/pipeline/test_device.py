"""Devices, the order of sums, and what is said where memory does not suffice."""

import os

import pytest
import torch

from xret.pipeline import device as device_module
from xret.pipeline.device import cores, deterministic, pick_device, start_reading, to_host, within_memory
from xret.pipeline.errors import DeviceError, RunError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
GPU = torch.device("cuda")


def test_devices():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type in ("cpu", "cuda")
    for name in ("gpu", "mps", "meta", "xpu", "cpu:0", "cuda:", "cuda:-1", "cuda:01", "cuda:99", "cuda:99999"):
        with pytest.raises(DeviceError, match=f"device '{name}'"):
            pick_device(name)


def test_a_gpu_is_told_to_repeat_its_sums_before_anything_runs_on_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    pick_device("cpu")
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert pick_device("cuda:1") == torch.device("cuda:1")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # a user's own stays
    pick_device("cuda")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Of 64 cores; return the folders in which it says what groups of processes may use, and in which group we are."""
    monkeypatch.setattr(device_module, "CGROUP", tmp_path / "groups")
    monkeypatch.setattr(device_module, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    return tmp_path / "groups", tmp_path / "own"


@pytest.mark.parametrize(
    ("own", "folder"),
    [
        (None, ""),
        ("0::/", ""),
        ("0::/user.slice/a.scope", "user.slice/a.scope"),
        ("0::/user.slice/a.scope", "user.slice"),  # a group that holds the own one
        ("0::/docker/abc", ""),  # a container that knows its path, and sees what lies there as the root
        ("3:memory:/m\n2:cpu,cpuacct:/job/step", "cpu/job"),
        ("2:cpu,cpuacct:/docker/abc", "cpu"),
    ],
)
def test_a_container_may_have_fewer_cores(machine, own, folder):
    groups, mine = machine
    assert cores() == 64
    if own is not None:
        mine.write_text(f"{own}\n")
    here = groups / folder
    here.mkdir(parents=True)
    for quota, expected in ((None, 64), (250000, 3), (10000, 1), (9900000, 64)):
        if "cpu" in folder:
            (here / "cpu.cfs_quota_us").write_text(f"{quota or -1}\n")
            (here / "cpu.cfs_period_us").write_text("100000\n")
        else:
            (here / "cpu.max").write_text(f"{quota or 'max'} 100000\n")
        assert cores() == expected


@pytest.mark.parametrize(("cpus", "expected"), [("4", 4), ("128", 64), ("", 64), ("many", 64)])
def test_a_job_of_slurm_may_have_fewer_cores(machine, monkeypatch, cpus, expected):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", cpus)
    assert cores() == expected


@pytest.mark.parametrize(("named", "threads"), [(None, 1), ("7", 7)])
def test_torch_has_as_many_threads_as_there_are_cores_or_the_user_says(monkeypatch, named, threads):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if named:
        monkeypatch.setenv("OMP_NUM_THREADS", named)
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    try:
        pick_device("cpu")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_how_sums_are_formed_is_afterwards_as_before():
    def found():
        return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory

    before = found()
    for device, inside in ((GPU, (True, False)), (torch.device("cpu"), before)):
        with deterministic(device):
            assert found() == inside
        assert found() == before


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("CUDA error: out of memory", "cuda"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cuda"),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory", "cpu"),
    ],
)
def test_every_lack_of_memory_is_a_sentence(words, where):
    with pytest.raises(RunError, match=f"does not fit in the memory of {where};"), within_memory(GPU):
        raise RuntimeError(words)
    with pytest.raises(RuntimeError, match="an illegal memory access"), within_memory(GPU):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.gpu
@needs_gpu
def test_reading_does_not_wait_for_what_comes_after():
    values = torch.full((4,), 7.0, device=GPU)
    busy = torch.randn(8192, 8192, device=GPU)
    read, done = start_reading(values), torch.cuda.Event()
    for _ in range(50):
        busy = busy @ busy
    values.zero_()
    done.record()
    assert read().tolist() == [7.0] * 4
    assert not done.query()


@pytest.mark.gpu
@needs_gpu
def test_what_comes_to_the_host_is_whole_and_takes_the_same_memory_again():
    places = set()
    for number in range(8):
        first, second = torch.full((512, 512), float(number), device=GPU), torch.arange(3, device=GPU)
        one, two = to_host(first, second)
        assert (one == number).all()
        assert two.tolist() == [0, 1, 2]
        places.add(one.ctypes.data)
        del one
    assert len(places) < 8
