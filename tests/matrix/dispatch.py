"""Dispatch: a model that is planned for two virtual GPUs gives what the CPU gives.

Each is run twice: as planned, and with the roles of the two GPUs exchanged.
"""

from __future__ import annotations

import copy

import families
from families import Family
from transformers import PreTrainedModel
from turns import in_turn

import duoka
from duoka import virtual
from duoka.runtime.dispatch.place_tensors import tensor_names

LEFT_OUT = {
    "cpmant": "its own loss brings labels and logits together nowhere",
    "xlm": "its layers are lists beside each other, so residuals in the model's own code span all",
    "aria_text": "its experts' code reads how many tokens each got (up to transformers 5.17)",
    "jetmoe": "its experts' code reads how many tokens each got, which is unknown without numbers",
    "xlnet": "in `generate` it runs a second stream of states, of which no plan for a call knows",
}
# Steps can't give it the cache that it insists on, so it is planned for one call.
OWN_CACHE = ("minimax",)
FLEET = "virtual:2x1GiB"
EXCHANGED = {"vgpu:0": "vgpu:1", "vgpu:1": "vgpu:0"}


def plan(name: str, model: PreTrainedModel) -> duoka.Plan:
    if model.config.is_encoder_decoder or model.config.model_type in OWN_CACHE:
        return duoka.plan(model, FLEET, inputs=families.inputs(model), use_all=True)
    # Several sequences take three times the steps to trace: every other family has them, by turn.
    batch = 2 if name in in_turn(families.built_names(), 2) else 1
    workload = duoka.Workload(batch=batch, prompt_tokens=7, new_tokens=6)
    return duoka.plan(model, FLEET, workload, use_all=True)


def check(family: Family) -> None:
    """Compare logits, tokens, loss and gradients on both assignments of the GPUs."""
    model = family.model()
    made = plan(family.name, model)
    virtual.set_gpus([None, None])
    reversed_map = {module: EXCHANGED[device] for module, device in made.device_map.items()}
    for placement in (made, reversed_map):
        spread = duoka.dispatch(copy.deepcopy(model), placement)
        used = {str(tensor.device) for _, tensor in tensor_names(spread)}
        assert used == {"vgpu:0", "vgpu:1"}, "nothing was cut"
        first = "vgpu:0" if placement is made else "vgpu:1"
        found = families.measure(spread, first)
        assert not families.differences(family.results, found)
