"""Checkpoint: a published model, without its weights."""
