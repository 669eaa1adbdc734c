"""Features of another store that need not be computed again: of the same pictures and captions, by the same encoder."""

import logging

import numpy as np

from ..data.texts import ranges
from ..store import OK, CaptionSet, FeatureCache, FeatureSet, ImageSet

log = logging.getLogger("xret")


class Reusable:
    """The rows of the set of the same fingerprint in another store.

    A picture is the same where its file has the same bytes, and where views are drawn by its id, also the same id; a
    caption, where its text is the same.
    """

    def __init__(self, url: str, features: FeatureSet) -> None:
        cache = FeatureCache.open(url)
        sets = map(cache.set_at, cache.set_paths(features.modality))
        self.found = next((other for other in sets if other.fingerprint == features.fingerprint), None)
        self._rows: dict[bytes | str, int] = {}
        if self.found is None:
            log.warning("%s has no set of the same fingerprint as '%s': nothing is reused", url, features.path)
            return
        good = np.flatnonzero(self.found.status == OK)
        if isinstance(self.found, ImageSet):
            digests = map(bytes, self.found.array("digest", good))
            ids = cache.ids(0, cache.images)
            self._rows = {self._key(one, ids[row]): row for one, row in zip(digests, good.tolist(), strict=True)}
        else:
            texts = cache.caption_texts(0, cache.captions)
            self._rows = {texts[row]: row for row in good.tolist()}

    def _key(self, digest: bytes, key: str) -> bytes:
        views = isinstance(self.found, ImageSet) and self.found.views > 1
        return digest + key.encode() if views else digest

    def has_image(self, digest: bytes, key: str) -> bool:
        """Return whether there are features of a picture, by the digest of its file and its id."""
        return self._key(digest, key) in self._rows

    def copy_image(self, arrays: dict[str, np.ndarray], at: int, digest: bytes, key: str) -> None:
        """Copy a picture's features into a row of a chunk's arrays."""
        assert isinstance(self.found, ImageSet)
        row = np.array([self._rows[self._key(digest, key)]])
        for name in arrays:
            if name not in ("status", "digest", "stamp"):
                arrays[name][at] = self.found.array(name, row)[0]
        arrays["status"][at] = OK

    def copy_captions(
        self, arrays: dict[str, np.ndarray], texts: list[str], starts: np.ndarray, lengths: np.ndarray
    ) -> np.ndarray:
        """Copy the features of those of a chunk's captions that are there; return the rows of the others."""
        there = np.array([self._rows.get(text, -1) for text in texts])
        rows = np.flatnonzero(there >= 0)
        if len(rows) and isinstance(self.found, CaptionSet):
            arrays["local"][ranges(starts[rows], lengths[rows])] = self.found.local(there[rows])
            arrays["global"][rows] = self.found.global_(there[rows])
        return np.flatnonzero(there < 0)
