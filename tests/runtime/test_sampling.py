from __future__ import annotations

import dataclasses

import pytest
import torch

from duoka.errors import UsageError
from duoka.runtime import Generator, Sampling


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"max_new_tokens": 0},
        {"seed": -1},
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-5, 1e-4])
def test_near_zero_is_greedy(temperature: float) -> None:
    sampling = Sampling(temperature=temperature)
    assert sampling.is_greedy
    assert sampling.options()["do_sample"] is False


def test_above_it_samples() -> None:
    options = Sampling(temperature=0.8, top_p=0.9, top_k=40).options()
    assert options == {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 40}


def test_a_checkpoint_recommends() -> None:
    published = {"do_sample": True, "temperature": 0.8, "top_p": 0.8, "max_length": 128000}
    assert Sampling.recommended(published) == Sampling(temperature=0.8, top_p=0.8)
    assert Sampling.recommended(published, temperature=0.0) == Sampling(top_p=0.8)
    assert Sampling.recommended(None, seed=3, top_k=None) == Sampling(seed=3)
    assert Sampling.recommended({"temperature": 0.6}).is_greedy


def test_a_recommendation_without_sense_is_not_taken() -> None:
    odd = {"do_sample": True, "temperature": "hot", "top_p": 7, "top_k": -2}
    assert Sampling.recommended(odd) == Sampling()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 2e-4, 1e-3])
def test_low_temperatures_give_the_greedy_answer(generator: Generator, temperature: float) -> None:
    prompt = generator.prompt("什么是设备映射？")
    greedy = generator.answer([prompt])
    assert generator.answer([prompt], Sampling(temperature=temperature, seed=1)) == greedy


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 0.8])
def test_sampling_holds_in_16_bit(
    generator: Generator, dtype: torch.dtype, temperature: float
) -> None:
    model = generator.model
    fresh = type(model)(model.config).to(dtype)
    ids = torch.tensor([generator.prompt("What is a KV cache?")])
    made = fresh.generate(
        ids, do_sample=True, temperature=temperature, max_new_tokens=8, eos_token_id=None
    )
    assert made.shape == (1, ids.shape[1] + 8)
    if temperature == 1e-5:
        greedy = fresh.generate(ids, do_sample=False, max_new_tokens=8, eos_token_id=None)
        # Two logits that are equal in 16 bit are a tie, which either may win.
        same = (made == greedy).all() or _ties(fresh, greedy)
        assert same


def _ties(model: torch.nn.Module, ids: torch.Tensor) -> bool:
    with torch.no_grad():
        top = model(ids).logits.float().topk(2, dim=-1).values
    return bool((top[..., 0] - top[..., 1] < 1e-2).any())


def test_a_seed_repeats_an_answer_and_leaves_other_random_numbers_alone(
    generator: Generator,
) -> None:
    prompt = generator.prompt("What is NVLink?")
    hot = Sampling(temperature=2.0, seed=5)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    first = generator.answer([prompt], hot)
    assert torch.equal(torch.rand(3), expected)
    assert generator.answer([prompt], hot) == first
    assert generator.answer([prompt], dataclasses.replace(hot, seed=6)) != first
