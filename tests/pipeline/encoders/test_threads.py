"""Threads share loaded encoders; only loading waits for those that encode."""

import threading

import pytest

from xret.pipeline.encoders.threads import Loaded, encoding, loading


def in_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_an_encoder_that_is_there_is_given_while_others_encode():
    loaded = Loaded(2)
    made = loaded.get("a", object)
    found = []
    with encoding("cpu"):
        thread = in_thread(lambda: found.append(loaded.get("a", object)))
        thread.join(20)
        assert found == [made]


def test_a_new_encoder_is_made_while_nobody_encodes():
    loaded = Loaded(2)
    found = []
    with encoding("cpu"):
        thread = in_thread(lambda: found.append(loaded.get("a", lambda: "new")))
        thread.join(0.2)
        assert found == []
    thread.join(20)
    assert found == ["new"]


def test_threads_that_want_the_same_encoder_at_once_load_it_once():
    loaded = Loaded(2)
    start = threading.Barrier(4)
    found = []

    def want():
        start.wait()
        found.append(loaded.get("a", object))

    threads = [in_thread(want) for _ in range(4)]
    for thread in threads:
        thread.join(20)
    assert len(found) == 4 and len(set(map(id, found))) == 1


def test_the_encoder_that_was_not_used_for_longest_goes():
    loaded = Loaded(2)
    first, second = loaded.get("a", object), loaded.get("b", object)
    assert loaded.get("a", object) is first
    loaded.get("c", object)
    assert loaded.get("a", object) is first
    assert loaded.get("b", object) is not second


def test_an_encoder_that_cannot_be_loaded_is_not_kept():
    loaded = Loaded(2)
    with pytest.raises(ZeroDivisionError):
        loaded.get("a", lambda: 1 / 0)
    assert loaded.get("a", lambda: "now") == "now"
    with loading():
        pass
