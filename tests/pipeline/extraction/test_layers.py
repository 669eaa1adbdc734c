"""Several layers of one encoder at once: the sets that each layer gives alone, of one pass through the network."""

from dataclasses import replace

import numpy as np
import pytest
import small_open_clip  # noqa: F401 - it registers its architectures
import small_timm  # noqa: F401 - it registers its models
import timm
import transformers
from small_bert import save_bert
from small_checkpoints import save_image_model, save_text_model
from small_extraction import files

import xret
from xret.pipeline.errors import CacheError, EncoderError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import build_options
from xret.pipeline.store import CaptionSet, FeatureCache, ImageSet
from xret.pipeline.store.inspect import verify

RANDOM = {"visual_weights": "random:0", "text": None}
BOTH = {"encoder": "open_clip:small-ViT", "visual_weights": "random:0", "text_weights": "random:0"}
VIEWS = {"pool": (2, 2), "views": "dihedral:2"}
# By case a checkpoint to be written, the options, and the layers.
CASES = {
    "hf images": ((save_image_model, "clip"), {"text": None}, (0, 1, -1)),
    "hf images, maps": ((save_image_model, "convnext"), {"text": None}, (1, -1)),
    "timm": (None, {"visual": "timm:small_registers", **RANDOM}, (0, -1)),
    "timm, a convolution at the end": (None, {"visual": "timm:test_efficientnet", **RANDOM}, (1, -1)),
    "timm, windows and views": (None, {"visual": "timm:small_swin", **RANDOM, **VIEWS}, (0, 1)),
    "open_clip": (None, BOTH, (0, 1, -1)),
    "open_clip, timm": (None, {"visual": "open_clip:small-timm", **RANDOM}, (0, -1)),
    "hf texts": ((save_text_model, "clip"), {"visual": None}, (0, 2)),
    "t5": ((save_text_model, "t5"), {"visual": None}, (0, 1, 2)),
}  # fmt: skip
BERT = {"visual": None, "text": "bert", "batch_size": 4}


@pytest.fixture
def bert(tmp_path):
    """Options with which a model of the layers 0 to 2 encodes captions; 2 is the last."""
    how = {**BERT, "text_weights": str(save_bert(tmp_path / "bert"))}
    return lambda *layers: build_options(**how, layers=layers)


