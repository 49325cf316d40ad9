from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiers import only

from duoka.errors import CheckpointError, UsageError
from duoka.forecast.workload import Workload
from duoka.models.kv_cache import new_cache
from duoka.runtime import Generator, Sampling

QUESTIONS = ["What is a device map?", "显存不足怎么办？", "Why does the KV cache grow at all?"]


def with_workload(generator: Generator, **changes: Any) -> Generator:
    workload = Workload(**{"prompt_tokens": 64, "new_tokens": 32, **changes})
    return Generator(generator.model, generator.tokenizer, generator.chat, workload)


def test_a_batch_with_padding_gives_the_single_answers(generator: Generator) -> None:
    prompts = [generator.prompt(question) for question in QUESTIONS]
    assert len({len(prompt) for prompt in prompts}) > 1
    together = generator.answer(prompts)
    assert together == tuple(generator.answer([prompt])[0] for prompt in prompts)
    assert [answer.prompt_tokens for answer in together] == [len(prompt) for prompt in prompts]


def test_two_gpus_answer_as_transformers_does_on_the_cpu(generator: Generator) -> None:
    assert len({p.device for p in generator.model.parameters()}) == 2
    prompt = torch.tensor([generator.prompt(QUESTIONS[0])])
    plain = copy.deepcopy(type(generator.model)(generator.model.config))
    plain.load_state_dict({k: v.cpu() for k, v in generator.model.state_dict().items()})
    stops = list(generator.chat.stop_ids)
    made = plain.eval().generate(prompt, max_new_tokens=32, do_sample=False, eos_token_id=stops)
    expected = generator.tokenizer.decode(made[0, prompt.shape[1] :], skip_special_tokens=True)
    (answer,) = generator.answer(prompt.tolist())
    assert answer.text == expected.strip()


@pytest.mark.parametrize("chunk", only([7], [1, 4, 7, 64]))
def test_chunks_of_the_prompt_give_the_same_answer(generator: Generator, chunk: int) -> None:
    chunked = with_workload(generator, batch=3, prefill_chunk_tokens=chunk)
    prompts = [generator.prompt(question) for question in QUESTIONS]
    assert chunked.answer(prompts) == generator.answer(prompts)


def test_generate_calls_forward_as_the_workload_says(generator: Generator) -> None:
    """Tracing and proving make these calls themselves; see `tracing.Stepper`."""
    calls: list[dict[str, Any]] = []

    def record(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        assert not args
        cache = kwargs["past_key_values"]
        calls.append(
            {
                "query": kwargs["input_ids"].shape[1],
                "keys": int(kwargs["position_ids"][0, -1]) + 1,
                "mask": kwargs.get("attention_mask"),
                "positions": tuple(kwargs["position_ids"].shape),
                "cache": type(cache).__name__,
                "logits_to_keep": kwargs["logits_to_keep"],
                "logits": output.logits.shape[1],
                "use_cache": kwargs["use_cache"],
            }
        )

    workload = Workload(prompt_tokens=10, new_tokens=3, prefill_chunk_tokens=4)
    chunked = with_workload(generator, prompt_tokens=10, new_tokens=3, prefill_chunk_tokens=4)
    handle = generator.model.register_forward_hook(record, with_kwargs=True)
    # No stop token: all three are generated.
    chunked.model.generate(
        torch.ones((1, 10), dtype=torch.long, device="vgpu:0"),
        attention_mask=torch.ones((1, 10), dtype=torch.long, device="vgpu:0"),
        **{**chunked._options(Sampling()), "eos_token_id": None},
    )
    handle.remove()
    steps = [*workload.chunks(), (1, 10), (1, 11)]
    assert [(call["query"], call["keys"]) for call in calls] == [
        (query, past + query) for query, past in steps
    ]
    # Where nothing is padded, transformers may leave the mask out.
    assert all(call["mask"] is None or bool(call["mask"].all()) for call in calls)
    assert all(call["positions"] == (1, call["query"]) for call in calls)
    assert all(call["logits"] == call["logits_to_keep"] == 1 for call in calls)
    assert all(call["cache"] == "DynamicCache" and call["use_cache"] for call in calls)


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_static_cache_gives_the_same_answers(generator: Generator, chunk: int | None) -> None:
    prompts = [generator.prompt(question) for question in QUESTIONS]
    static = with_workload(generator, batch=3, cache="static", prefill_chunk_tokens=chunk)
    assert static.answer(prompts) == generator.answer(prompts)


def test_a_cache_in_8_bit_is_used_where_it_was_planned(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def keep(*args: Any, **kwargs: Any) -> Any:
        made.append(new_cache(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("duoka.runtime.generate.new_cache", keep)
    small = with_workload(generator, cache="int8", prefill_chunk_tokens=None)
    prompt = generator.prompt(QUESTIONS[0])
    (answer,) = small.answer([prompt])
    (cache,) = made
    assert cache.get_seq_length() >= len(prompt) + answer.new_tokens - 1
    assert {layer.keys.dtype for layer in cache.layers} == {torch.int8}
    # A layer's lies where the layer lies.
    homes = [next(layer.parameters()).device for layer in generator.model.model.layers]
    assert [layer.keys.device for layer in cache.layers] == homes


def test_limits_of_the_plan_are_kept(generator: Generator) -> None:
    with pytest.raises(UsageError, match=r"4 prompts.*for 3"):
        generator.answer([[1]] * 4)
    with pytest.raises(UsageError, match=r"65 tokens of prompt.*for 64"):
        generator.stream([5] * 65)
    with pytest.raises(UsageError, match=r"33 new tokens.*for 32"):
        generator.answer([[5]], Sampling(max_new_tokens=33))
    with pytest.raises(UsageError, match="empty"):
        generator.answer([])


def test_an_answer_ends_at_its_limit(generator: Generator) -> None:
    (answer,) = generator.answer([generator.prompt("hello")], Sampling(max_new_tokens=3))
    assert answer.new_tokens <= 3
    assert answer.finish == ("length" if answer.new_tokens == 3 else "stop")


def test_a_stop_token_ends_an_answer(generator: Generator) -> None:
    class Stopping:
        stop_ids: tuple[int, ...] = ()

    prompt = generator.prompt("hello")
    chat = Stopping()
    made = Generator(generator.model, generator.tokenizer, chat, generator.workload)  # type: ignore[arg-type]
    (row,) = made._generate([prompt], Sampling())
    chat.stop_ids = (row[4],)
    (answer,) = made.answer([prompt])
    assert answer.finish == "stop"
    assert answer.new_tokens == row.index(row[4])


def test_plain_text_is_continued_as_it_is(generator: Generator) -> None:
    ids = generator.plain("<|user|> hi")
    assert generator.chat.stop_ids[1] not in ids
    assert generator.tokenizer.decode(ids, skip_special_tokens=True).strip() == "<|user|> hi"


def test_tokens_beyond_the_embedding_are_refused(generator: Generator) -> None:
    embeddings: Any = generator.model.get_input_embeddings()
    rows = embeddings.num_embeddings
    with pytest.raises(CheckpointError, match=f"a token {rows}, and the model's embedding has"):
        generator.answer([[1, rows]])
