"""Adapters that requests choose: the answers of the merged models, in one batch, as forecast."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tuning
from adapters import sizes_of, write_adapter
from counting import Counts
from tiers import only

import duoka
from duoka import virtual
from duoka.engine import Completion, Engine, SamplingParams
from duoka.engine.executor import InlineExecutor
from duoka.engine.sampler import SamplingRow
from duoka.errors import CheckpointError, LoadError, ModelError, UsageError
from duoka.forecast.serving import Capacity
from duoka.runtime import devices
from duoka.runtime.call.chunk import Chunk

from .conftest import TINY

WORK = duoka.Workload(
    cache="paged", batch=6, prompt_tokens=64, new_tokens=16, dtype="float32",
    prefill_chunk_tokens=20, pages=40,
)  # fmt: skip
TEN = SamplingParams(max_new_tokens=10, min_new_tokens=10, logprobs=1)
WIDE = {  # enough for groups of int4
    **tuning.SIZES,
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def prompts(number: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(256) for _ in range(rng.randrange(1, 64))] for _ in range(number)]


def ids(completion: Completion) -> list[int]:
    return [choice.token for choice in completion.tokens]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuning.write_model("shallow", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of different ranks, on different modules; the last ones on neither the first's."""
    directory = tmp_path_factory.mktemp("adapters")
    forms = {"narrow": (2, ("q_proj", "v_proj")), "wide": (4, ALL), "late": (3, ("down_proj",))}
    return {
        name: write_adapter(directory / name, sizes_of(model, *targets), rank=rank)
        for name, (rank, targets) in forms.items()
    }


def planned(
    model: Path, adapters: dict[str, Path], number: int = 1, size: str = "256MiB", **work: Any
) -> duoka.Plan:
    named = tuple((name, str(directory)) for name, directory in adapters.items())
    workload = replace(WORK, adapters=named, **work)
    return duoka.plan(model, f"virtual:{number}x{size}", workload, use_all=True)


def merged_answers(model: Path, directory: Path | None, **work: Any) -> list[Completion]:
    with Engine(planned(model, {}, **work), adapter=directory, processes=False) as engine:
        return engine.generate(prompts(3), TEN)


@pytest.fixture(scope="module")
def expected(model: Path, adapters: dict[str, Path]) -> dict[str | None, list[Completion]]:
    """What the model answers without an adapter, and with each one merged into its weights."""
    return {name: merged_answers(model, adapters.get(name or "")) for name in (None, *adapters)}


def compare(engine: Engine, expected: dict[str | None, list[Completion]]) -> None:
    """Ask for all prompts with all adapters in one batch."""
    with engine._lock:  # so that all are in the first step
        streams = [
            (completion, engine.submit(prompt, TEN, adapter=name))
            for name, completions in expected.items()
            for prompt, completion in zip(prompts(3), completions, strict=True)
        ]
    for wanted, stream in streams:
        answer = stream.result()
        assert ids(answer) == ids(wanted)
        for got, choice in zip(answer.tokens, wanted.tokens, strict=True):
            assert got.logprob == pytest.approx(choice.logprob, abs=2e-4)


@pytest.mark.parametrize("number", only([1], [1, 3]))
def test_a_batch_has_every_adapter(
    model: Path,
    adapters: dict[str, Path],
    expected: dict[str | None, list[Completion]],
    number: int,
) -> None:
    assert len({tuple(ids(answers[0])) for answers in expected.values()}) == 4
    with Engine(planned(model, adapters, number), processes=False) as engine:
        compare(engine, expected)
        with pytest.raises(UsageError, match="adapter 'other' is unknown") as caught:
            engine.submit([1], TEN, adapter="other")
        assert caught.value.hint == "supported: narrow, wide, late"


@pytest.mark.process
@pytest.mark.usefixtures("quick_workers")
def test_stages_have_the_adapters_of_their_layers(
    model: Path, adapters: dict[str, Path], expected: dict[str | None, list[Completion]]
) -> None:
    with Engine(planned(model, adapters, 2), processes=True) as engine:
        compare(engine, expected)


def test_preempted_requests_keep_their_adapter(model: Path, adapters: dict[str, Path]) -> None:
    params = SamplingParams(max_new_tokens=40, min_new_tokens=40)
    answers = []
    for pages in (40, 8):
        with Engine(planned(model, adapters, pages=pages), processes=False) as engine:
            with engine._lock:
                names = (None, *adapters)
                streams = [engine.submit([7, 8, 9], params, adapter=name) for name in names]
            answers.append([ids(stream.result()) for stream in streams])
            is_tight = engine.load().num_preempted > 0
    assert answers[0] == answers[1]
    assert is_tight


