"""Encoders on the CPU by the options of their specs."""

from xret.pipeline.encoders import EncoderSpec, load_text, load_visual


def image_encoder(name, weights=None, image_size=None, **options):
    return load_visual(EncoderSpec(name, weights=weights and str(weights), image_size=image_size, **options), "cpu")


def text_encoder(name, weights=None, **options):
    return load_text(EncoderSpec(name, weights=weights and str(weights), **options), "cpu")
