"""Feature sets of a cache: one encoder's features of the images or of the captions."""

from abc import ABC, abstractmethod
from functools import cached_property, partial
from math import isqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.digests import BYTES
from ..data.regions import REGION_ARRAYS
from ..errors import CacheError
from .blocks import Blocks, caption_array_rows
from .rows import Rows
from .rules import require_set
from .storage.seals import files_of, seal, seals

if TYPE_CHECKING:
    from .feature_cache import FeatureCache

OK, FAILED, NOT_DONE = 0, 1, 255  # the status of a sample
FEATURES = ("local", "global")  # arrays that hold nearly all bytes
MARKS = ("seal", "done")  # arrays that say something of a shard, and not of its samples
BETWEEN_REASONS = "\x1f"  # of the captions of one image, each of which is printable


class FeatureSet(ABC):
    """What image and caption sets share; `name` is the encoder's, ``@`` and the first 8 digits of the fingerprint."""

    modality: str  # ``images`` or ``captions``

    def __init__(self, cache: "FeatureCache", name: str) -> None:
        self.cache, self.name = cache, name
        self.path = f"{self.modality}/{name}"
        self.attributes = cache.store.read_group(self.path)
        require_set(cache.url, self.modality, self.path, self.attributes)
        self.kind: str = self.attributes["kind"]  # one of `rules.KINDS`
        self.fingerprint: str = self.attributes["fingerprint"]  # SHA-256 of what decides the features
        self.identity: dict[str, Any] = self.attributes["identity"]  # the same, readable
        self.dtype: str = self.attributes["dtype"]  # ``float16`` or ``float32``; ``int32`` for words
        self.channels: int | None = self.attributes["channels"]  # width of a local row; None without
        self.global_channels: int | None = self.attributes["global_channels"]  # of the global feature; None for words
        # Sets of images and of captions with the same one have global features in one joint space; None: no other has.
        self.space: str | None = self.attributes.get("space")
        # {id of the image: reason} of what could not be read; of several of its captions one reason after the other.
        self.failed: dict[str, str] = self.attributes["failed"]
        self.blocks = Blocks(self.attributes["shard_images"], cache.splits)
        self._rows: dict[str, Rows] = {}
        self._fitting: set[str] = set()  # the arrays that were found to be as the attributes say

    @property
    def failures(self) -> list[tuple[str, str]]:
        """Of each sample that could not be read the id of its image, and the reason."""
        return [(key, reason) for key, reasons in self.failed.items() for reason in reasons.split(BETWEEN_REASONS)]

    @property
    @abstractmethod
    def _at(self) -> np.ndarray:
        """Row in this set's arrays of each row of the samples, int64."""

    @cached_property
    def status(self) -> np.ndarray:
        """Of each sample, u8: 0 ok, 1 failed, 255 not done."""
        return self.of_samples("status")

    @cached_property
    def length(self) -> np.ndarray:
        """Valid local rows, or tokens, of each sample, i32."""
        return self.of_samples("length")

    def done(self) -> np.ndarray:
        """Return which shards are finished, bool [shards]."""
        self._require_fitting("done")
        done: np.ndarray = self.cache.store.read_array(f"{self.path}/done") == 1
        return done

    def complete(self, split: str) -> bool:
        """Return whether every shard of `split` is finished."""
        return bool(self.done()[self.blocks.of_split(split)].all())

    @abstractmethod
    def rows_in(self, shard: int) -> tuple[int, int]:
        """Return the rows of samples [first, last) of a shard."""

    def samples_in(self, shard: int) -> int:
        """Return how many samples the shard holds."""
        first, last = self.rows_in(shard)
        return last - first

    def array_names(self) -> list[str]:
        """Return the names of this set's arrays, without `MARKS`."""
        return [name for name in self.attributes["arrays"] if name not in MARKS]

    def sealed(self, name: str, shard: int) -> list[int] | None:
        """Return what `seals` gave when this shard of an array was written; None: by an earlier version."""
        if "seal" not in self.attributes["arrays"]:
            return None
        if not self._seals[shard].any():  # it may have been written since
            del self._seals
        files, number = self._files(), self.array_names().index(name)
        first = sum(files[:number])
        found: list[int] = self._seals[shard, first : first + files[number]].tolist()
        return found

    def _files(self) -> list[int]:
        """Return how many files a shard of each array has."""
        views = self.attributes.get("views", 1)
        return [views if name in FEATURES else 1 for name in self.array_names()]

    @cached_property
    def _seals(self) -> np.ndarray:
        self._require_fitting("seal")
        return self.cache.store.read_array(f"{self.path}/seal")

    def write(self, shard: int, arrays: dict[str, np.ndarray], shared: "tuple[FeatureSet, int] | None" = None) -> None:
        """Write all arrays of a shard, and seal them; then it may be marked as done.

        Args:
            shard: which.
            arrays: their values by name.
            shared: an equal set and a shard of its, whose files become those of `FEATURES` here.

        Raises:
            CacheError: what is to be shared is lost or damaged.
        """
        store, found = self.cache.store, []
        for name in self.array_names():
            if shared is not None and name in FEATURES:
                found += self._share(name, shard, *shared)
                continue
            store.write_shard(f"{self.path}/{name}", shard, arrays[name])
            found += seals(store.open_array(f"{self.path}/{name}"), shard, arrays[name])
        if "seal" in self.attributes["arrays"]:
            store.write_shard(f"{self.path}/seal", shard, np.array([found], dtype=np.uint32))

    def _share(self, name: str, shard: int, there: "FeatureSet", number: int) -> list[int]:
        """Link the files of one shard of an array to those of another set's, or copy them; return their seals."""
        found = there.sealed(name, number) if number == shard and not there.cache.store.is_local else None
        if found is None:  # of an object store a whole shard would be fetched
            checksums = there._rows_of(name).checksums(number)
            found = [seal(name, shard, view, of_view) for view, of_view in enumerate(checksums)]
        array, other = (one.cache.store.open_array(f"{one.path}/{name}") for one in (self, there))
        for own, source in zip(files_of(array, shard), files_of(other, number), strict=True):
            self.cache.store.link(own, there.cache.store, source)
        return found

    def blank_shard(self) -> dict[str, np.ndarray]:
        """Return the arrays of a shard, by name, as they are before anything is written."""
        for name in self.array_names():
            self._require_fitting(name)
        arrays = {name: self.cache.store.open_array(f"{self.path}/{name}") for name in self.array_names()}
        return {
            name: np.full(((array.shards or array.chunks)[0], *array.shape[1:]), array.fill_value, array.dtype)
            for name, array in arrays.items()
        }

    def of_samples(self, name: str) -> np.ndarray:
        """Return the value of each sample in an array; Zarr would make up the values of a lost file."""
        done = self.done()  # before the values, which another process writes before it marks them
        marked, there = (self.cache.store.names(f"{self.path}/{array}/c") for array in ("done", name))
        if lost := set(marked) - set(there):
            raise CacheError(
                f"{self.cache.url}: '{self.path}/{name}' has lost shard {min(map(int, lost))}; run `xret cache verify`,"
                " then the extraction again with --repair"
            )
        self._require_fitting(name)
        whole = self.cache.store.read_array(f"{self.path}/{name}")
        array, rows = self.cache.store.open_array(f"{self.path}/{name}"), len(whole) // len(self.blocks)
        for shard in np.flatnonzero(done).tolist():
            sealed, of_shard = self.sealed(name, shard), whole[shard * rows : (shard + 1) * rows]
            if sealed is not None and seals(array, shard, of_shard) != sealed:
                raise CacheError(
                    f"{self.cache.url}: shard {shard} of '{self.path}/{name}' is not what was written there;"
                    " `xret cache verify` lists what is affected"
                )
            if name == "length" and not self._fits(of_shard):
                raise CacheError(
                    f"{self.cache.url}: shard {shard} of '{self.path}/length' tells of rows that are not there; get"
                    " that store anew"
                )
        values: np.ndarray = whole[self._at]
        return values

    @abstractmethod
    def _fits(self, lengths: np.ndarray) -> bool:
        """Return whether a shard has as many rows as its samples' lengths say."""

    @abstractmethod
    def _layout(self, name: str) -> tuple[int, tuple[int, ...]]:
        """Return how many rows of an array a shard has, and the shape of a row."""

    def _require_fitting(self, name: str) -> None:
        """Raise CacheError if an array is not as the attributes say; only then it is read, and memory made for it."""
        if name in self._fitting:
            return
        array = self.cache.store.open_array(f"{self.path}/{name}")
        rows, row = {"done": (1, ()), "seal": (1, (sum(self._files()),))}.get(name) or self._layout(name)
        shape, dtype = (len(self.blocks) * rows, *row), _DTYPES.get(name, self.dtype)
        if array.shape != shape or array.dtype != np.dtype(dtype) or (array.shards or array.chunks)[0] != rows:
            raise CacheError(
                f"{self.cache.url}: {self.path}/{name}/zarr.json is damaged: it tells of {array.dtype} {array.shape},"
                f" and its set of {dtype} {shape}; remove the set with `xret cache rm` and extract it again"
            )
        self._fitting.add(name)

    def _gather(self, name: str, first: np.ndarray, count: np.ndarray | int = 1) -> np.ndarray:
        return self._rows_of(name).gather(first, count)

    def _rows_of(self, name: str) -> Rows:
        if name not in self._rows:
            self._require_fitting(name)
            views = self.attributes.get("views", 1) if name in FEATURES else 1
            self._rows[name] = Rows(self.cache.store, f"{self.path}/{name}", views, partial(self.sealed, name))
        return self._rows[name]


