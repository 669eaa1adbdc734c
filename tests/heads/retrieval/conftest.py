"""Pictures with stores and runs on them, which the tests of this folder share; each is made when it is first used."""

import pytest
from small_bert import save_bert
from small_runs import make_pictures, make_run, make_store


class Made:
    """A `folder` with ``pictures``, a small ``bert``, the stores ``words.zarr`` and ``tokens.zarr``, and runs."""

    def __init__(self, folder):
        self.folder, self.pictures = folder, folder / "pictures"
        self.manifest = make_pictures(self.pictures)
        self.images = self.pictures / "images"

    def store(self, text="words"):
        """Return the URL of the store of words, or of a BERT's tokens."""
        out = self.folder / f"{text}.zarr"
        if not out.exists():
            options = {"text": "bert", "text_weights": str(save_bert(self.folder / "bert"))} if text == "tokens" else {}
            make_store(self.manifest, out, **options)
        return str(out)

    def run(self, recipe="vsepp", text="words"):
        """Return the run of a recipe on a store."""
        out = self.folder / f"{recipe}-{text}"
        return out if out.exists() else make_run(self.store(text), out, recipe)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("retrieval"))
