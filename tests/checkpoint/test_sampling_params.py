from __future__ import annotations

import pytest

from duoka.checkpoint.sampling_params import Sampling
from duoka.errors import UsageError


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
    assert Sampling(temperature=temperature).is_greedy


def test_above_it_samples() -> None:
    assert not Sampling(temperature=2e-4).is_greedy


def test_a_checkpoint_recommends() -> None:
    published = {"do_sample": True, "temperature": 0.8, "top_p": 0.8, "max_length": 128000}
    assert Sampling.recommended(published) == Sampling(temperature=0.8, top_p=0.8)
    assert Sampling.recommended(published, temperature=0.0) == Sampling(top_p=0.8)
    assert Sampling.recommended(None, seed=3, top_k=None) == Sampling(seed=3)
    assert Sampling.recommended({"temperature": 0.6}).is_greedy


def test_a_recommendation_without_sense_is_not_taken() -> None:
    odd = {"do_sample": True, "temperature": "hot", "top_p": 7, "top_k": -2}
    assert Sampling.recommended(odd) == Sampling()
