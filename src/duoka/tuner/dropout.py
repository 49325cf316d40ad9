"""Dropout that is the same on any number of GPUs: drawn by step, micro-batch and module.

torch has one generator per device, so the elements that a module drops depend on all modules that
ran before it in the process. Here each module with dropout sets its own seed before it runs. The
upper half of the seed identifies the micro-batch, and is read back from the generator. This works
for recomputed layers, too: gradient checkpointing restores the generator's state of the first run.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def seed_dropout(seed: int, step: int, micro_batch: int) -> None:
    """Seed torch for a micro-batch, by its index within the step over all replicas."""
    mixed = np.random.SeedSequence([seed, step, micro_batch])
    torch.manual_seed(int(mixed.generate_state(1, np.uint32)[0]) << 32)


def seed_by_module(model: nn.Module) -> None:
    """Make each module with dropout seed torch by its name and the micro-batch before it runs."""
    for name, module in model.named_modules():
        # Attention passes the rate of its dropout to a kernel, and doesn't call the module. So the
        # rates of child modules count too, and float attributes such as `attention_dropout`.
        dropouts = (part for part in (module, *module.children()) if isinstance(part, _DropoutNd))
        rates = [value for key, value in vars(module).items() if "drop" in key]
        rates += [dropout.p for dropout in dropouts]
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            module.register_forward_pre_hook(partial(_reseed, name))


# The halves of the 64-bit seed of torch's generator, as each function sets them:
#
#                           upper 32 bits                    lower 32 bits
#   `seed_dropout`          from seed, step, micro-batch     0
#   `_reseed`, each module  unchanged                        CRC of the upper half and the name
#
# A checkpointed layer is recomputed with the generator of its first run: the same upper half.
def _reseed(name: str, module: nn.Module, _: Any) -> None:
    """Seed torch for a module of this name, if the module is in training mode."""
    if module.training:
        micro_batch = torch.initial_seed() >> 32
        # torch's CPU generator uses the lower half only, so that half depends on both.
        drawn = zlib.crc32(f"{micro_batch} {name}".encode())
        torch.manual_seed(micro_batch << 32 | drawn)
