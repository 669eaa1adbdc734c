"""Encoders that find the regions of a picture: bottom-up attention and torchvision's detector."""
