"""Completions that repeat their prompts, with the log-probabilities of the prompts' tokens."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
import torch
from abuse import COMPLETIONS
from openai import OpenAI
from served import Served
from transformers import AutoModelForCausalLM

TEXT = "hello, how are you?"


def scores_of(served: Served, ids: list[int]) -> list[float]:
    """The log-probability of each token but the first, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(served.directory, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    picked = logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    return [float(value) for value in picked]


def ask(served: Served, **fields: Any) -> Any:
    answer = httpx2.post(f"{served.url}{COMPLETIONS}", json={"temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_tokens_of_a_prompt_have_the_models_log_probabilities(served: Served) -> None:
    ids = httpx2.post(f"{served.url}/tokenize", json={"prompt": TEXT}).json()["tokens"]
    plain = ask(served, prompt=TEXT, max_tokens=3, logprobs=2)
    for prompt in (TEXT, ids):
        answer = ask(served, prompt=prompt, max_tokens=3, logprobs=2, echo=True)
        (choice,) = answer["choices"]
        logprobs = choice["logprobs"]
        assert choice["text"] == TEXT + plain["choices"][0]["text"]
        assert choice["finish_reason"] == "length"
        assert answer["usage"] == plain["usage"]
        assert len(logprobs["tokens"]) == len(ids) + 3
        assert "".join(logprobs["tokens"][: len(ids)]) == TEXT
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(
            scores_of(served, ids), abs=1e-3
        )
        assert logprobs["text_offset"][:4] == [0, 1, 2, 3]
        tail = plain["choices"][0]["logprobs"]["token_logprobs"]
        assert logprobs["token_logprobs"][len(ids) :] == pytest.approx(tail, abs=1e-4)


def test_a_prompt_is_scored_without_generation_and_in_a_stream(served: Served) -> None:
    (choice,) = ask(served, prompt=TEXT, max_tokens=0, logprobs=0, echo=True)["choices"]
    assert choice["text"] == TEXT
    with OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        stream = client.completions.create(
            model="", prompt=[TEXT, "ab"], max_tokens=0, logprobs=0, echo=True, stream=True
        )
        texts, scores = ["", ""], [0, 0]
        for chunk in stream:
            for part in chunk.choices:
                texts[part.index] += part.text
                scores[part.index] += len(part.logprobs.token_logprobs) if part.logprobs else 0
    assert texts == [TEXT, "ab"]
    assert scores == [len(choice["logprobs"]["tokens"]), 2]


def test_stop_texts_and_penalties_count_only_what_is_generated(served: Served) -> None:
    settings = {"max_tokens": 6, "presence_penalty": 2, "frequency_penalty": 1, "seed": 3}
    settings |= {"temperature": 1.0, "stop": ["h", "o"], "repetition_penalty": 1.3}
    plain = ask(served, prompt=TEXT, **settings)["choices"][0]["text"]
    echoed = ask(served, prompt=TEXT, **settings, echo=True, logprobs=0)["choices"][0]["text"]
    assert echoed == TEXT + plain


def test_many_prompts_are_answered_in_order(served: Served) -> None:
    prompts = [f"{number}" for number in range(80)]
    answer = ask(served, prompt=prompts, max_tokens=1, echo=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(80))
    texts = [choice["text"] for choice in answer["choices"]]
    assert all(text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True))


def test_what_scoring_needs_is_said(served: Served) -> None:
    for fields, text in (
        ({"echo": True, "logprobs": 1}, "echo with logprobs needs max_tokens"),
        ({"max_tokens": 0}, "max_tokens 0 needs echo and logprobs"),
        ({"prompt": ["a"] * 2049}, "1 to 2048 prompts can be given, none empty"),
    ):
        answer = httpx2.post(f"{served.url}{COMPLETIONS}", json={"prompt": "ab", **fields})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == text