def sets(url):
    cache = FeatureCache.open(url)
    return {path: cache.set_at(path) for path in cache.set_paths()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_set_is_that_of_its_layer_alone(case, manifest, tmp_path):
    checkpoint, how, layers = case
    if checkpoint is not None:
        save, family = checkpoint
        how = {**how, "text" if save is save_text_model else "visual": f"hf:{save(tmp_path / family, family)}"}
    how = {**how, "dtype": "float32", "batch_size": 8}
    extract(manifest, tmp_path / "all.zarr", build_options(**how, layers=layers))
    for layer in layers:
        extract(manifest, tmp_path / "each.zarr", build_options(**how, layers=[layer]))
        again = extract(manifest, tmp_path / "all.zarr", build_options(**how, layers=[layer]))
        assert all((one.chunks, one.samples) == (0, 0) for one in again.sets)
    ours, theirs = files(tmp_path / "all.zarr"), files(tmp_path / "each.zarr")
    assert len(sets(tmp_path / "all.zarr")) == len(layers) * (2 if "encoder" in how else 1)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_layers_whose_chunks_would_differ_are_of_one_pass_too(manifest, tmp_path):
    """Maps of the first stage are larger than a chunk of eight pictures; the sets' values are the same."""
    how = {"visual": "timm:test_resnet", "image_size": 224, "batch_size": 1, "dtype": "float32", **RANDOM}
    extract(manifest, tmp_path / "all.zarr", build_options(**how, layers=(-1, 0)))
    for layer in (0, -1):
        extract(manifest, tmp_path / "each.zarr", build_options(**how, layers=(layer,)))
    ours, theirs = sets(tmp_path / "all.zarr"), sets(tmp_path / "each.zarr")
    assert [len({one.chunk_rows for one in found.values()}) for found in (ours, theirs)] == [1, 2]
    assert verify(str(tmp_path / "all.zarr")).ok
    for path, found in ours.items():
        assert found.fingerprint == theirs[path].fingerprint
        for name in found.array_names:
            arrays = (np.asarray(one.cache.array(f"{path}/{name}")) for one in (found, theirs[path]))
            assert len({array.tobytes() for array in arrays}) == 1


@pytest.mark.parametrize(
    ("of", "method", "how"),
    [
        (timm.models.VisionTransformer, "forward_intermediates", {"visual": "timm:small_registers", **RANDOM}),
        (transformers.BertModel, "forward", BERT),
    ],
)
def test_one_pass_for_all_layers(of, method, how, manifest, tmp_path, monkeypatch):
    if how is BERT:
        how = {**BERT, "text_weights": str(save_bert(tmp_path / "bert"))}
    passes, forward = [], getattr(of, method)
    monkeypatch.setattr(of, method, lambda *args, **kwargs: passes.append(1) or forward(*args, **kwargs))
    counts = []
    for layers in [(0,), (0, 1, -1)]:
        extract(manifest, tmp_path / f"{len(layers)}.zarr", build_options(**how, layers=layers))
        counts.append(len(passes))
        passes.clear()
    assert counts[1] - counts[0] <= 2  # that measure the features of a layer


@pytest.mark.parametrize("written", [0, 1, 5])
def test_stopped_anywhere_it_goes_on(written, bert, manifest, tmp_path, monkeypatch):
    extract(manifest, tmp_path / "whole.zarr", bert(0, 2))
    write, left = CaptionSet.write, [written]
    with monkeypatch.context() as patch:

        def stop(*args):
            if left[0] == 0:
                raise CacheError("stopped")
            left[0] -= 1
            write(*args)

        patch.setattr(CaptionSet, "write", stop)
        with pytest.raises(CacheError, match="stopped"):
            extract(manifest, tmp_path / "s.zarr", bert(0, 2))
    assert sum(len(one.written()) for one in sets(tmp_path / "s.zarr").values()) == written
    summary = extract(manifest, tmp_path / "s.zarr", bert(0, 2))
    assert sum(one.chunks_before for one in summary.sets) == written
    assert files(tmp_path / "s.zarr") == files(tmp_path / "whole.zarr")


def test_what_is_complete_is_left_alone(bert, manifest, tmp_path):
    extract(manifest, tmp_path / "s.zarr", bert(1))
    before = files(tmp_path / "s.zarr")
    summary = extract(manifest, tmp_path / "s.zarr", bert(1, 0, 2))
    assert [one.samples for one in summary.sets] == [0, 80, 80]
    after = files(tmp_path / "s.zarr")
    assert all(after[name] == data for name, data in before.items())


def test_layers_named_twice_are_one_set(bert, manifest, tmp_path):
    (one, other) = extract(manifest, tmp_path / "s.zarr", bert(2, 0, 0, -1, -3)).sets
    assert len(sets(tmp_path / "s.zarr")) == 2 and one.name != other.name
    assert [one.chunks for one in extract(manifest, tmp_path / "s.zarr", bert(2, 0, 0)).sets] == [0, 0]


def test_a_picture_that_fails_is_recorded_in_each_set_and_repaired(manifest, tmp_path):
    good = (manifest.images / "4.jpg").read_bytes()
    (manifest.images / "4.jpg").write_bytes(b"no picture")
    how = build_options(visual="timm:small_eva", **RANDOM, layers=(0, 1), on_error="skip")
    assert [one.failed for one in extract(manifest, tmp_path / "s.zarr", how).sets] == [1, 1]
    assert all(dict(one.failures).keys() == {"4"} for one in sets(tmp_path / "s.zarr").values())
    (manifest.images / "4.jpg").write_bytes(good)
    repaired = extract(manifest, tmp_path / "s.zarr", replace(how, repair=True)).sets
    assert [(one.failed, one.chunks) for one in repaired] == [(0, 1), (0, 1)]
    extract(manifest, tmp_path / "whole.zarr", how)
    assert files(tmp_path / "s.zarr") == files(tmp_path / "whole.zarr")


@pytest.mark.parametrize(("layers", "reused"), [((0, 1), 32), ((0,), 0)])
def test_features_are_copied_where_the_other_store_has_every_layer(layers, reused, manifest, tmp_path):
    how = build_options(visual="timm:small_eva", **RANDOM, layers=(0, 1))
    extract(manifest, tmp_path / "old.zarr", replace(how, layers=layers))
    summary = extract(manifest, tmp_path / "new.zarr", replace(how, reuse=str(tmp_path / "old.zarr")))
    assert [(one.reused, one.samples) for one in summary.sets] == [(reused, 32 - reused)] * 2
    extract(manifest, tmp_path / "whole.zarr", how)
    assert files(tmp_path / "new.zarr") == files(tmp_path / "whole.zarr")


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"layers": (0, 9)}, "has no layer 9; choose one from 0 to 1"),
        ({"layers": 9}, "layers is 9; give whole numbers in a list"),
        ({"layers": ()}, "give whole numbers"),
        ({"layers": ("0",)}, "give whole numbers"),
        ({"visual": "resnet18", "image_size": 64, "layers": (-1, 1)}, "'resnet18' does not take layer"),
        ({"layers": (-1, 0), "frames": 2}, "leave `pool`, `views` and `layers` out"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(how, sentence, manifest, tmp_path):
    with pytest.raises(EncoderError, match=sentence):
        xret.extract(manifest.path, tmp_path / "s.zarr", **{"visual": "timm:small_eva", **RANDOM, **how})
    assert not (tmp_path / "s.zarr").exists()


def test_words_have_no_layers(manifest, tmp_path):
    how = {"visual": "timm:small_eva", "visual_weights": "random:0", "text": "words", "layers": (0, 1)}
    found = extract(manifest, tmp_path / "s.zarr", build_options(**how)).sets
    assert len(found) == 3
    assert [isinstance(one, ImageSet) for one in sets(tmp_path / "s.zarr").values()].count(True) == 2
