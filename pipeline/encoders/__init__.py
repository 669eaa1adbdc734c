"""Frozen backbones: `spec` describes an encoder, `registry` loads it, `base` is its contract; the others make one each.

An encoder belongs to whoever loads it; nothing is kept for the next caller.
"""
