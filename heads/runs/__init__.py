"""The run: the folder that a training leaves, the features that it reads and the encoders that made them."""
