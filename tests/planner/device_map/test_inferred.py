"""Maps that accelerate infers, which name modules without tensors and leave out some buffers."""

from __future__ import annotations

import accelerate
import families
import pytest
from accelerate.utils import modeling

from duoka import Workload
from duoka.planner.device_map import judge
from duoka.tracing.get_profile import profile_module

FAMILIES = ("gpt2", "bloom", "mpt", "gemma2", "jamba", "glm4")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_map_that_accelerate_infers_is_accepted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without it accelerate leaves out GPUs that this machine hasn't.
    monkeypatch.setattr(modeling, "get_max_memory", lambda sizes: sizes)
    model = families.build(name)
    outline = profile_module(model, Workload(prompt_tokens=32, new_tokens=8), None).outline
    total = modeling.compute_module_sizes(model)[""]
    device_map = accelerate.infer_auto_device_map(
        model,
        max_memory={0: int(0.9 * total), 1: total},
        no_split_module_classes=[*(model._no_split_modules or ())],
    )
    assert {*device_map.values()} == {0, 1}
    assert {device for _, device in judge(device_map, outline).placed} == {"cuda:0", "cuda:1"}
