"""Which class makes an encoder. An encoder is loaded once and shared by the threads of a process."""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ..errors import EncoderError
from .base import TextEncoder, VisualEncoder, made_upright, made_whole, require_cut
from .own import make_own
from .threads import Loaded

# By name the class that encodes images. `HUB` and a folder or model id name a checkpoint of transformers, one of
# `LIBRARIES` and a name a model of that library; any other name is a network of torchvision's.
_REGIONS = {
    "butd": ".detectors.butd:ButdEncoder",
    "fasterrcnn_resnet50_fpn_v2": ".detectors.torchvision_detector:DetectorEncoder",
}
_GRIDS = {"butd-grid": ".detectors.butd:ButdGridEncoder"}
HUB = "hf:"
OPEN_CLIP = "open_clip:"
_OF_LIBRARIES = {"timm:": ".libraries.timm_images:TimmEncoder", OPEN_CLIP: ".libraries.clip_images:ClipImageEncoder"}
LIBRARIES = tuple(_OF_LIBRARIES)
REGION_ENCODERS = tuple(_REGIONS)
IMAGE_SIZE = 224  # side of the square input of grids that have none of their own, pixels
KEPT = 2  # encoders of images, and of texts, that stay loaded when nobody has them: tasks of one or two sets take turns
_images, _texts = Loaded[VisualEncoder](KEPT), Loaded[TextEncoder](KEPT)
AUGMENTATIONS = ("crop-flip", "dihedral")  # that make further views of a picture; see `views`


def is_own(name: str) -> bool:
    """Return whether the name of an image encoder is the import path of a user's own class."""
    return ":" in name and not name.startswith((HUB, *LIBRARIES))


def load_visual(
    name: str,
    weights: str,
    image_size: int | None,
    device: str,
    *,
    layer: int = -1,
    half: bool = True,
    whole: bool = False,
    regions: tuple[int, int] | None = None,
    frames: int | None = None,
    views: int = 1,
    augment: str | None = None,
    pool: tuple[int, int] | None = None,
    upright: bool = True,
    trust: bool = False,
) -> VisualEncoder:
    """Return the image encoder `name`; the same arguments give the same network again, unless files were replaced.

    Args:
        name: any torchvision classification network, ``butd``, ``butd-grid`` or ``fasterrcnn_resnet50_fpn_v2``; or
            ``hf:`` and the hub id or folder of an image model of transformers; or ``timm:NAME[.TAG]``; or
            ``open_clip:ARCH[/TAG]``; or the import path of a class, ``my_module:MyEncoder``, see `own.make_own`.
        weights: ``imagenet``, a file, or ``random:SEED``; nothing else but ``imagenet`` beside ``hf:``. Of a library's
            model ``imagenet`` are those of its tag.
        image_size: side of the square input, pixels; None: a model's own, of torchvision 224. Region encoders have
            sizes of their own.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        layer: which gives the local features, of `HUB` and `LIBRARIES`; -1: the last.
        half: let a GPU compute in bfloat16, of `HUB` and `LIBRARIES`.
        whole: make the square of the whole picture, of grids that cut out its middle.
        regions: fewest and most boxes of an image, for region encoders; None: 36.
        frames: an image is a folder of frames, of which this many are taken; None: it is a picture.
        views: of each picture; with more than one the encoder is a `views.ViewsEncoder`.
        augment: which of `AUGMENTATIONS` makes the views after the first.
        pool: height and width in cells of the windows in which a grid is averaged; None: it is not.
        upright: apply EXIF orientations, as earlier versions did not; an encoder of one's own decides that itself.
        trust: let a file of weights run code while it is read.

    Raises:
        EncoderError: the name is unknown, the weights do not fit, or an option is not for this encoder.
    """
    _require_views(name, frames, views, augment)
    _require_fitting(name, weights, layer, whole, regions, frames, pool)
    size = (regions or (36, 36)) if name in REGION_ENCODERS else image_size
    state = _state(name.removeprefix(HUB) if name.startswith(HUB) else weights)
    encoder: Any = _visual(name, weights, size, device, frames, trust, state, layer, half, upright, whole)
    if augment is not None and not hasattr(encoder, "prepare"):
        raise EncoderError(f"--views needs of '{name}' a method `prepare` that takes a picture to pixels; leave it out")
    if pool is not None:
        from .wrappers.pool import PoolEncoder

        encoder = PoolEncoder(encoder, pool)
    if augment is not None:
        from .wrappers.views import ViewsEncoder

        encoder = ViewsEncoder(encoder, views, augment)
    made: VisualEncoder = encoder
    return made


