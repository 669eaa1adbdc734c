"""Memory that was freed stays with the process for a while, and goes back at the end."""

import subprocess
import sys

import pytest

from xret.pipeline import memory
from xret.pipeline.memory import keeping_memory

# Takes and frees blocks of 40 MB on a thread that begins within; prints page faults with and without, and what stays.
BLOCKS = """
import resource, threading
from xret.pipeline.memory import keeping_memory

def faults():
    def work():
        for _ in range(20):
            block = bytearray(40_000_000)
            del block
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

with keeping_memory():
    kept, during = faults(), resident()
print(kept, faults(), during, resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there is glibc on Linux alone")
def test_blocks_are_taken_anew_without_new_pages_and_given_back_at_the_end():
    done = subprocess.run([sys.executable, "-c", BLOCKS], check=True, capture_output=True, text=True)
    kept, usual, during, afterwards = map(int, done.stdout.split())
    assert kept < usual / 4
    assert afterwards < during - 30_000_000


def test_another_libc_is_left_alone(monkeypatch):
    class Other:
        def __init__(self, _name):
            pass

    monkeypatch.setattr(memory.ctypes, "CDLL", Other)
    with keeping_memory():
        pass
