"""What a generation config forbids and forces comes to the tokens that `generate` gives."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import families
import pytest
import torch
from sequences import sequence_of

from duoka.engine.generation_rules import GenerationRules
from duoka.engine.request import SamplingParams, TokenChoice
from duoka.engine.sampler import sample
from duoka.errors import UsageError

NEW_TOKENS = 12
PROMPTS = ([5], [7, 8, 9, 7, 8], [*range(20, 70)])
RULES: list[dict[str, Any]] = [
    {"forced_bos_token_id": 11},
    {"forced_eos_token_id": 2},
    {"forced_eos_token_id": [3, 4]},
    {"suppress_tokens": range(80)},
    {"begin_suppress_tokens": range(90)},
    {"begin_suppress_tokens": range(90), "forced_bos_token_id": 95},
    {"bad_words_ids": "answered"},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"encoder_no_repeat_ngram_size": 1},
    {"min_length": 9},
    {"min_new_tokens": 7},
    {"repetition_penalty": 1.8},
]


@pytest.fixture(scope="module", params=["llama", "bart"])
def model(request: pytest.FixtureRequest) -> Any:
    return families.build(request.param).eval()


def generated(model: Any, prompt: list[int], stop: int) -> list[int]:
    start = 1 if model.config.is_encoder_decoder else len(prompt)
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    output = model.generate(ids, attention_mask=ids * 0 + 1, eos_token_id=stop, **options)
    answer: list[int] = output[0, start:].tolist()
    return answer[: answer.index(stop)] if stop in answer else answer


def engine_answer(model: Any, prompt: list[int], stop: int) -> list[int]:
    """The same by rows and samples, over logits of the whole model."""
    settings = model.generation_config
    params = SamplingParams.recommended(settings.to_dict(), seed=0, max_new_tokens=NEW_TOKENS)
    rules = GenerationRules.of(model)
    sequence = sequence_of(prompt, params=params, stop_ids=[stop], rules=rules)
    finish = None
    while finish is None:
        answer = sequence.tokens[len(prompt) :]
        if model.config.is_encoder_decoder:
            inputs = {
                "input_ids": torch.tensor([prompt]),
                "decoder_input_ids": torch.tensor([[settings.decoder_start_token_id, *answer]]),
            }
        else:
            inputs = {"input_ids": torch.tensor([sequence.tokens])}
        with torch.no_grad():
            logits = model(**inputs).logits[:, -1]
        finish = sequence.add(sample(logits, [sequence.row()]).choices()[0])
    return sequence.tokens[len(prompt) :]


def set_rules(model: Any, monkeypatch: pytest.MonkeyPatch, rules: dict[str, Any]) -> None:
    for name, value in rules.items():
        value = list(value) if isinstance(value, range) else value
        monkeypatch.setattr(model.generation_config, name, value)


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "+".join(rules))
def test_a_rule(model: Any, rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    set_rules(model, monkeypatch, {"forced_bos_token_id": None, "forced_eos_token_id": None})
    num_changed = 0
    # Those with the answers in them, where it is the prompt that may not be repeated.
    repeats = "encoder_no_repeat_ngram_size" in rules
    for prompt in [[*p, *generated(model, p, 98)] for p in PROMPTS] if repeats else PROMPTS:
        plain = generated(model, prompt, stop=98)
        stop = plain[3] if "min" in str(rules) else 98
        chosen = rules
        if "bad_words_ids" in rules:
            # A word of one token, one of two, and the end itself, which is no word.
            chosen = {"bad_words_ids": [plain[:1], plain[2:4], [stop]]}
        before = generated(model, prompt, stop)
        with monkeypatch.context() as patch:
            set_rules(model, patch, chosen)
            expected = generated(model, prompt, stop)
            assert engine_answer(model, prompt, stop) == expected
        num_changed += expected != before
    assert num_changed


def test_pairs_of_the_prompt_are_not_repeated() -> None:
    rules = GenerationRules(encoder_no_repeat_ngram_size=2)
    assert rules.banned([1, 2, 3, 1, 4], [7, 1], [], 2) == {2, 4}
    assert rules.banned([1, 2, 3, 1, 4], [7], [], 1) == set()


def test_the_end_is_no_bad_word(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    set_rules(model, monkeypatch, {"forced_bos_token_id": None, "forced_eos_token_id": None})
    prompt = PROMPTS[2]
    plain = generated(model, prompt, stop=98)
    set_rules(model, monkeypatch, {"bad_words_ids": [[plain[3]]]})
    assert engine_answer(model, prompt, plain[3]) == generated(model, prompt, plain[3])
    assert len(generated(model, prompt, plain[3])) <= 3


def test_rules_together(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    for _ in range(8):
        with monkeypatch.context() as patch:
            rules = {name: value for rule in rng.sample(RULES, 4) for name, value in rule.items()}
            rules.pop("bad_words_ids", None)
            if {"suppress_tokens", "forced_eos_token_id"} <= rules.keys():
                del rules["suppress_tokens"]
            if {"suppress_tokens", "begin_suppress_tokens"} <= rules.keys():
                del rules["suppress_tokens"]
            set_rules(model, patch, rules)
            for prompt in PROMPTS:
                assert engine_answer(model, prompt, 97) == generated(model, prompt, 97)


def test_what_is_not_done_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    GenerationRules.of(model)
    monkeypatch.setattr(model.generation_config, "encoder_repetition_penalty", 1.5)
    with pytest.raises(UsageError, match=r"encoder_repetition_penalty 1.5") as refusal:
        GenerationRules.of(model)
    assert refusal.value.hint


@pytest.mark.parametrize("stop_ids", [(), (2,)])
def test_a_row_ahead_is_that_of_the_next_token(stop_ids: tuple[int, ...]) -> None:
    """Of all rules that don't depend on the tokens before."""
    rules = {
        "forced_bos": (None, 3), "forced_eos": (None, 9), "suppressed": ((), (5,)),
        "begin_suppressed": ((), (6,)), "min_length": (0, 3), "min_new_tokens": (0, 2),
    }  # fmt: skip
    params = SamplingParams(seed=4, max_new_tokens=4, min_new_tokens=2, temperature=1.0)
    for values in product(*rules.values()):
        chosen: Any = dict(zip(rules, values, strict=True))
        for length in (1, 2):
            sequence = sequence_of(
                [1] * length, params=params, rules=GenerationRules(**chosen), stop_ids=stop_ids
            )
            for place in range(3):
                assert sequence.can_run_ahead
                ahead = sequence.row(1)
                assert sequence.add(TokenChoice(token=7)) is None
                assert (ahead, ahead.place) == (sequence.row(), place + 1)


@pytest.mark.parametrize(
    "rule",
    [{"bad_words": ((7, 8),)}, {"no_repeat_ngram_size": 2}, {"encoder_no_repeat_ngram_size": 2}],
)
def test_a_rule_that_reads_tokens_needs_them_on_the_host(rule: dict[str, Any]) -> None:
    assert not sequence_of([1, 2], rules=GenerationRules(**rule)).can_run_ahead


def test_penalties_and_grammars_need_tokens_on_the_host() -> None:
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        params = SamplingParams(seed=0, max_new_tokens=3, **{name: 1.5})
        assert not sequence_of([1, 2], params=params).can_run_ahead
    matcher: Any = object()
    assert not sequence_of([1, 2], matcher=matcher).can_run_ahead
    biased = SamplingParams(seed=0, max_new_tokens=3, logit_bias={1: 2.0}, logprobs=2)
    assert sequence_of([1, 2], params=biased).can_run_ahead