def _require_fitting(
    name: str,
    weights: str,
    layer: int,
    whole: bool,
    regions: tuple[int, int] | None,
    frames: int | None,
    pool: tuple[int, int] | None,
) -> None:
    """Refuse options that are for other encoders."""
    if regions is not None and name not in REGION_ENCODERS:
        raise EncoderError(f"--regions is for {' and '.join(REGION_ENCODERS)}; '{name}' has a fixed grid, leave it out")
    if frames is not None and name in REGION_ENCODERS:
        raise EncoderError(f"--frames takes the pooled feature of a grid, and '{name}' gives regions; leave it out")
    if name.startswith(HUB) and weights != "imagenet":
        raise EncoderError(f"'{name}' names its weights itself; leave --visual-weights {weights} out")
    if layer != -1 and not name.startswith((HUB, *LIBRARIES)):
        models = ", ".join((HUB, *LIBRARIES))
        raise EncoderError(f"--visual-layer is for models of {models}; '{name}' gives its last map, leave it out")
    if layer != -1 and frames is not None:
        raise EncoderError(
            "--visual-layer chooses a map, and of a frame only the global feature is taken; leave it out"
        )
    if whole and (name in REGION_ENCODERS or is_own(name)):
        raise EncoderError(f"--whole is for grids, and '{name}' prepares its pictures itself; leave it out")
    require_cut(name, name not in _GRIDS, whole)
    if pool is not None and (frames is not None or name in REGION_ENCODERS):
        raise EncoderError("--pool averages the cells of pictures' grids, and there are none here; leave it out")


def _require_views(name: str, frames: int | None, views: int, augment: str | None) -> None:
    """Refuse views that cannot be made."""
    if views < 1:
        raise EncoderError(f"--views {views}: a picture has at least one view")
    if (views > 1) != (augment is not None):
        given, lacking = (
            ("--views", f"--augment {'|'.join(AUGMENTATIONS)}") if views > 1 else ("--augment", "--views N")
        )
        raise EncoderError(f"{given} goes with {lacking}; give both or neither")
    if views > 1 and (frames is not None or name in REGION_ENCODERS):
        what = "videos" if frames is not None else f"the regions of {name}"
        raise EncoderError(f"--views is for pictures that become a grid, and not for {what}; leave it out")


def load_text(
    weights: str,
    device: str,
    *,
    layer: int = -1,
    special_tokens: bool = True,
    max_tokens: int | None = None,
    prompt: str | None = None,
    file: str = "imagenet",
    half: bool = True,
    trust: bool = False,
) -> TextEncoder:
    """Return the text encoder of a folder or hub id, or of a model of open_clip, as `load_visual` does.

    The words encoder has no weights: `words.WordsEncoder.build` makes it from the training captions.

    Args:
        weights: hub id or folder of a model of the BERT family; after ``hf:``, of any text model of transformers;
            or ``open_clip:ARCH[/TAG]``.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        layer: which hidden states: 0 are the embeddings, L the last layer's; -1 the last, -2 the one before.
        special_tokens: keep ids and states of the special tokens. The network sees them in any case.
        max_tokens: tokens of a caption that are encoded, special ones included; None: what the model takes.
        prompt: what is encoded in the place of a caption, which stands in it for ``{}``; None: the caption itself.
        file: weights of a model of open_clip: a file or ``random:SEED``; ``imagenet``: those of its tag.
        half: let a GPU compute in bfloat16, of a checkpoint that ``hf:`` names, or of open_clip.
        trust: let a program that such a checkpoint comes with run, or a file while it is read.

    Raises:
        EncoderError: there is no such model, it is incomplete, or an option does not fit it.
    """
    if prompt is not None and prompt.count("{}") != 1:
        raise EncoderError(f"--prompt '{prompt}': a caption takes the place of {{}}, which has to stand in it once")
    key = weights, device, layer, special_tokens, max_tokens, prompt, half, trust, file
    return _texts.get((*key, _state(weights.removeprefix(HUB)), _state(file)), lambda: make_text(*key))


