"""Servers over a retriever that finds things without a model."""

import logging

import pytest
from small_server import FakeRetriever, Running, require_alive


@pytest.fixture
def running(tmp_path):
    """Start a server; whatever a test did to it, it still answers at the end."""
    it = Running(FakeRetriever(tmp_path))
    yield it
    it.retriever.gate.set()
    try:
        if not it.server.should_exit:
            require_alive(it)
    finally:
        it.end()


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    it = Running(FakeRetriever(tmp_path_factory.mktemp("lasting")))
    yield it
    it.end()


@pytest.fixture
def lasting(started, caplog):
    """Return a server that all hostile requests are sent to: it still answers after each, and none fills its log."""
    started.retriever.asked.clear()
    yield started
    require_alive(started)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
