"""The server asked by clients of others, and a tuning read by Optuna's command."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from foreign import needed, node, of_others
from small_store import make_store
from small_tunings import tuned

from xret.heads.retrieval.retriever import Retriever

pytestmark = of_others
JAVASCRIPT = """
import {Client} from "@gradio/client";
const [address, text] = process.argv.slice(2);
const client = await Client.connect(address);
const {data} = await client.predict("/search_text", {text, k: 5});
console.log(JSON.stringify(data[1]));
process.exit(0);
"""


@pytest.fixture(scope="module")
def address(made):
    needed("gradio")
    words = [sys.executable, "-m", "xret.cli", "serve", str(made.run()), "--data-root", str(made.pictures)]
    with subprocess.Popen([*words, "--device", "cpu"], text=True, stdout=subprocess.PIPE) as server:
        yield server.stdout.readline().split()[-1]
        server.terminate()


def python(address, text):
    return needed("gradio_client").Client(address, verbose=False).predict(text, 5, api_name="/search_text")[1]


@pytest.mark.parametrize("ask", [python, lambda *words: node(JAVASCRIPT, *words)], ids=["python", "javascript"])
def test_clients_of_gradio_get_the_answers(made, address, ask):
    hits = ask(address, "grey beside red")
    expected = [hit.to_dict() for hit in Retriever(made.run(), device="cpu").search("grey beside red", 5)]
    assert [hit["id"] for hit in hits] == [hit["id"] for hit in expected]
    assert [hit["score"] for hit in hits] == pytest.approx([hit["score"] for hit in expected], abs=1e-5)


def test_optuna_names_the_best_trial(tmp_path):
    needed("optuna")
    found = tuned(make_store(tmp_path / "s.zarr"), tmp_path / "tuned", trials=2)
    program = Path(sys.executable).with_name("optuna")
    command = [program if program.exists() else shutil.which("optuna"), "best-trial", "--study-name", "tuning"]
    command += ["--storage", tmp_path / "tuned/journal.log", "--storage-class", "JournalFileStorage", "-f", "json"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    named = json.loads(done.stdout)
    assert (named["number"], float(named["value"])) == (found.best.number, pytest.approx(found.best.rsum))
