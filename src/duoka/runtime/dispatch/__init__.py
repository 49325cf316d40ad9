"""Dispatch: the one place where activations change device."""
