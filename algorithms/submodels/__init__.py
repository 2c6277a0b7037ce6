"""Methods in which small clients train a part of the model."""
