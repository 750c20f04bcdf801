"""Engines of torch: checkpoints of the transformers library."""
