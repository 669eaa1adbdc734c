"""Encoders of other libraries' models: timm and open_clip."""
