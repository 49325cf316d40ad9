"""A cache for each sequence: the answers of `generate`, in the memory that was planned."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import plain_generate
import pytest
import torch
import tuning
from image_checkpoints import write_family, write_glm4v
from PIL import Image
from tiers import only
from transformers.generation import utils as generation

import duoka
from duoka import virtual
from duoka.engine import Completion, Engine, Grammar, SamplingParams, open_executor
from duoka.errors import MachineError, ModelError, UsageError
from duoka.models.text.messages import ChatMessage
from duoka.runtime import devices
from duoka.runtime.call.cached_model import CachedModel
from duoka.runtime.call.encode_images import FEATURES
from duoka.runtime.prompt_reader import PromptReader

NEW_TOKENS = 10
SEGMENT_BYTES = 2 * 2**20
PICTURES = (
    Image.effect_noise((56, 56), 99).convert("RGB"),
    Image.new("RGB", (56, 56), "red"),
)
WORK = duoka.Workload(batch=3, prompt_tokens=96, new_tokens=16, dtype="float32")
SEEING = replace(WORK, images=2, image_size=(56, 56), vision_batch=1)


def ask(text: str, *images: Image.Image) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text, images=images)]


CHATS = [
    ask("What?", PICTURES[0]),
    ask("What?", PICTURES[1]),
    ask("Hello, you who see."),
    ask("And these, which of them is red?", *PICTURES),
    ask("Which is it?", PICTURES[1]),
]


def one_by_one(plan: duoka.Plan, chats: list[list[ChatMessage]]) -> list[tuple[str, int]]:
    """What transformers' `generate` answers, on the plan's GPUs."""
    reader = PromptReader.open(duoka.Checkpoint.open(plan.source), plan.workload)
    prompts = [reader.chat.prompt(chat) for chat in chats]
    answers = plain_generate.answers(plan, prompts, max_new_tokens=NEW_TOKENS)
    return [(answer.text.strip(), answer.new_tokens) for answer in answers]


def at_once(engine: Engine, chats: list[list[ChatMessage]]) -> list[tuple[str, int]]:
    answers = engine.generate(chats, SamplingParams(max_new_tokens=NEW_TOKENS))
    assert not any(answer.shared_tokens for answer in answers)
    assert engine.load().free_pages == engine.capacity.pages
    return [(answer.text, len(answer.tokens)) for answer in answers]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuning.write_model("shallow", tmp_path_factory.mktemp("model") / "model")


def skip_unless_read_in_chunks(chunk: int | None) -> None:
    """Skip pictures in chunks where transformers has no code for them yet."""
    if chunk is not None and not hasattr(generation, "_slice_mm_encoder_output"):
        pytest.skip("this version of transformers doesn't support chunked prefill with images")


@pytest.fixture(scope="module")
def glm4v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glm4v(tmp_path_factory.mktemp("glm-4v"))


@pytest.fixture(scope="module")
def seeing(glm4v: Path) -> duoka.Plan:
    work = replace(SEEING, prefill_chunk_tokens=None)
    return duoka.plan(glm4v, "virtual:2x256MiB", work, use_all=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", only([2], [1, 2]))
@pytest.mark.parametrize("case", only(
    [("glm-4v", 7)],
    [("glm-4v", None), ("glm-4v", 7), ("llava", 7), ("qwen2_vl", None), ("qwen2_vl", 7),
     ("gemma3", None)],
))  # fmt: skip
def test_pictures(case: tuple[str, int | None], number: int, glm4v: Path, tmp_path: Path) -> None:
    name, chunk = case
    skip_unless_read_in_chunks(chunk)
    path = glm4v if name == "glm-4v" else write_family(name, tmp_path)
    work = replace(SEEING, prefill_chunk_tokens=chunk)
    plan = duoka.plan(path, f"virtual:{number}x256MiB", work, use_all=True)
    expected = one_by_one(plan, CHATS)
    assert expected[0] != expected[1]
    with Engine(plan) as engine:
        assert at_once(engine, CHATS) == expected


@pytest.mark.parametrize("number", only([2], [1, 2]))
@pytest.mark.parametrize("chunk", only([20], [None, 20]))
def test_an_8_bit_cache(chunk: int | None, number: int, llama: Path) -> None:
    work = replace(WORK, cache="int8", prefill_chunk_tokens=chunk)
    plan = duoka.plan(llama, f"virtual:{number}x256MiB", work, use_all=True)
    chats = [ask("What is NVLink?" * times) for times in (1, 3, 1, 2, 4)]
    expected = one_by_one(plan, chats)
    with Engine(plan) as engine:
        assert at_once(engine, chats) == expected


def answer_all_planned(plan: duoka.Plan, prompts: list[Any]) -> None:
    """Answer as many prompts, as long ones, as were planned for, in the bytes that were forecast.

    Caches that are made one by one may lie less densely than those of a batch.
    """
    virtual.set_gpus([1])  # whose memory isn't that of an earlier test
    devices.materialise(plan.fleet)
    for device in plan.devices:
        devices.reset_peaks(device)
    work = plan.workload
    params = SamplingParams(max_new_tokens=work.new_tokens, min_new_tokens=work.new_tokens)
    with Engine(plan) as engine:
        answers = engine.generate(prompts, params)
    assert len(answers) == work.batch
    assert all(len(answer.tokens) == work.new_tokens for answer in answers)
    # `generate` too keeps ids, a mask and positions beyond the forecast's.
    rows = 3 * 512 * -(-8 * work.context_tokens // 512)
    for stage, peaks in zip(plan.forecast.devices, engine.peaks(), strict=True):
        assert peaks.reserved_bytes <= stage.reserved_bytes + SEGMENT_BYTES
        assert 0.7 * stage.allocated_bytes < peaks.allocated_bytes < stage.allocated_bytes + rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "number", "chunk"),
    [(1, 2, 100), (3, 1, None), (3, 2, 100)],
)
def test_8_bit_caches_are_within_the_forecast(
    batch: int, number: int, chunk: int | None, tmp_path: Path
) -> None:
    path = tuning.write_model("large", tmp_path / "large")
    work = replace(WORK, cache="int8", batch=batch, prompt_tokens=400, prefill_chunk_tokens=chunk)
    plan = duoka.plan(path, f"virtual:{number}x256MiB", work, use_all=True)
    answer_all_planned(plan, [[5] * work.prompt_tokens] * batch)


@pytest.mark.parametrize(("number", "chunk"), [(1, None), (2, 20)])
def test_pictures_are_within_the_forecast(number: int, chunk: int | None, glm4v: Path) -> None:
    skip_unless_read_in_chunks(chunk)
    work = replace(SEEING, prefill_chunk_tokens=chunk)
    plan = duoka.plan(glm4v, f"virtual:{number}x256MiB", work, use_all=True)
    reader = PromptReader.open(duoka.Checkpoint.open(plan.source), plan.workload)
    prompts = []
    for _ in range(work.batch):
        prompt = reader.prompt("And these?", images=PICTURES)
        prompt.extend([5] * (work.prompt_tokens - len(prompt)))
        prompts.append(prompt)
    answer_all_planned(plan, prompts)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", only(["glm-4v"], ["glm-4v", "llava", "qwen2_vl", "gemma3"]))
def test_without_planned_pictures_text_alone_is_answered(
    name: str, glm4v: Path, tmp_path: Path
) -> None:
    path = glm4v if name == "glm-4v" else write_family(name, tmp_path)
    plan = duoka.plan(path, "virtual:2x256MiB", WORK, use_all=True)
    chats = [ask("Hello, you who see."), ask("What is NVLink?"), ask("Hello, you.")]
    expected = one_by_one(plan, chats)
    with Engine(plan, processes=False) as engine:
        answers = engine.generate(chats, SamplingParams(max_new_tokens=NEW_TOKENS))
        assert [(answer.text, len(answer.tokens)) for answer in answers] == expected
        with pytest.raises(UsageError, match="1 image in a prompt; the plan has memory for 0"):
            engine.submit(CHATS[0])
        reader = PromptReader.open(duoka.Checkpoint.open(plan.source), plan.workload)
        with pytest.raises(UsageError, match="1 images in a prompt; the plan has memory for 0"):
            engine.submit(reader.prompt("What?", images=PICTURES[:1]))


def test_what_was_not_planned_for_is_refused(seeing: duoka.Plan, llama: Path) -> None:
    with pytest.raises(UsageError, match="images needs a single process"):
        Engine(seeing, processes=True)
    with Engine(seeing) as engine:
        params = SamplingParams(max_new_tokens=1)
        with pytest.raises(UsageError, match="3 images in a prompt; the plan has memory for 2"):
            engine.submit(ask("What?", *PICTURES, PICTURES[0]), params)
        # There is room for it as prompt and answer, but not for reading it at once.
        with pytest.raises(
            UsageError, match="the prompt has 97 tokens; the plan has memory for 96"
        ):
            engine.submit([5] * 97, params)
    plan = duoka.plan(llama, "virtual:2x256MiB", replace(WORK, cache="int8"), use_all=True)
    with pytest.raises(UsageError, match="an int8 cache without pages needs a single process"):
        Engine(plan, processes=True)


def test_a_rule_that_is_not_applied_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tuning.write_model("shallow", tmp_path / "shallow")
    (path / "generation_config.json").write_text('{"guidance_scale": 1.5}')
    plan = duoka.plan(path, "virtual:1x256MiB", WORK)

    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights are read")

    monkeypatch.setattr(open_executor, "load_proved", read)
    with pytest.raises(UsageError, match=r"guidance_scale 1\.5, which the engine doesn't support"):
        Engine(plan)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "goes_on"),
    [("jamba", False), ("bloom", True), ("minimax", False), ("recurrent_gemma", False),
     ("mamba", False), ("cpmant", False), ("qwen3_next", True), ("falcon_h1", True)],
)  # fmt: skip
def test_chunks_are_refused_where_a_model_does_not_go_on(name: str, goes_on: bool) -> None:
    """Of some transformers' code begins anew with each chunk, and no error says so."""
    model: Any = families.build(name)
    work = replace(WORK, prefill_chunk_tokens=20)
    expected = nullcontext() if goes_on else pytest.raises(ModelError, match="doesn't support")
    with expected:
        CachedModel(model, work)
    CachedModel(model, replace(work, prefill_chunk_tokens=None))
    CachedModel(model, replace(work, prompt_tokens=20))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["recurrent_gemma", "bloom"])
