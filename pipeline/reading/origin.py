"""What made a feature set, as the set says itself; weights count by their digest, whatever they were called."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE

from ..cache import FeatureSet, fingerprint
from ..encoders import HUB, LIBRARIES, sees_whole, turns_upright
from ..encoders.base import Encoder
from ..encoders.weights_source import WeightsSource
from ..errors import EncoderError

BERT = "bert-base-uncased"  # what ``bert`` means by default
_BERT_REVISION = "86b5e0934494bd15c9632b12f734a8a67f723594"  # of its model card's main branch


@dataclass(frozen=True)
class Origin:
    """What made a feature set."""

    name: str  # the set's
    kind: str  # of the features
    identity: dict[str, Any]  # of the encoder, with all that decides the features
    dtype: str  # that the features were rounded to
    weights: str | None  # how the weights were named, where that is known and means the same everywhere
    source: WeightsSource | None = None  # where they came from otherwise

    @classmethod
    def of(cls, features: FeatureSet) -> "Origin":
        """Return the origin of a cached set."""
        made = str(features.identity.get("weights", ""))
        words = features.attributes.get("asked") or {}
        asked, encoder = str(words.get("weights")), str(words.get("encoder"))
        weights = made if made.startswith("random:") else "imagenet" if asked == "imagenet" else None
        source = WeightsSource.from_json(features.attributes.get("source"))
        if features.identity.get("encoder") == "bert" and source is None:
            weights = _of_revision(asked.removeprefix("revision:"))  # all that earlier versions wrote down
        if encoder.startswith(HUB) and source is None:
            weights = encoder
        return cls(features.name, features.kind, features.identity, features.dtype, weights, source)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Origin":
        """Return what `to_json` gave; KeyError or TypeError where it is something else."""
        return cls(**{**values, "source": WeightsSource.from_json(values.get("source"))})

    def to_json(self) -> dict[str, Any]:
        """Return all that is known and means something on other machines."""
        source = None if self.source is None else replace(self.source, path=None).to_json()
        told = {key: value for key, value in vars(self).items() if key != "source"}
        return told if source is None else {**told, "source": source}

    @property
    def fingerprint(self) -> str:
        """The set's fingerprint."""
        return fingerprint(self.identity, self.dtype)

    @property
    def of_hub(self) -> bool:
        """Whether a checkpoint of transformers made the set, which ``hf:`` and its folder or hub id name."""
        return self.encoder == HUB.rstrip(":")

    @property
    def encoder(self) -> str:
        """What the encoder of the pictures or captions is called in `encoders.registry`; of frames, that of each."""
        return encoder_name(self.identity)

    def weights_named(self, given: str | None, option: str) -> str:
        """Return the weights that were `given`, or those that made the set.

        Raises:
            EncoderError: they came from a file, which is not there any more and has to be given as `option`.
        """
        named = given or self.weights
        if named is None and self.source is not None:
            named = self.source.find(self.name, option)
        if named is not None:
            return f"{HUB}{named.removeprefix(HUB)}" if self.of_hub else named
        if self.of_hub or self.identity.get("encoder") == "bert":
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
            what = f"its {', '.join(differing) or 'options'} differ"
            those = "those very weights" if self.source is None else str(self.source)
            raise EncoderError(
                f"'{weights}' is not what '{self.name}' was made with ({what}); give {those} as {option}"
            )


def _of_revision(revision: str) -> str | None:
    """Return the hub id of the BERT of this revision, where it is known or in the local cache of the hub."""
    if revision == _BERT_REVISION:
        return BERT
    found = [] if not revision.isalnum() else sorted(Path(HF_HUB_CACHE).glob(f"models--*/snapshots/{revision}"))
    return found[0].parents[1].name.removeprefix("models--").replace("--", "/") if found else None


def encoder_name(identity: dict[str, Any]) -> str:
    """Return how the command line names an encoder of this identity; of a checkpoint of transformers its beginning."""
    name = str(identity.get("encoder"))
    name = name.removesuffix("-frames") if "frames" in identity else name
    if f"{name}:" not in LIBRARIES:
        return name
    model, tag = (str(identity["model"].get(key, "")) for key in ("name", "tag"))
    return f"{name}:{model}" + (f"{'/' if name == 'open_clip' else '.'}{tag}" if tag else "")


def grid_side(identity: dict[str, Any]) -> int | None:
    """Return the side of a grid encoder's input, pixels; None where that is no such encoder."""
    preprocessing = identity.get("preprocessing")
    if not isinstance(preprocessing, dict):
        return None
    return next((preprocessing[key] for key in ("crop", "pad", "stretch") if key in preprocessing), None)


def hidden_layer(identity: dict[str, Any]) -> int:
    """Return which layer of a model of transformers, timm or open_clip gives the local features; -1: the last."""
    layer = str(identity.get("layer"))
    return int(layer.rpartition(".")[2]) if layer.startswith(("hidden_states.", "intermediates.")) else -1


def text_settings(identity: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `encoders.load_text` after the device that make a text encoder of this identity."""
    preprocessing = identity["preprocessing"]
    return {
        "layer": hidden_layer(identity),
        "special_tokens": preprocessing.get("special_tokens", True),
        "max_tokens": preprocessing["max_length"],
        "prompt": preprocessing.get("prompt"),
    }


def extraction_words(encoders: Iterable[Encoder]) -> dict[str, Any]:
    """Return how an extraction names these encoders, weights apart, in the words of `options.Options`."""
    words: dict[str, Any] = {"visual": None, "text": None}
    for encoder in encoders:
        identity = encoder.identity
        if identity["encoder"] != "words" and "tokenizer" in identity["preprocessing"]:
            settings = text_settings(identity)
            words |= {"text": encoder_name(identity), "text_layer": settings.pop("layer"), **settings}
        else:
            words |= {"visual": encoder_name(identity), "image_size": grid_side(identity)}
            if (layer := hidden_layer(identity)) != -1:
                words["visual_layer"] = layer
            if turns_upright(identity):
                words["upright"] = True
            if sees_whole(identity):
                words["whole"] = True
    return words
