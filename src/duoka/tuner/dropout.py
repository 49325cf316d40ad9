"""Dropout that is the same on any number of GPUs: drawn by step, micro-batch and module.

torch draws from one generator, so that what a module drops depends on all that ran before it in its
process. Here each module that drops has a seed of its own: its upper half says the micro-batch, and
is read back from the generator. So it is right also where a layer is computed again, since gradient
checkpointing puts the generator back into the state in which the layer first ran.
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
    """Begin a micro-batch by its number within the step over all replicas."""
    mixed = np.random.SeedSequence([seed, step, micro_batch])
    torch.manual_seed(int(mixed.generate_state(1, np.uint32)[0]) << 32)


def seed_by_module(model: nn.Module) -> None:
    """Seed each dropout module by its name and the micro-batch."""
    for name, module in model.named_modules():
        # Attention takes the share of a dropout that it has, and doesn't call it.
        dropouts = (part for part in (module, *module.children()) if isinstance(part, _DropoutNd))
        shares = [value for key, value in vars(module).items() if "drop" in key]
        shares += [dropout.p for dropout in dropouts]
        if any(isinstance(share, float) and share > 0 for share in shares):
            module.register_forward_pre_hook(partial(_reseed, name))


# The 64-bit seed of torch's generator, by whom its halves are set:
#
#                           upper 32 bits                    lower 32 bits
#   `seed_dropout`          from seed, step, micro-batch     0
#   `_reseed`, each module  as they were                     CRC of the upper half and the name
#
# A checkpointed layer runs again with the generator of its first run, so with the same upper half.
def _reseed(name: str, module: nn.Module, _: Any) -> None:
    if module.training:
        micro_batch = torch.initial_seed() >> 32
        # On the processor torch takes the lower half alone.
        drawn = zlib.crc32(f"{micro_batch} {name}".encode())
        torch.manual_seed(micro_batch << 32 | drawn)
