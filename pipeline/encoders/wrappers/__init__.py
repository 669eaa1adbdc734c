"""Encoders that take what another one makes: several views of a picture, the frames of a video, pooled cells."""
