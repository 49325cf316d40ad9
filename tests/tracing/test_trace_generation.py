"""From a model to its profile."""

from __future__ import annotations

import re
from typing import Any

import families
import pytest
import tiny
import torch
from torch import Tensor, nn

from duoka import Fleet, Placement, Workload, models, virtual
from duoka.errors import ModelError
from duoka.forecast.profile import ENDLESS, Profile
from duoka.forecast.replay import Replay
from duoka.models.quantization import parts, quantize_model
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.runtime.dispatch.dispatch import dispatch
from duoka.tracing import Irregular, TraceSpec, trace, trace_call, trace_workload
from duoka.tracing.record import Recorder
from duoka.tracing.recorded import RecordedPass
from duoka.tracing.tracer import place_whole

SPEC = TraceSpec(fingerprint="x")
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def build(**changes: Any) -> Any:
    return models.build({**SMALL, "model_type": "llama", **changes}, dtype=torch.bfloat16)


def placed_blocks(profile: Profile) -> list[tuple[str, ...]]:
    """The blocks that hold modules; what the caller does with the outputs is none."""
    return [block.modules for block in profile.blocks if block.modules]


def test_a_language_models_profile() -> None:
    profile = tiny.regular("tied")
    assert placed_blocks(profile) == [
        ("model.embed_tokens", "model.rotary_emb"),
        *[(f"model.layers.{index}",) for index in range(4)],
        ("model.norm",),
        ("lm_head",),
    ]
    assert profile.model == "Qwen3ForCausalLM"
    assert profile.dtype == "bfloat16"
    assert profile.fingerprint == "tied"
    assert profile.max_context_tokens == 8192
    # Layers share a kind, but for the first, which follows something else.
    kinds = [block.kind for block in profile.blocks[2:5]]
    assert len(set(kinds)) == 1
    head = next(block for block in profile.blocks if block.modules == ("lm_head",))
    assert head.tied_to == 0
    assert profile.kinds[head.kind].weight_bytes == ()


@pytest.mark.slow
def test_traces_know_the_first_matrix_product() -> None:
    """Behind its output: where the queries' product is made; norms have none.

    Before torch 2.13 the embedding's block has one: the rotary embedding's outer product.
    """
    profile = tiny.regular("llama")
    traces = [profile.kinds[block.kind].traces[0] for block in profile.blocks]
    _, *layers, norm, head, caller = traces
    assert [norm.matmul_at, caller.matmul_at] == [None] * 2
    assert head.matmul_at == 1
    for layer in layers:
        assert layer.matmul_at is not None
        assert layer.events[layer.matmul_at - 1] is None
        (number,) = [sum(event is None for event in layer.events[: layer.matmul_at])]
        assert layer.sizes[number - 1] == (0.0, 512.0)  # the queries, in bfloat16


def test_a_profile_answers_any_workload() -> None:
    profile = tiny.regular("tied")
    for load in (
        Workload(prompt_tokens=1, new_tokens=1, prefill_chunk_tokens=None),
        Workload(prompt_tokens=7777, new_tokens=3, batch=64, prefill_chunk_tokens=1),
        Workload(prompt_tokens=100_000, new_tokens=3, prefill_chunk_tokens=512),
    ):
        assert Replay(profile, load, brief=True).steps


@pytest.mark.slow
def test_what_a_norm_without_parameters_makes_is_its_last_layers() -> None:
    profile = trace(build(model_type="olmo", num_hidden_layers=5), SPEC)
    work = Workload(prompt_tokens=9, new_tokens=3, prefill_chunk_tokens=None, dtype="bfloat16")
    fleet = Fleet.parse("virtual:2x1GiB")
    plan = find_plan(profile, PlanProblem(fleet=fleet, workload=work, use_all=True))
    assert len(plan.devices) == 2
    *_, before, last, _head, _caller = (block.kind for block in profile.blocks)
    assert before != last


