"""What made a feature set: an encoder that can be loaded again, for queries and for fine-tuning."""

from dataclasses import dataclass, replace
from typing import Any

from ..errors import EncoderError
from ..store import FeatureSet
from ..store.create import fingerprint
from .base import TextEncoder, VisualEncoder
from .registry import is_own, load_text, load_visual
from .spec import EncoderSpec


@dataclass(frozen=True)
class Origin:
    """What made a feature set; without a `spec` it was imported."""

    name: str  # the set's
    kind: str  # of the features
    identity: dict[str, Any]  # of the encoder, with all that decides the features
    dtype: str  # that the features were rounded to
    spec: EncoderSpec | None

    @classmethod
    def of(cls, features: FeatureSet) -> "Origin":
        """Return the origin of a cached set."""
        facts = {key: getattr(features, key) for key in ("name", "kind", "identity", "dtype")}
        return cls.from_json({**facts, "spec": features.attributes.get("spec")})

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Origin":
        """Return what `to_json` gave; EncoderError or TypeError if it is something else."""
        spec = values.get("spec")
        return cls(**{**values, "spec": None if spec is None else EncoderSpec.from_json(spec)})

    def to_json(self) -> dict[str, Any]:
        """Return all that is known."""
        return {**vars(self), "spec": None if self.spec is None else self.spec.to_json()}

    def without_folders(self) -> "Origin":
        """Return what means something on other machines: of paths only the names."""
        return self if self.spec is None else replace(self, spec=self.spec.without_folders())

    @property
    def fingerprint(self) -> str:
        """The set's fingerprint."""
        return fingerprint(self.identity, self.dtype)

    def load_images(self, weights: str | None, device: str, trust: bool = False, **changes: Any) -> VisualEncoder:
        """Return the encoder that made an image set, whose `weights` may have moved; of views it makes the first.

        `changes` are other options of the spec, with which the features are others. EncoderError: the set was imported,
        its weights are missing, or these are others.
        """
        spec = replace(self._found(weights, "visual-weights", "pictures", trust), views=None, **changes)
        encoder = load_visual(spec, device)
        if not changes:
            self._require(encoder.identity, weights, "visual-weights")
        return encoder

    def load_captions(self, weights: str | None, device: str, trust: bool = False) -> TextEncoder:
        """Return the encoder that made a caption set of token states; arguments and errors as of `load_images`."""
        encoder = load_text(self._found(weights, "text-weights", "captions", trust), device)
        self._require(encoder.identity, weights, "text-weights")
        return encoder

    def _found(self, weights: str | None, named_by: str, what: str, trust: bool) -> EncoderSpec:
        """Return the spec with weights that are there; the option `named_by` gives another place, `what` is encoded."""
        if self.spec is None or self.kind == "words":
            raise EncoderError(
                f"'{self.name}' was imported, so xret has no encoder for new {what}; train on features of `xret"
                " extract`"
            )
        spec = self.spec if weights is None else self.spec.with_source(weights)
        if weights is None and spec.missing:
            raise EncoderError(
                f"'{self.name}' was made with the weights {spec.source}, which are not there; give their place as"
                f" --{named_by}"
            )
        if is_own(spec.name) and not trust:
            made = f"'{self.name}' was made by {spec.name}, a program of its own"
            raise EncoderError(f"{made}; to run it, give --trust")
        return replace(spec, trust=trust)

    def _require(self, identity: dict[str, Any], weights: str | None, named_by: str) -> None:
        ours = {key: value for key, value in self.identity.items() if key != "views"}
        if identity != ours:
            differing = sorted(key for key in {**ours, **identity} if identity.get(key) != ours.get(key))
            made = self.spec.source if self.spec is not None and self.spec.source else "the published ones"
            raise EncoderError(
                f"'{weights or made}' is not what '{self.name}' was made with (its {', '.join(differing)} differ); give"
                f" its own weights, {made}, as --{named_by}"
            )


def grid_side(identity: dict[str, Any]) -> int | None:
    """Return the side of a grid encoder's input, pixels; None where that is no such encoder."""
    preprocessing = identity.get("preprocessing")
    if not isinstance(preprocessing, dict):
        return None
    return next((preprocessing[key] for key in ("crop", "pad", "stretch") if key in preprocessing), None)