def test_a_merged_adapter_is_below_those_that_are_chosen(
    model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    names = sizes_of(model, "q_proj")
    extra = write_adapter(tmp_path / "extra", names)
    with Engine(planned(model, {"extra": extra}), adapter=adapters["wide"]) as engine:
        plain = engine.generate(prompts(1), TEN)[0]
        both = engine.submit(prompts(1)[0], TEN, adapter="extra").result()
    assert ids(plain) == ids(merged_answers(model, adapters["wide"])[0]) != ids(both)


@pytest.mark.parametrize("quantize", only(["int8"], ["int8", "int4", "nf4"]))
def test_quantized_weights_have_adapters(tmp_path: Path, quantize: str) -> None:
    """Adapters aren't quantized, and an answer doesn't depend on other adapters."""
    model = tuning.write_of_config(tmp_path / "model", **WIDE)
    sizes = sizes_of(model, "q_proj", "down_proj")
    named = {n: write_adapter(tmp_path / n, sizes, std=0.1) for n in ("one", "two")}
    work = {"quantize": quantize, "batch": 3}
    answers = []
    for chosen in (named, {"two": named["two"]}, {}):
        plan = planned(model, chosen, **work)
        with Engine(plan, processes=False, warm_up="largest") as engine:
            streams = [engine.submit(prompts(1)[0], TEN, adapter=name) for name in (None, *chosen)]
            answers.append([stream.result() for stream in streams])
    assert ids(answers[0][0]) == ids(answers[1][0]) == ids(answers[2][0])
    assert ids(answers[0][2]) == ids(answers[1][1]) != ids(answers[0][0])
    assert ids(answers[0][1]) not in (ids(answers[0][0]), ids(answers[0][2]))


def test_adapters_in_published_names_are_split(tiny: Path, tmp_path: Path) -> None:
    """`query_key_value` of a ChatGLM is three modules of duoka's class."""
    rows = TINY["kv_channels"] * (TINY["num_attention_heads"] + 2 * TINY["multi_query_group_num"])
    fused = "transformer.encoder.layers.{}.self_attention.query_key_value"
    sizes = {fused.format(at): (TINY["hidden_size"], rows) for at in range(3)}
    directory = write_adapter(tmp_path / "fused", sizes)
    with Engine(planned(tiny, {"fused": directory}), processes=False) as engine:
        answers = [engine.submit(p, TEN, adapter="fused").result() for p in prompts(3)]
        plain = engine.generate(prompts(3), TEN)
    merged = list(map(ids, merged_answers(tiny, directory)))
    assert list(map(ids, answers)) == merged != list(map(ids, plain))


# ── pages ──


def test_pages_are_shared_under_one_adapter_alone(model: Path, adapters: dict[str, Path]) -> None:
    text = prompts(1)[0] * 64
    with Engine(planned(model, adapters), processes=False) as engine:
        shared = [
            engine.submit(text[:60], TEN, adapter=name).result().shared_tokens
            for name in (None, "wide", "wide", "late", None, "late")
        ]
    assert shared == [0, 0, 48, 0, 48, 48]


# ── the forecast ──


def squeezed(plan: duoka.Plan) -> duoka.Plan:
    """The plan on devices whose budgets are what is forecast to be reserved."""
    budgets = {stage.device: stage.reserved_bytes for stage in plan.forecast.devices}
    return plan.move_to(
        {
            device.name: replace(device, budget_bytes=budgets.get(device.name, device.budget_bytes))
            for device in plan.fleet.devices
        }
    )


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("number", [1, 2])
def test_what_was_forecast_is_what_it_takes(
    model: Path, adapters: dict[str, Path], number: int
) -> None:
    plan = squeezed(planned(model, adapters, number))
    plain = planned(model, {}, number)
    stacks = {name: inputs + outputs for name, (inputs, outputs) in sizes_of(model, *ALL).items()}
    ranks = {"q_proj": 6, "v_proj": 6, "down_proj": 7}  # of the adapters on a module, and between
    added = sum(4 * ranks.get(name.rpartition(".")[2], 4) * size for name, size in stacks.items())
    weights = [sum(stage.weight_bytes for stage in p.forecast.devices) for p in (plan, plain)]
    assert added <= weights[0] - weights[1] <= added + 512 * 2 * len(stacks)
    virtual.set_gpus([None])
    with Engine(plan, processes=False) as engine:
        streams = [
            engine.submit(prompt, replace(TEN, temperature=0.9), adapter=name)
            for prompt in prompts(5)
            for name in (None, *adapters)
        ]
        assert all(stream.result().tokens for stream in streams)
        for stage in plan.forecast.devices:
            peaks: Any = devices.peak_bytes(stage.device)
            assert peaks.reserved_bytes == stage.reserved_bytes == stage.budget_bytes
            assert 0.97 * stage.allocated_bytes <= peaks.allocated_bytes <= stage.allocated_bytes


def copies_of(plan: duoka.Plan, adapters: list[int]) -> list[Counts]:
    """What decode steps of some sequences copy and allocate."""
    from duoka.api.load import OpenedModel, load_proved

    model = load_proved(plan, OpenedModel.open(plan), outputs_stay=True)
    executor = InlineExecutor(model, Capacity.of(plan.workload), plan.workload, warm_up="every")
    executor.start()
    row = SamplingRow(params=SamplingParams(), seed=0, place=0)
    steps = []
    with torch.no_grad():
        for place in range(10, 14):
            chunks = [
                Chunk(at, [7], place, [at], row, adapter=number)
                for at, number in enumerate(adapters)
            ]
            with virtual.observe(counts := Counts()):
                executor.run(chunks)
            steps.append(counts)
    executor.close()
    return steps


@pytest.mark.usefixtures("every_step")
def test_a_step_copies_its_table_alone_whatever_is_chosen(
    model: Path, adapters: dict[str, Path]
) -> None:
    plain = copies_of(planned(model, {}), [0, 0, 0])[-1]
    plan = planned(model, adapters)
    mixed = copies_of(plan, [1, 0, 3])
    assert {(step.allocations, step.num_bytes, step.frees) for step in mixed} == {
        (step.allocations, step.num_bytes, step.frees) for step in copies_of(plan, [2, 2, 2])
    }
    assert sum(mixed[-1].copies.values()) == sum(plain.copies.values())


# ── refusals ──


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ((("a b", "/x"),), "isn't NAME=DIR with a name of its own"),
        ((("a", ""),), "isn't NAME=DIR"),
        ((("", "/x"),), "isn't NAME=DIR"),
        ((("a", "/x"), ("a", "/y")), "'a=/x' isn't NAME=DIR with a name of its own"),
    ],
)
def test_invalid_names_are_refused(named: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(WORK, adapters=named)


def test_what_cannot_be_chosen_is_refused_before_a_weight_is_read(
    model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="requests choose adapters only over a paged one"):
        replace(WORK, cache="dynamic", pages=None, adapters=(("a", "/x"),))
    with pytest.raises(CheckpointError, match="none has no adapter"):
        planned(model, {"a": tmp_path / "none"})
    foreign = write_adapter(tmp_path / "foreign", {"model.layers.0.self_attn.q_proj": (64, 64)})
    with pytest.raises(LoadError, match="adapter 'theirs' doesn't match this model: it goes from"):
        planned(model, {**adapters, "theirs": foreign})
    head = write_adapter(tmp_path / "head", {"lm_head": (32, 260)})
    with pytest.raises(LoadError, match="adapter 'head' changes lm_head"):
        planned(model, {"head": head})


def test_weights_that_are_read_without_a_call_are_refused(tmp_path: Path) -> None:
    """Attention over latents takes the weight of `kv_b_proj` apart."""
    model = tuning.write_model("dense latents", tmp_path / "latents")
    sizes = sizes_of(model, "kv_b_proj")
    directory = write_adapter(tmp_path / "latent", sizes)
    with pytest.raises(ModelError, match=r"changes .*kv_b_proj, which isn't called") as caught:
        planned(model, {"latent": directory}, pages=None, size="1GiB")
    assert "merge it" in str(caught.value.hint)
    works = write_adapter(tmp_path / "works", sizes_of(model, "o_proj", "q_a_proj"))
    plan = planned(model, {"works": works}, pages=None, size="1GiB")
    with Engine(plan, processes=False, warm_up="largest") as engine:
        assert engine.submit([1, 2, 3], TEN, adapter="works").result().tokens


def test_an_adapter_of_other_shapes_needs_another_plan(
    model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Other values of the same shapes, as after more training, don't."""
    sizes = sizes_of(model, "q_proj")
    directory = write_adapter(tmp_path / "mine", sizes)
    plan = duoka.Plan.from_json(planned(model, {"mine": directory}).to_json())
    assert plan.workload.adapters == (("mine", str(directory)),)
    answers = []
    for name, rank in (("later", 4), ("larger", 5)):
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()
        write_adapter(tmp_path / name, sizes, rank=rank).rename(directory)
        if rank == 4:
            with Engine(plan, processes=False) as engine:
                answers.append(ids(engine.submit([1, 2], TEN, adapter="mine").result()))
    with pytest.raises(CheckpointError, match="another adapter than the one that the plan"):
        Engine(plan, processes=False)
    with pytest.raises(UsageError, match="only an engine can do"):
        duoka.load(plan)
    assert answers


@pytest.fixture(autouse=True)
def own_gpus() -> Iterator[None]:
    yield
    virtual.set_gpus([None])
