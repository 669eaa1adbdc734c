"""Fixtures that more than one folder of tests uses."""

import errno
import gc
import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

# Several processes with as many threads as cores stand in each other's way; whoever is started has it, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from PIL import Image

GOLDEN = Path(__file__).with_name("golden")
SHARED = Path(__file__).resolve().parents[2] / "shared"

# Hundreds of thousands of files come and go; in memory, a sixth of the time is saved that a disk's tables would take.
with suppress(FileNotFoundError):
    if shutil.disk_usage("/dev/shm").free > 4 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

# Tests are compiled once for all processes and runs, also where the environment writes no bytecode.
sys.dont_write_bytecode = False
# Looking for garbage takes a twentieth of the time at Python's own threshold.
gc.set_threshold(100_000)

# The first example of a test warms its libraries up, and other programs may want the processor.
settings.register_profile("xret", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("xret")


def pytest_collection_finish():
    """Let the search for garbage pass over what imports have made, which stays as long as the process."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def unsynced():
    """Let nothing wait for the disk: a store of a moment has hundreds of files, and no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory):
    """Let what is noted of code that was trained with here lie where no user's own notes are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def stores_made_once(tmp_path_factory):
    """Let small stores be copied, in an eighth of the time that it takes to make one."""
    import small_store

    small_store.made_once = tmp_path_factory.mktemp("stores")


@pytest.fixture
def lockless(monkeypatch, caplog):
    """Let no file system have locks; calling it gives the notes of that."""

    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    monkeypatch.setattr("xret.pipeline.files._without_locks", set())
    return lambda: [one for one in caplog.messages if "No locks available" in one]


@pytest.fixture
def golden():
    """Load a file of recorded reference values: `golden("similarity")` gives a mapping of arrays."""

    def load(name: str):
        with np.load(GOLDEN / f"{name}.npz") as file:
            return dict(file)

    return load


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Train a small head, once: `trained("setdiv", "model.dim=8")` gives its run, beside its store `small.zarr`."""
    from small_store import make_store
    from small_trainings import recipe_of

    from xret.heads.training.train import train

    folder = tmp_path_factory.mktemp("trained")
    store = make_store(folder / "small.zarr")

    def run(name="vsepp", *settings):
        out = folder / "-".join((name, *settings))
        if not out.exists():
            train(store, recipe_of(name, 2, *settings), out, device="cpu")
        return out

    return run


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Pictures with stores and runs on them; each is made when it is first used."""
    from small_runs import Made

    return Made(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def chromium():
    """A headless Chromium that asks nobody anything by itself; for tests marked `browser`.

    Ends with its module: as long as it runs, playwright keeps an event loop in this thread.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("there is no Chromium here")
    quiet = ("quic", "background-networking", "component-update", "sync")
    words = ["--no-sandbox", "--disable-gpu", "--no-first-run", *(f"--disable-{what}" for what in quiet)]
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=words)
        yield browser
        browser.close()


@pytest.fixture
def shared_data():
    """Return a path below the folder of real photographs, captions and weights."""

    def find(name: str) -> Path:
        path = SHARED / "data" / name
        if not path.exists():
            pytest.skip(f"the real data is not here: {path} is absent")
        return path

    return find


@pytest.fixture
def tiny_dataset(tmp_path):
    """Make a data set of small random pictures: `tiny_dataset(train=20, val=6, test=6)` gives its manifest's path."""

    def make(name: str = "tiny", folder: Path | None = None, **splits: int) -> Path:
        folder = folder or tmp_path / name
        (folder / "images").mkdir(parents=True)
        rng = np.random.default_rng(0)
        images = []
        for split, count in (splits or {"train": 20, "val": 6, "test": 6}).items():
            for _ in range(count):
                number = len(images)
                pixels = rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "images" / f"{number}.jpg")
                sentences = [
                    {"raw": f"a picture of thing {number} number {k}", "sentid": 10 * number + k}
                    for k in range(2 + number % 2)
                ]
                images.append({"filename": f"{number}.jpg", "imgid": number, "split": split, "sentences": sentences})
        (folder / "captions.json").write_text(json.dumps({"dataset": name, "images": images}))
        manifest = folder / f"{name}.yaml"
        manifest.write_text(f"name: {name}\nimages: images\ncaptions: captions.json\n")
        return manifest

    return make
