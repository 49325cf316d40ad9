"""Families of transformers, planned for two virtual GPUs and dispatched, give what the CPU gives.

Each is run twice: as planned, and with the roles of the two GPUs exchanged.
"""

from __future__ import annotations

import copy

import families
import pytest
from transformers import PreTrainedModel

import duoka
from duoka import virtual
from duoka.runtime.dispatch.place_tensors import tensor_names

# The model's own loss brings labels and logits together nowhere.
LOSS_ON_ONE_DEVICE = ("cpmant", "fsmt")
# Its layers are parts in lists beside each other, so residuals in the model's own code span all.
ONE_BLOCK = ("xlm",)
# Their experts' code reads how many tokens each got, which nobody knows without numbers; that of
# aria_text does so up to transformers 5.17.
READS_ROUTING = ("aria_text", "jetmoe")
# In `generate` it runs a second stream of states, of which planning for one call knows nothing, and
# steps can't be planned: its memory of them is no cache.
SECOND_STREAM = ("xlnet",)
# Steps can't give it the cache that it insists on, so it is planned for one call.
OWN_CACHE = ("minimax",)
UNBUILT = [name for names in families.UNBUILT.values() for name in names]
NOT_HELD = {*LOSS_ON_ONE_DEVICE, *ONE_BLOCK, *READS_ROUTING, *SECOND_STREAM, *UNBUILT}
OTHERS = [n for n in families.all_names() if n not in NOT_HELD and n not in families.FAST]
FLEET = "virtual:2x1GiB"
EXCHANGED = {"vgpu:0": "vgpu:1", "vgpu:1": "vgpu:0"}


@pytest.mark.parametrize("name", families.sample(families.FAST))
def test_two_gpus_are_one(name: str) -> None:
    check(name)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_two_gpus_are_one_for_others(name: str) -> None:
    check(name)


def plan(model: PreTrainedModel) -> duoka.Plan:
    if model.config.is_encoder_decoder or model.config.model_type in OWN_CACHE:
        return duoka.plan(model, FLEET, inputs=families.inputs(model), use_all=True)
    workload = duoka.Workload(batch=2, prompt_tokens=7, new_tokens=6)
    return duoka.plan(model, FLEET, workload, use_all=True)


def check(name: str) -> None:
    model = families.build(name)
    made = plan(model)
    virtual.set_gpus([None, None])
    reversed_map = {module: EXCHANGED[device] for module, device in made.device_map.items()}
    for placement in (made, reversed_map):
        spread = duoka.dispatch(copy.deepcopy(model), placement)
        used = {str(tensor.device) for _, tensor in tensor_names(spread)}
        assert used == {"vgpu:0", "vgpu:1"}, "nothing was cut"
        first = "vgpu:0" if placement is made else "vgpu:1"
        found = families.measure(spread, first)
        assert not families.differences(families.on_the_cpu(name), found)
