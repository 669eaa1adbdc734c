"""The folder that a training leaves behind, with the features and encoders that belong to it."""