def test_a_model_that_keeps_a_state_itself_has_one_sequence_at_a_time(
    name: str, tmp_path: Path
) -> None:
    """Nothing of its interface says so; answers in company would be others."""
    model: Any = families.build(name)
    model.save_pretrained(tmp_path)
    tuning.make_tokenizer().save_pretrained(tmp_path)
    prompts = [[token] * 20 for token in range(3, 9)]
    plan = duoka.plan(tmp_path, "virtual:2x256MiB", WORK, use_all=True)
    with Engine(plan) as engine:
        assert engine.capacity.sequences == (1 if name == "recurrent_gemma" else WORK.batch)
        found = engine.generate(prompts, SamplingParams(max_new_tokens=6))
    for prompt, completion in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, 20:].tolist()
        assert [choice.token for choice in completion.tokens] == expected


def test_pictures_are_let_go_of(seeing: duoka.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    after: list[set[str]] = []
    run = CachedModel.run

    def spy(self: CachedModel, chunks: Any) -> Any:
        logits = run(self, chunks)
        after.append(set(self._arguments[chunks[0].sequence]))
        return logits

    monkeypatch.setattr(CachedModel, "run", spy)
    with Engine(seeing) as engine:
        engine.generate([CHATS[0]], SamplingParams(max_new_tokens=3, min_new_tokens=3))
    assert len(after) == 3
    assert not any(names & {FEATURES, "pixel_values"} for names in after)


def test_a_grammar_goes_with_pictures(seeing: duoka.Plan) -> None:
    params = SamplingParams(grammar=Grammar.regex("(red|noise)"))
    with Engine(seeing) as engine:
        answers = engine.generate(CHATS, params)
    assert {answer.text for answer in answers} <= {"red", "noise"}


def test_one_without_memory_ends_alone(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = replace(WORK, cache="int8", prefill_chunk_tokens=None)
    plan = duoka.plan(llama, "virtual:1x256MiB", work)
    run = CachedModel.run

    def limited(self: CachedModel, chunks: Any) -> Any:
        if len(chunks[0].tokens) > 50:
            raise torch.OutOfMemoryError("no byte is left")
        return run(self, chunks)

    monkeypatch.setattr(CachedModel, "run", limited)
    with Engine(plan) as engine:
        prompts = [[5] * 10, [5] * 60, [5] * 20]
        outcomes = dict(engine.as_completed(enumerate(prompts), SamplingParams(max_new_tokens=4)))
    assert isinstance(outcomes[1], MachineError)
    assert "out of memory, for 60 tokens: no byte is left" in str(outcomes[1])
    assert isinstance(outcomes[0], Completion)
    assert isinstance(outcomes[2], Completion)
