"""xret: cache frozen features once, train image-text retrieval heads in minutes.

    import xret
    from pathlib import Path

    retriever = xret.load("run", data_root="DIR")
    captions = retriever.encode_text(["two red cubes", "a disc"])   # [2, D]; [2, K, D] where embeddings are sets
    images = retriever.encode_images(["photo.jpg"])                 # [1, D]; [1, K, D]
    retriever.similarity(images, captions)                          # [1, 2]; larger is closer
    retriever.search("two red cubes", k=5)                          # five images of the store's test split
    retriever.search(Path("photo.jpg"), k=5)                        # five captions

Nothing heavy is imported before `load` is called.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from .heads.retrieval.retriever import Retriever

__all__ = ["load"]


def load(run: "str | Path", **options: Any) -> "Retriever":
    """Open a run, ready to embed and to search.

    Args:
        run: its folder, or a model of the Hugging Face hub, ``user/name``, that `heads.retrieval.hub.push` put there.
        options: of `heads.retrieval.retriever.Retriever`: ``store``, ``split``, ``device``, ``data_root``,
            ``visual_weights``, ``text_weights``, ``index``, ``trust``.

    Raises:
        RunError: there is no such run, or it is damaged.
    """
    from .heads.retrieval.hub import local_folder
    from .heads.retrieval.retriever import Retriever

    return Retriever(local_folder(run), **options)
