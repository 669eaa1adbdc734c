"""What made a feature set, as the set says itself; weights count by their digest, whatever they were called."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..cache import FeatureSet, fingerprint
from ..encoders.base import Encoder
from ..errors import EncoderError


@dataclass(frozen=True)
class Origin:
    """What made a feature set."""

    name: str  # the set's
    kind: str  # of the features
    identity: dict[str, Any]  # of the encoder, with all that decides the features
    dtype: str  # that the features were rounded to
    weights: str | None  # how the weights were named, where that is known and means the same everywhere

    @classmethod
    def of(cls, features: FeatureSet) -> "Origin":
        """Return the origin of a cached set."""
        made = str(features.identity.get("weights", ""))
        asked = str((features.attributes.get("asked") or {}).get("weights"))
        weights = made if made.startswith("random:") else "imagenet" if asked == "imagenet" else None
        if features.identity.get("encoder") == "bert" and not asked.startswith("sha256:"):
            weights = "bert-base-uncased"  # of the hub's models only the revision is written down; this is the default
        return cls(features.name, features.kind, features.identity, features.dtype, weights)

    @property
    def fingerprint(self) -> str:
        """The set's fingerprint."""
        return fingerprint(self.identity, self.dtype)

    def weights_named(self, given: str | None, option: str) -> str:
        """Return the weights that were `given`, or those that made the set.

        Raises:
            EncoderError: they came from a file, which has to be given as `option`.
        """
        named = given or self.weights
        if named is not None:
            return named
        if self.identity.get("encoder") == "bert":
            place, advice = "folder", f"folder, or the model's hub id, as {option} HUB_ID|DIR"
        else:
            place, advice = "file", f"file as {option} FILE"
        raise EncoderError(f"'{self.name}' was made with weights from a {place}; give that {advice}")

    def require(self, encoder: Encoder, weights: str, option: str) -> None:
        """Raise EncoderError unless `encoder`, of `weights` that were given as `option`, makes such features.

        Of a set with several views it makes the first.
        """
        ours = {key: value for key, value in self.identity.items() if key != "views"}
        theirs = encoder.identity
        differing = sorted(key for key in ours if theirs.get(key) != ours[key])
        if differing or theirs.keys() - ours.keys():
            raise EncoderError(
                f"'{weights}' is not what '{self.name}' was made with (its {', '.join(differing) or 'options'} differ);"
                f" give those very weights as {option}"
            )


def grid_side(identity: dict[str, Any]) -> int | None:
    """Return the side of a grid encoder's input, pixels; None where that is no such encoder."""
    preprocessing = identity.get("preprocessing")
    if not isinstance(preprocessing, dict):
        return None
    return preprocessing.get("crop", preprocessing.get("stretch"))


def text_settings(identity: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `encoders.load_text` after the device that make a text encoder of this identity."""
    preprocessing, layer = identity["preprocessing"], identity["layer"]
    return {
        "layer": -1 if layer == "last_hidden_state" else int(layer.rpartition(".")[2]),
        "special_tokens": preprocessing.get("special_tokens", True),
        "max_tokens": preprocessing["max_length"],
    }


def extraction_words(encoders: Iterable[Encoder]) -> dict[str, Any]:
    """Return how an extraction names these encoders, weights apart, in the words of `options.Options`."""
    words: dict[str, Any] = {"visual": None, "text": None}
    for encoder in encoders:
        identity = encoder.identity
        if identity["encoder"] == "bert":
            settings = text_settings(identity)
            words |= {"text": "bert", "text_layer": settings.pop("layer"), **settings}
        else:
            words |= {"visual": identity["encoder"], "image_size": grid_side(identity)}
    return words
