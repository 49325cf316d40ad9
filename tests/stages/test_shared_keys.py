"""Stages send each other the keys and values that their layers share, and gradients back."""

from __future__ import annotations

from typing import Any

import pytest
import shared_keys
import torch
from staging import differences, learn_in_stages, learn_whole, placement_of, route_of

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", shared_keys.NAMES)
@pytest.mark.parametrize("num_devices", [2, 3, 6])
def test_they_learn_what_one_device_does(name: str, num_devices: int) -> None:
    model: Any = shared_keys.build(name)
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 300, (2, 24), generator=generator) for _ in range(3)]
    batches = [{"input_ids": each, "labels": each, "use_cache": False} for each in ids]
    placement = placement_of(model, batches[0], num_devices)
    if num_devices == 6:  # not to the next stage alone
        transfers = route_of(model, placement, batches[0]).transfers
        shared = [t for t in transfers if t.shape.sizes[1] == 2 and len(t.shape.sizes) == 4]
        assert any(t.target - t.source > 1 and t.requires_grad for t in shared)
    learnt = learn_in_stages(model, placement, batches, "1f1b")
    assert differences(learn_whole(model, batches), learnt) == []
