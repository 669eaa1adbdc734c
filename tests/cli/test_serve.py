"""`xret serve` where it cannot begin; tests/heads/retrieval/test_serve.py has a server that runs."""

import os
import signal
import sys

import pytest
from click.testing import CliRunner

from xret.cli import main


@pytest.fixture(autouse=True)
def host_process(monkeypatch):
    """Put back what the command sets for its own process."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield
    signal.signal(signal.SIGTERM, handler)


def test_without_the_extra_it_is_named(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "xret.heads.retrieval.serve", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    result = CliRunner().invoke(main, ["serve", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.endswith("which is not installed: pip install 'xret[serve]'\n")


@pytest.mark.parametrize(("words", "code"), [(["none"], 1), (["none", "--port", "70000"], 2)])
def test_mistakes(tmp_path, words, code):
    result = CliRunner().invoke(main, ["serve", *words])
    assert result.exit_code == code
    assert "Traceback" not in result.stderr
