"""Names of a plan's modules: the model's own, and those of its checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
from tiny import MIB

from duoka import Workload
from duoka.errors import UsageError
from duoka.forecast.tensor_names import NamedTensor
from duoka.planner.plan_profile import map_of, needed_profile
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.report.export import export

WORKLOAD = Workload(prompt_tokens=300, new_tokens=20, dtype="bfloat16")


def test_maps_in_both_conventions() -> None:
    profile = tiny.made_up([30 * MIB] * 3, tiny.Costs(cache=512))
    modules = [block.modules for block in profile.blocks]
    named = [
        [NamedTensor(name=f"{name}.weight", num_bytes=1, published=(f"old.{name}.weight",))
         for name in names]
        for names in modules
    ]  # fmt: skip
    profile = replace(profile, tensor_names=tuple(map(tuple, named)))
    plan = find_plan(profile, PlanProblem(fleet=tiny.fleet(120, 100), workload=WORKLOAD))
    assert map_of(plan, "model") == plan.device_map
    assert map_of(plan, "checkpoint", profile) == {
        f"old.{name}": device for name, device in plan.device_map.items()
    }
    with pytest.raises(
        UsageError, match="the checkpoint has no code of its own, and so no other names"
    ):
        export(plan, "accelerate", profile, names="checkpoint")
    coded = replace(plan, model="ChatGLMForCausalLM")
    text = export(coded, "accelerate", profile, names="checkpoint").text
    assert f"'old.{modules[0][0]}': " in text
    assert "trust_remote_code=True" in text
    # transformers 4, for which such code was written, hands `dtype` on to the model's class.
    assert " torch_dtype=torch." in text
    assert " dtype=torch." in export(coded, "accelerate", profile).text
    with pytest.raises(UsageError, match="vllm has no option for module names"):
        export(plan, "vllm", profile, names="checkpoint")
    with pytest.raises(UsageError, match="in the cache to tell names by"):
        needed_profile(plan, "to tell names by")