@pytest.mark.slow
def test_windows_divide_the_regimes() -> None:
    profile = tiny.regular("window")
    ranges = {(regime.past, regime.keys) for regime in profile.regimes if not regime.is_batched}
    keys = {keys for _, keys in ranges}
    assert {stop for _, stop in keys} > {512}
    assert all(start in (0, 512) for start, _ in keys)
    crossing = [past for past, (start, _) in ranges if start == 512 and past[1] <= 512]
    assert crossing == [(1, 512)]
    plain = tiny.regular("tied")
    assert {regime.keys for regime in plain.regimes} == {(0, ENDLESS)}


def test_full_and_sliding_layers_are_of_different_kinds() -> None:
    config = {
        **tiny.CONFIGS["tied"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
    }
    load = Workload(prompt_tokens=50, new_tokens=4, prefill_chunk_tokens=None)
    model = models.build(config, dtype=torch.bfloat16)
    profile = trace_workload(model, SPEC, [load])
    _, full, sliding, again, last, *_ = [block.kind for block in profile.blocks]
    assert full != sliding
    assert sliding != last
    assert again != last


@pytest.mark.slow
def test_a_context_that_ends_early_is_never_exceeded() -> None:
    """Learned positions: a step beyond them would fail."""
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 160}
    config |= {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    model = models.build(config, dtype=torch.bfloat16)
    positions: list[int] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        positions.append(kwargs["attention_mask"].shape[-1])

    model.register_forward_pre_hook(note, with_kwargs=True)
    trace(model, TraceSpec(fingerprint="x", max_context_tokens=160))
    assert 50 < max(positions) <= 160


def test_irregular_models_are_said_to_be() -> None:
    assert tiny.is_irregular("mamba2")
    t5 = models.build({"model_type": "t5", "d_model": 32, "num_layers": 1, "vocab_size": 64})
    with pytest.raises(Irregular):
        trace(t5, SPEC)


def test_one_workloads_profile_knows_that_one() -> None:
    loads = [
        Workload(prompt_tokens=300, new_tokens=9, prefill_chunk_tokens=chunk)
        for chunk in (None, 100)
    ]
    profile = trace_workload(models.build(tiny.CONFIGS["mamba2"]), SPEC, loads)
    for load in loads:
        assert Replay(profile, load).run(range(len(profile.blocks))) is not None


@pytest.mark.parametrize(("fails_at", "num_calls"), [(20, 1), (70, 4)])
def test_the_first_failure_is_told_and_one_by_one_tried_over_a_cache_alone(
    fails_at: int, num_calls: int
) -> None:
    model = models.build(tiny.CONFIGS["tied"], dtype=torch.bfloat16)
    lengths: list[int] = []

    def refuse(module: nn.Module, args: Any, kwargs: Any) -> None:
        lengths.append(kwargs["input_ids"].shape[-1])
        if kwargs["attention_mask"].shape[-1] >= fails_at:
            raise ValueError(f"failure {len(lengths)}")

    load = Workload(prompt_tokens=60, new_tokens=40, prefill_chunk_tokens=None)
    handle = model.register_forward_pre_hook(refuse, with_kwargs=True)
    with pytest.raises(ModelError) as caught:
        trace_workload(model, SPEC, [load])
    handle.remove()
    assert f"failure {num_calls + 1}" in str(caught.value)


def test_one_workload_or_all_workloads_cost_the_same() -> None:
    load = Workload(batch=2, prompt_tokens=333, new_tokens=6, prefill_chunk_tokens=150)
    one = trace_workload(models.build(tiny.CONFIGS["tied"], dtype=torch.bfloat16), SPEC, [load])
    whole = tiny.regular("tied")
    blocks = range(len(whole.blocks))
    assert len(one.blocks) == len(blocks)
    assert Replay(one, load).run(blocks) == Replay(whole, load).run(blocks)
    assert Replay(one, load).run([3, 4]) == Replay(whole, load).run([3, 4])


def test_weights_in_eight_bits_have_no_values() -> None:
    """They would be unpacked in earnest, as small integers on virtual GPUs are."""
    model = models.build(tiny.CONFIGS["glm"], dtype=torch.bfloat16)
    quantize_model(model, "int8")
    with place_whole(model, TraceSpec(fingerprint="")):
        held = [part for weight in model.parameters() for part in parts(weight).values()]
        assert all(part.backing.is_meta for part in held if isinstance(part, virtual.VirtualTensor))


# Any module, called once.


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(512, 8)
        self.up = nn.Linear(512, 2048)
        self.down = nn.Linear(2048, 512)

    def forward(self, x: Tensor, *, extra: dict[str, Tensor]) -> dict[str, Tensor]:
        y = self.down(self.up(x * extra["gain"]).relu())
        return {"out": self.head(y)}


def inputs() -> dict[str, Any]:
    return {"x": torch.zeros(700, 512), "extra": {"gain": torch.ones(512)}}


@pytest.mark.parametrize("fleet", ["virtual:64MiB", "virtual:2x32MiB"])
def test_the_call_of_a_module_is_forecast(fleet: str) -> None:
    profile = trace_call(Branches().to("meta"), SPEC, inputs())
    assert placed_blocks(profile) == [("up",), ("down",), ("head",)]
    problem = PlanProblem(
        fleet=Fleet.parse(fleet),
        workload=Workload(prompt_tokens=1, new_tokens=1, prefill_chunk_tokens=None),
        use_all=True,
    )
    plan = find_plan(profile, problem)
    budgets = [device.budget_bytes for device in plan.fleet.devices]
    with virtual.gpus(budgets, data="meta") as world, torch.no_grad():
        model = dispatch(Branches().to("meta"), plan.placement, empty=True)
        given = inputs()
        x, gain = given["x"].to(plan.devices[0]), given["extra"]["gain"].to(plan.devices[0])
        model(x=x, extra={"gain": gain})
        for device in plan.forecast.devices:
            index = int(device.device.partition(":")[2])
            measured = world.max_memory_allocated(index)
            assert device.allocated_bytes == pytest.approx(measured, rel=0.01)


def test_a_call_that_fails_says_which_model_and_where() -> None:
    with pytest.raises(ModelError, match=r"Branches can't be traced: TypeError: .*extra") as caught:
        trace_call(Branches().to("meta"), SPEC, {"x": torch.zeros(3, 5)})
    assert re.search("inputs", str(caught.value.hint))


class Reads(nn.Module):
    """Code that looks at values that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y if y.sum().item() > 0 else -y


def test_a_value_that_nobody_knows_is_named_with_its_place() -> None:
    with pytest.raises(Exception, match=r"test_trace_generation\.py:\d+") as caught:
        trace_call(Reads().to("meta"), SPEC, (torch.ones(2, 4),))
    assert isinstance(caught.value, (ModelError, virtual.UnknownValueError))


def test_weights_count_buffers_and_each_tie_once() -> None:
    model = Branches()
    model.up.register_buffer("scale", torch.ones(100))
    model.tail = nn.Linear(512, 8)
    model.tail.weight = model.head.weight
    profile = trace_call(model.to("meta"), SPEC, inputs())
    tensors = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    assert profile.weight_bytes == sum(tensors.values())


def test_placements_follow_the_blocks() -> None:
    profile = trace_call(Branches().to("meta"), SPEC, inputs())
    names = [name for block in profile.blocks for name in block.modules]
    Placement(entries=tuple((name, "cpu") for name in names)).check(
        name for name, _ in Branches().named_parameters()
    )


def test_code_that_loops_over_its_tokens_is_not_recorded_at_more_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded, record = [], Recorder.record

    def noted(recorder: Recorder, *args: Any, **options: Any) -> RecordedPass:
        recorded.append(record(recorder, *args, **options))
        return recorded[-1]

    monkeypatch.setattr(Recorder, "record", noted)
    with pytest.raises(Irregular, match="loops over the tokens"):
        trace(families.build("mamba").to("meta"), SPEC)
    # A prompt, and two steps of several tokens, which aren't alike.
    assert [each.is_like(recorded[-1]) for each in recorded] == [False, False, True]
