"""Where the weights of an encoder came from: recorded with a feature set, so that they are found again.

It is no part of what decides the features: equal weights make equal sets, wherever they lie.
"""

import hashlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import EncoderError


@dataclass(frozen=True)
class WeightsSource:
    """Where weights came from.

    Attributes:
        id: of the Hugging Face hub, such as ``sentence-transformers/all-MiniLM-L6-v2@COMMIT``; None: a file or folder.
        file: the name of that file or folder.
        sha256: its content's, see `sha256_of`.
        path: where it was, absolute; None: that means nothing here.
    """

    id: str | None = None
    file: str | None = None
    sha256: str | None = None
    path: str | None = None

    @classmethod
    def of(cls, weights: str, resolved: str | None) -> "WeightsSource":
        """Return the source of weights that are called so: a path, or a hub id.

        Args:
            weights: the name.
            resolved: ``sha256:…`` of a file or folder, where it is known.
        """
        path = Path(weights)
        if not path.exists():
            return cls(id=weights)
        known = resolved is not None and resolved.startswith("sha256:")
        sha256 = str(resolved).removeprefix("sha256:") if known else sha256_of(path)
        return cls(None, path.name, sha256, str(path.resolve()))

    @classmethod
    def from_json(cls, value: Any) -> "WeightsSource | None":
        """Return what `to_json` gave; None where a stranger's file says something else, or an earlier version nothing.

        What is read there is never run. A file has to have the recorded SHA-256, see `find`; what a folder holds is
        compared when it is loaded.
        """
        keys = {"id", "file", "sha256", "path"}
        fits = isinstance(value, dict) and value.keys() <= keys and all(isinstance(one, str) for one in value.values())
        return cls(**value) if fits else None

    def to_json(self) -> dict[str, str]:
        """Return what is known."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def find(self, name: str, option: str) -> str:
        """Return the hub id, or the path of the file where that is still the same, or of the folder.

        What a folder holds beside the weights is no matter, so that they are compared when they are loaded.

        Args:
            name: of the feature set that the weights made.
            option: by which they can be given.

        Raises:
            EncoderError: it is gone, or another file by now.
        """
        if self.id is not None:
            return self.id
        what, advice = f"'{name}' was made with {self}", f"give its place as {option}"
        if self.path is None:
            raise EncoderError(f"{what}; {advice}")
        path = Path(self.path)
        if not path.exists():
            raise EncoderError(f"{what}, which is no longer at {path}; {advice}")
        try:
            same = path.is_dir() or sha256_of(path) == self.sha256
        except OSError as error:
            raise EncoderError(f"{what}, and {path} cannot be read ({error.strerror}); {advice}") from error
        if not same:
            raise EncoderError(f"{what}, and {path} is another one by now; {advice}")
        return self.path

    def __str__(self) -> str:
        return self.id or f"{self.file} (SHA-256 {(self.sha256 or '')[:8]}…)"


def short_name(weights: str) -> str:
    """Return the last part of a model id or of a folder's path, as a set's name may begin with it.

    Of a backbone that was fine-tuned, that is the run's and the side's.
    """
    path = Path(weights)
    last = path.resolve().name if path.is_dir() or path.is_absolute() else weights.partition("@")[0].rpartition("/")[2]
    if last.endswith("_backbone"):
        last = f"{path.resolve().parent.name}-{last.removesuffix('_backbone')}"
    return re.sub(r"[^\w.-]+", "-", last, flags=re.ASCII).strip(".-") or "hf"


def sha256_of(path: Path, *, flat: bool = False) -> str:
    """Return the SHA-256 of a file, or of the names, sizes and contents of the files in a folder.

    `flat`: without those in folders of its own.
    """
    if path.is_file():
        files = [path]
    else:
        files = sorted(one for one in (path.iterdir() if flat else path.rglob("*")) if one.is_file())
    digest = hashlib.sha256()
    for file in files:
        if len(files) > 1:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()
