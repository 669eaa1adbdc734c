"""Encoders of libraries that are asked for as extras: models of timm and of open_clip, called as their pages do."""
