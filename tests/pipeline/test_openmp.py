"""Threads of OpenMP spin while they have cores, and sleep beside a busy process; nothing is left of either."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from xret.pipeline import openmp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what threads wait for")

# Operations with pauses, in which threads that spin take a processor's time: a few milliseconds after each.
SPINNING = """
import threading, time, torch
from xret.pipeline import openmp

torch.set_num_threads(2)
values = torch.zeros(1 << 17)

def spent():
    before = time.process_time()
    for _ in range(60):
        values.add_(1)
        time.sleep(0.002)
    return time.process_time() - before

ended, threads = threading.Event(), threading.active_count()
spent()
awake = spent()
sleeper = threading.Thread(target=openmp._sleep, args=(ended, IDLE, 60))
sleeper.start()
time.sleep(0.2)
asleep = spent()
ended.set()
sleeper.join()
again = spent()
assert threading.active_count() == threads
print(awake, asleep, again)
"""


def test_threads_sleep_for_a_while_and_spin_again():
    idle = str(max(1, len(os.sched_getaffinity(0)) - 1))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    words = [sys.executable, "-c", SPINNING.replace("IDLE", idle)]
    found = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    awake, asleep, again = map(float, found.split())
    assert asleep < 0.5 * awake, found
    assert asleep < 0.5 * again, found


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def slept(monkeypatch, share, seconds=0.4):
    """Return for how long threads slept, one after the other, if they lack a core for this share of the time."""
    pauses = []
    monkeypatch.setattr(openmp, "_lacked", lambda _: share * time.monotonic())
    monkeypatch.setattr(openmp, "_sleep", lambda _ended, _idle, pause: pauses.append(pause))
    with openmp.waiting_well():
        time.sleep(seconds)
    return pauses


def test_only_threads_without_a_core_sleep_and_for_longer_each_time(two_threads, monkeypatch):
    before = threading.active_count()
    assert slept(monkeypatch, 0.1) == []
    pauses = slept(monkeypatch, 1.0)
    assert len(pauses) > 2
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[-1]
    assert threading.active_count() == before


def test_a_single_thread_waits_for_none(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert slept(monkeypatch, 1.0, seconds=0.2) == []


def test_an_error_ends_it_and_one_within_another_does_nothing(two_threads):
    with pytest.raises(ZeroDivisionError), openmp.waiting_well(), openmp.waiting_well():
        1 / 0  # noqa: B018
    with openmp.waiting_well():
        assert openmp._watching.locked()
    assert not openmp._watching.locked()


def test_what_waits_for_a_core_is_counted():
    """One core for two threads that both want it: each of them lacks it for half of the time."""
    program = (
        "import os, threading, time; import numpy as np; from xret.pipeline import openmp\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "def busy():\n"
        "    end = time.monotonic() + 0.5\n"
        "    while time.monotonic() < end: pass\n"
        "other = os.fork()\n"
        "before = openmp._lacked(threading.get_native_id()); busy()\n"
        "if other: print(openmp._lacked(threading.get_native_id()) - before); os.waitpid(other, 0)\n"
        "else: os._exit(0)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert float(found) > 0.1
