"""Checkpoints that several tests make: ChatGLM3's format, random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from duoka.tools.demo.checkpoint import fresh_model, write_frame, write_weights


def write_random(directory: Path, config: Mapping[str, Any], *, seed: int) -> Path:
    """Write a checkpoint; the same seed gives the same weights."""
    write_frame(directory, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        write_weights(directory, config, fresh_model(config))
    return directory
