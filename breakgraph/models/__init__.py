"""Decoders, attention and weights of the models that this package can run."""
