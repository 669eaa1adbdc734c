"""What an extraction remembers of its options."""

import pytest

from xret.pipeline.encoders import weights_source
from xret.pipeline.extraction.options import Options, source_of


@pytest.mark.parametrize(
    ("options", "modality"),
    [
        (Options(visual="resnet18"), "images"),
        (Options(visual="timm:resnet18", visual_weights=""), "images"),
        (Options(text="open_clip:RN50/openai"), "captions"),
        (Options(text="words"), "captions"),
    ],
)
def test_a_folder_that_is_called_like_weights_without_a_file_is_not_read(tmp_path, monkeypatch, options, modality):
    """It may be the whole data set of that name."""
    monkeypatch.chdir(tmp_path)
    for name in ("imagenet", "bert-base-uncased"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "n01440764.tar").write_bytes(b"pictures")
    monkeypatch.setattr(weights_source, "sha256_of", None)  # nobody may look
    assert source_of(options, modality, None) is None
