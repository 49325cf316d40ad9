"""Counts that stand for the time of planning: they are the same on every machine."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from duoka.forecast import replay
from duoka.forecast.workload import Workload
from duoka.planner.request import PlanProblem
from duoka.planner.search.dynamic_programme import Programme
from duoka.planner.solve import solve

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GLM_4_9B = {
    "model_type": "chatglm", "architectures": ["ChatGLMModel"], "hidden_size": 4096,
    "ffn_hidden_size": 13696, "kv_channels": 128, "num_attention_heads": 32,
    "multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True,
    "padded_vocab_size": 151552, "rope_ratio": 500, "original_rope": True, "seq_length": 131072,
    "post_layer_norm": True, "rmsnorm": True, "layernorm_epsilon": 1.5625e-07,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
# GPUs, context, room: replays, steps of them, and layers of states of the programme, at
# most.
MOST = {
    (2, 8192, "roomy"): (2, 10, 0),
    (2, 8192, "tight"): (8, 28, 12),
    (4, 8192, "roomy"): (9, 45, 18),
    (4, 8192, "tight"): (20, 96, 96),
    (4, 8192, "short"): (0, 0, 3),
    (4, 131072, "roomy"): (11, 534, 62),
    (8, 8192, "roomy"): (31, 171, 150),
    (8, 8192, "tight"): (27, 468, 178),
    (8, 131072, "roomy"): (0, 0, 25),
}
MARGIN = 1.1  # traces of other versions of PyTorch differ by a tensor here and there


def counted(patch: pytest.MonkeyPatch, owner: type, name: str, counts: Counter[str]) -> None:
    method = getattr(owner, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return method(*args, **kwargs)

    patch.setattr(owner, name, count)


@pytest.fixture
def plan_time(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, which isn't part of the package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("plan_time")


def test_plans_take_no_more_replays_steps_and_states(
    plan_time: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, _ = plan_time.profile_of(GLM_4_9B, 40, tmp_path)
    counts: Counter[str] = Counter()
    # One that goes on after a pause is the same.
    counted(monkeypatch, replay.StageRun, "__init__", counts)
    counted(monkeypatch, replay.StageRun, "run_pass", counts)
    counted(monkeypatch, Programme, "_extend", counts)
    excess = {}
    for (gpus, context, room), most in MOST.items():
        counts.clear()
        workload = Workload(prompt_tokens=context - 256, dtype="bfloat16")
        fleet = plan_time.fleet_of(profile, workload, gpus, plan_time.ROOM[room])
        solve(profile, PlanProblem(fleet=fleet, workload=workload))
        now = tuple(counts[name] for name in ("__init__", "run_pass", "_extend"))
        if any(count > MARGIN * limit for count, limit in zip(now, most, strict=True)):
            excess[gpus, context, room] = now, most
    assert not excess