def make_visual(
    name: str,
    weights: str,
    size: Any,
    device: str,
    trust: bool = False,
    layer: int = -1,
    half: bool = True,
    upright: bool = True,
    whole: bool = False,
) -> Any:
    """Return a new image encoder that is not shared; arguments and errors as of `load_visual`.

    The caller is alone with torch (`threads.loading`). `size` is the side of the square input, pixels; of a region
    encoder the fewest and most boxes.
    """
    if is_own(name):
        return make_own(name, weights, IMAGE_SIZE if size is None else size, device)
    encoder = _make_visual(name, weights, size, device, trust, layer, half, whole)
    if whole:
        encoder.identity, encoder.longest = made_whole(encoder.identity), None
    if upright:
        encoder.identity = made_upright(encoder.identity)
    return encoder


def _make_visual(
    name: str, weights: str, size: Any, device: str, trust: bool, layer: int, half: bool, whole: bool
) -> Any:
    if name.startswith(HUB):
        from .huggingface.images import HubImageEncoder

        return HubImageEncoder(name.removeprefix(HUB), device, layer, size, half=half, trust=trust, whole=whole)
    library, colon, model = name.partition(":")
    if where := _OF_LIBRARIES.get(library + colon):
        how = {"half": half, "trust": trust, "whole": whole}
        return resolve_name(f"{__package__}{where}")(model, weights, device, layer, size, **how)
    size = IMAGE_SIZE if size is None else size
    if where := (_REGIONS | _GRIDS).get(name):
        return resolve_name(f"{__package__}{where}")(weights, size, device, trust)
    from .grid import GridEncoder

    return GridEncoder(name, weights, size, device, trust, whole=whole)


def make_text(
    weights: str,
    device: str,
    layer: int,
    special_tokens: bool,
    max_tokens: int | None,
    prompt: str | None = None,
    half: bool = True,
    trust: bool = False,
    file: str = "imagenet",
) -> Any:
    """Return a new text encoder that is not shared; arguments, errors and caller as of `load_text`, `make_visual`."""
    of_captions = layer, special_tokens, max_tokens, prompt
    if weights.startswith(HUB):
        from .huggingface.texts import HubTextEncoder

        return HubTextEncoder(weights.removeprefix(HUB), device, *of_captions, half=half, trust=trust)
    if weights.startswith(OPEN_CLIP):
        from .libraries.clip_texts import ClipTextEncoder

        model = weights.removeprefix(OPEN_CLIP)
        return ClipTextEncoder(model, device, *of_captions, file=file, half=half, trust=trust)
    from .huggingface.bert import BertEncoder

    return BertEncoder(weights, device, *of_captions)


def _visual(
    name: str,
    weights: str,
    size: Any,
    device: str,
    frames: int | None,
    trust: bool,
    state: tuple[object, ...],
    layer: int,
    half: bool,
    upright: bool,
    whole: bool,
) -> VisualEncoder:
    def make() -> VisualEncoder:
        encoder: VisualEncoder = make_visual(name, weights, size, device, trust, layer, half, upright, whole)
        if frames is None:
            return encoder
        from .wrappers.frames import FramesEncoder

        return FramesEncoder(encoder, frames)

    return _images.get((name, weights, size, device, frames, trust, layer, half, upright, whole, state), make)


def _state(weights: str) -> tuple[object, ...]:
    """Return what changes when a file, or a file of a folder, is replaced; nothing for a name that is not a path."""
    path = Path(weights)
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        stats = [(file.name, file.stat()) for file in files if file.is_file()]
    except OSError:
        return ()  # reading them will say why they cannot be read
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