class ImageSet(FeatureSet):
    """Image features of one encoder. Rows are image rows of the samples."""

    modality = "images"

    def __init__(self, cache: "FeatureCache", name: str) -> None:
        super().__init__(cache, name)
        self.rows: int = self.attributes["rows"]  # local rows of an image, N; the most, where they vary
        self.views: int = self.attributes.get("views", 1)  # of an image; the first is the image as it is

    @cached_property
    def cells(self) -> tuple[int, int] | None:
        """Height and width of the encoder's own map, whose cells those of `grid` average; None: not known, or the same.

        Sets of earlier versions do not say so.
        """
        stored = self.attributes.get("cells")
        return None if stored is None else (int(stored[0]), int(stored[1]))

    @cached_property
    def grid(self) -> tuple[int, int] | None:
        """Height and width, in cells, of the grid that the rows fill row by row; None where they fill none.

        A set that does not say so was made when every grid was square.
        """
        if (stored := self.attributes.get("grid")) is not None:
            return int(stored[0]), int(stored[1])
        side = isqrt(self.rows)
        return (side, side) if self.kind == "grid" and side * side == self.rows else None

    @cached_property
    def _at(self) -> np.ndarray:
        return self.blocks.array_rows(np.arange(self.cache.images))

    def _fits(self, lengths: np.ndarray) -> bool:
        return bool(((lengths >= 0) & (lengths <= self.rows)).all())

    def _layout(self, name: str) -> tuple[int, tuple[int, ...]]:
        views = (self.views,) if self.views > 1 else ()
        local, global_ = (*views, self.rows, self.channels or 0), (*views, self.global_channels or 0)
        rows = {key: (self.rows, *shape) for key, (shape, _, _) in REGION_ARRAYS.items()}
        return self.blocks.length, {"local": local, "global": global_, "size": (2,), "digest": (BYTES,), **rows}.get(
            name, ()
        )

    def rows_in(self, shard: int) -> tuple[int, int]:
        """Return the image rows [first, last) of a shard."""
        return self.blocks.images(shard)

    def rows_of(self, split: str) -> slice:
        """Return the image rows of a split."""
        return slice(*self.cache.splits[split])

    def local(self, rows: np.ndarray, view: np.ndarray | int = 0) -> np.ndarray:
        """Return the local features [B,N,C] of these image rows, in one view or each in its own [B]."""
        return self._rows_of("local").gather(self._at[rows], view=view)

    def global_(self, rows: np.ndarray, view: np.ndarray | int = 0) -> np.ndarray:
        """Return the global features [B,C] of these image rows, in one view or each in its own [B]."""
        return self._rows_of("global").gather(self._at[rows], view=view)

    def array(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return an array of these image rows.

        ``length`` [B], ``size`` [B,2], ``digest`` [B,16], or of regions ``boxes`` [B,N,4], ``classes`` or ``scores``
        [B,N]. Of several views features are those of all, ``local`` [B,V,N,C].

        Raises:
            CacheError: the set has no such array, or a size is negative.
        """
        if self.views > 1 and name in FEATURES:
            return np.stack([self._rows_of(name).gather(self._at[rows], view=v) for v in range(self.views)], axis=1)
        found: np.ndarray = self.length[rows] if name == "length" else self._gather(name, self._at[rows])
        if name == "size" and (found < 0).any():
            raise CacheError(f"{self.cache.url}: '{self.path}/size' has negative sizes; get that store anew")
        return found


class CaptionSet(FeatureSet):
    """Caption features of one encoder, packed. Rows are caption rows of the samples."""

    modality = "captions"

    def __init__(self, cache: "FeatureCache", name: str) -> None:
        super().__init__(cache, name)
        words = self.attributes.get("vocabulary")  # by token id; of a ``words`` set only
        self.vocabulary: tuple[str, ...] | None = None if words is None else tuple(words)

    @cached_property
    def _at(self) -> np.ndarray:
        return caption_array_rows(self.cache, self.blocks, self.attributes["shard_captions"])

    def _fits(self, lengths: np.ndarray) -> bool:  # packed, so that no row belongs to two captions
        return bool(lengths.min() >= 0 and lengths.sum(dtype=np.int64) <= self.attributes["shard_tokens"])

    def _layout(self, name: str) -> tuple[int, tuple[int, ...]]:
        rows = self.attributes["shard_tokens" if name in ("token", "local") else "shard_captions"]
        return rows, {"local": (self.channels or 0,), "global": (self.global_channels or 0,)}.get(name, ())

    @cached_property
    def _start(self) -> np.ndarray:
        return self.of_samples("start")

    def rows_in(self, shard: int) -> tuple[int, int]:
        """Return the caption rows [first, last) of a shard."""
        return self.cache.captions_of(*self.blocks.images(shard))

    def rows_of(self, split: str) -> slice:
        """Return the caption rows of a split."""
        return slice(*self.cache.captions_of(*self.cache.splits[split]))

    def local(self, rows: np.ndarray) -> np.ndarray:
        """Return the token features of these caption rows, packed [sum of lengths, C]."""
        return self._gather("local", self._start[rows], self.length[rows])

    def global_(self, rows: np.ndarray) -> np.ndarray:
        """Return the global features [B,C] of these caption rows."""
        return self._gather("global", self._at[rows])

    def token(self, rows: np.ndarray) -> np.ndarray:
        """Return the token ids of these caption rows, packed int32 [sum of lengths]."""
        found = self._gather("token", self._start[rows], self.length[rows])
        if self.vocabulary is not None and len(found) and not 0 <= found.min() <= found.max() < len(self.vocabulary):
            raise CacheError(
                f"{self.cache.url}: '{self.path}/token' has words beyond its vocabulary; get that store anew"
            )
        return found


_DTYPES = {
    "done": "uint8",
    "seal": "uint32",
    "status": "uint8",
    "digest": "uint8",
    "size": "int32",
    "length": "int32",
    "start": "int64",
    "token": "int32",
} | {name: dtype for name, (_, dtype, _) in REGION_ARRAYS.items()}
