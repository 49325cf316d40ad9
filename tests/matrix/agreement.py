"""Agreement: a plan is clean by the check, and the model generates on it as on one device."""

from __future__ import annotations

import torch
from families import Family

import duoka
from duoka import virtual
from duoka.runtime.dispatch.dispatch import dispatch

FLEET = "virtual:2x1GiB"
# A norm without parameters, a cache of their own, values that are read, weights without dimensions.
OWN_WAYS = (
    "olmo", "xlnet", "jetmoe", "prophetnet", "nanochat", "gpt_oss", "apertus", "nllb-moe",
    "llama", "glm4", "gpt2", "bloom", "t5", "mixtral", "deepseek_v3", "qwen3_next", "mamba2",
)  # fmt: skip


def check(family: Family) -> None:
    """Plan, check and run a prompt of one token and of three."""
    if family.name not in OWN_WAYS:
        return
    model, ids = family.model(), torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = family.model().generate(ids, **options)
    for prompt_tokens in (1, 3):
        work = duoka.Workload(prompt_tokens=prompt_tokens, new_tokens=4)
        plan = duoka.plan(model, FLEET, work, use_all=True)
        report = duoka.check(family.model(), plan)
        assert report.ok, report.stop or report.faults
    with virtual.gpus([None] * 2):
        spread = dispatch(model, plan.placement)
        generated = spread.generate(ids.to(plan.placement.entries[0][1]), **options)
        assert generated.tolist() == expected.tolist()
