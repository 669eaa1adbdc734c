"""Benchmarks run with one command, in seconds where they are small."""

import json

import pytest
from benchmarks import pooling_study, retrieval_cost
from click.testing import CliRunner

from xret.heads.recipes.names import recipe_names

pytestmark = pytest.mark.usefixtures("one_thread")


def lines(module, *words):
    result = CliRunner().invoke(module.main, ["--small", *words])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_the_cost_of_retrieval():
    found = lines(retrieval_cost)
    macs = {line["recipe"]: line["macs"] for line in found if line["what"] == "query"}
    assert set(macs) == {name for name in recipe_names() if "/" not in name}
    assert (macs["vse-infty"], macs["setdiv"], macs["scan"]) == (16, 16 * 16, 36 * 12 * 16 + 36 * 36 * 12)
    assert [line["images"] for line in found if line["what"] == "grown"] == [10] * 3 + [20] * 3
    paper = {line["recipe"]: line["paper"] for line in found if line["what"] == "pairs"}
    assert paper == {"vse-infty": 159, "setdiv": 168, "scan": 198121}


def test_the_pooling_study():
    found = lines(pooling_study, "--json")
    assert {line["generator"] for line in found} == set(pooling_study.PAPER)
    assert {line["pattern"] for line in found} == set(pooling_study.PATTERNS)
    assert all(0 <= line["seen"] < 1 for line in found)
