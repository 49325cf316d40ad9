from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from duoka.tuner.data import Batches, Dataset, OptimizerStep, TrainingMicroBatch

PACKINGS = pytest.mark.parametrize("packing", [False, True])


def samples_of(step: OptimizerStep) -> list[int]:
    return [s for micro_batch in step.micro_batches for row in micro_batch.rows for s in row]


def rows_of(step: OptimizerStep) -> list[tuple[int, ...]]:
    return [row for micro_batch in step.micro_batches for row in micro_batch.rows]


@PACKINGS
def test_every_sample_comes_once_an_epoch(make_dataset: Any, packing: bool) -> None:
    data = make_dataset([9, 3, 30, 12, 5, 5, 8, 20, 31, 2, 17, 4, 6])
    batches = Batches(data, batch=4, micro_batch=2, packing=packing, seed=3)
    number = batches.steps_per_epoch
    assert number == -(-batches.num_rows // 4)
    epochs = [[batches[epoch * number + step] for step in range(number)] for epoch in range(3)]
    orders = []
    for epoch, steps in enumerate(epochs):
        order = [sample for step in steps for sample in samples_of(step)]
        assert sorted(order) == list(range(13))
        orders.append(order)
        assert {step.epoch for step in steps} == {epoch}
        sizes = [len(rows_of(step)) for step in steps]
        assert sizes == [4] * (number - 1) + [batches.num_rows - 4 * (number - 1)]
    assert len({tuple(order) for order in orders}) == 3
    # From any step on, and in another process.
    again = Batches(data, batch=4, micro_batch=2, packing=packing, seed=3)
    assert rows_of(again[number + 1]) == rows_of(epochs[1][1])
    assert rows_of(again[0]) == rows_of(epochs[0][0])
    other = Batches(data, batch=4, micro_batch=2, packing=packing, seed=4)
    assert samples_of(other[0]) != samples_of(epochs[0][0])


@pytest.mark.parametrize(
    ("weight", "numbers"),
    [(0.5, [2, 2]), (1.5, [6, 6]), (0.75, [3, 3, 3, 3]), (2, [8]), (0.001, [1, 1, 1, 1])],
)
def test_weights_of_files(make_dataset: Any, weight: float, numbers: list[int]) -> None:
    """`numbers` are the samples drawn from the second file in each epoch."""
    data = replace(
        make_dataset([5, 6, 7, 8, 9, 10]),
        file_numbers=np.array([0, 0, 1, 1, 1, 1], np.int32),
        files=("a.jsonl", "b.jsonl"),
        weights=(1.0, weight),
    )
    batches = Batches(data, batch=4, seed=3)
    total: Counter[int] = Counter()
    for epoch, number in enumerate(numbers):
        start = epoch * batches.steps_per_epoch
        steps = [batches[start + step] for step in range(batches.steps_per_epoch)]
        drawn = Counter(sample for step in steps for sample in samples_of(step))
        assert {step.epoch for step in steps} == {epoch}
        assert drawn[0] == drawn[1] == 1
        of_file = [drawn[sample] for sample in range(2, 6)]
        assert sum(of_file) == number
        assert max(of_file) - min(of_file) <= 1
        total += drawn
    # After these epochs all samples of the file were drawn equally often.
    assert len({total[sample] for sample in range(2, 6)}) == 1
    again = Batches(data, batch=4, seed=3)
    assert [samples_of(again[step]) for step in range(3)] == [
        samples_of(batches[step]) for step in range(3)
    ]
    assert data.fingerprint != replace(data, weights=()).fingerprint


def test_weights_of_packed_samples(make_dataset: Any) -> None:
    data = replace(make_dataset([5, 6, 7]), weights=(2.0,))
    batches = Batches(data, batch=1, packing=True)
    steps = [batches[step] for step in range(batches.steps_per_epoch)]
    assert sorted(sample for step in steps for sample in samples_of(step)) == [0, 0, 1, 1, 2, 2]


def test_without_shuffling_it_is_the_files_order(make_dataset: Any) -> None:
    batches = Batches(make_dataset([5] * 5), batch=2, shuffle=False)
    assert [samples_of(batches[step]) for step in range(4)] == [[0, 1], [2, 3], [4], [0, 1]]
    assert batches[0].micro_batches[1].places == ["a.jsonl:2"]


def test_replicas_share_a_step(make_dataset: Any) -> None:
    batches = Batches(make_dataset([5, 6, 7, 8, 9, 10, 11]), batch=4, shuffle=False)
    for step in (batches[0], batches[1]):
        shares = [step.of_replica(replica, 2) for replica in range(2)]
        assert Counter(m.rows for share in shares for m in share) == Counter(
            m.rows for m in step.micro_batches
        )
        assert sum(m.trained_tokens for share in shares for m in share) == step.trained_tokens
    assert [m.rows for m in batches[1].of_replica(1, 2)] == [((5,),)]
    assert batches[1].of_replica(3, 4) == (), "there are three micro-batches"


def test_tensors(make_dataset: Any) -> None:
    data: Dataset = make_dataset([5, 11])
    ids, is_trained = (torch.from_numpy(array) for array in (data.ids, data.is_trained))
    labels = torch.where(is_trained, ids, -100).long()
    (whole,) = Batches(data, batch=2, micro_batch=2, shuffle=False)[0].micro_batches
    tensors = whole.tensors()
    assert set(tensors) == {"input_ids", "labels"}
    assert tensors["input_ids"].tolist() == [
        ids[:5].tolist() + [0] * 6,
        ids[5:].tolist(),
    ]
    assert tensors["labels"].tolist() == [
        labels[:5].tolist() + [-100] * 6,
        labels[5:].tolist(),
    ]
    (packed,) = Batches(data, batch=1, packing=True)[0].micro_batches
    assert packed.rows == ((1, 0),)
    tensors = packed.tensors()
    assert tensors["input_ids"].tolist() == [[*ids[5:].tolist(), *ids[:5].tolist(), *[0] * 17]]
    assert tensors["position_ids"].tolist() == [[*range(11), *range(5), *range(17)]]
    assert tensors["labels"].tolist() == [
        [*labels[5:].tolist(), *labels[:5].tolist(), *[-100] * 17]
    ]
    assert {tensor.dtype for tensor in tensors.values()} == {torch.int64}


@settings(max_examples=examples(50))
@given(
    lengths=st.lists(st.integers(2, 50), min_size=1, max_size=20),
    micro_batch=st.integers(1, 3),
    packing=st.booleans(),
)
def test_what_is_counted_is_what_the_loss_takes(
    make_dataset: Any, lengths: list[int], micro_batch: int, packing: bool
) -> None:
    data = make_dataset(lengths, seq_length=50)
    batches = Batches(data, batch=2 * micro_batch, micro_batch=micro_batch, packing=packing)
    trained = tokens = 0
    for step in range(batches.steps_per_epoch):
        for part in batches[step].micro_batches:
            labels = part.tensors()["labels"]
            # Losses compare what is said at a place with the label of the next one.
            assert int((labels[:, 1:] != -100).sum()) == part.trained_tokens > 0
            assert part.tokens <= labels.numel()
            trained, tokens = trained + part.trained_tokens, tokens + part.tokens
    assert trained == int(data.trained_tokens.sum())
    assert tokens == len(data.ids)


def around(median: int, spread: float, longest: int, number: int = 3000) -> list[int]:
    """Lengths of samples as data of a kind has them; with a seed."""
    drawn = np.random.default_rng(7).lognormal(np.log(median), spread, number).round()
    return [*drawn.clip(4, longest).astype(int).tolist(), longest]


KINDS: dict[str, list[int]] = {
    "huanhuan": around(28, 0.45, 225),
    "alpaca": around(75, 0.7, 1024),
    "very long tail": around(3000, 1.2, 65536),
    "uniform": np.random.default_rng(7).integers(2, 2049, 3000).tolist(),
    "equal and odd": [65] * 50,
    "one row": [33],
    "two lengths": [20] * 320 + [2000] * 32,
}


@pytest.mark.parametrize("micro_batch", [1, 4, 8])
@pytest.mark.parametrize("name", KINDS)
def test_little_is_padding(make_dataset: Any, name: str, micro_batch: int) -> None:
    """A tenth at most of single rows; of several not much more than their own lengths ask for."""
    data = make_dataset(KINDS[name], seq_length=65536)
    batches = Batches(data, batch=8, micro_batch=micro_batch, seed=5)
    steps = [batches[step] for step in range(batches.steps_per_epoch)]
    parts = [part for step in steps for part in step.micro_batches]
    padded = sum(len(part.rows) * part.length for part in parts)
    least = sum(
        len(part.rows) * max(int(data.lengths[sample]) for (sample,) in part.rows) for part in parts
    )
    assert padded <= 1.1 * least, padded / least
    assert micro_batch > 1 or least == len(data.ids)
    assert len({part.length for part in parts}) <= 32


def test_rows_of_a_step_run_at_once_by_length(make_dataset: Any) -> None:
    data = make_dataset(KINDS["huanhuan"], seq_length=225)
    batches = Batches(data, batch=8, micro_batch=4, seed=5)
    single = Batches(data, batch=8, micro_batch=1, seed=5)
    for step in range(batches.steps_per_epoch):
        samples = samples_of(batches[step])
        assert sorted(samples) == sorted(samples_of(single[step])), "what is learnt stays"
        lengths = [data.lengths[sample] for sample in samples]
        assert lengths == sorted(lengths)


@pytest.mark.parametrize("seq_length", [9, 64, 100, 130, 2048, 5000])
def test_rows_have_few_lengths(make_dataset: Any, seq_length: int) -> None:
    longest = range(2, seq_length + 1, max(1, seq_length // 200))
    data = make_dataset(longest, seq_length)
    lengths = {TrainingMicroBatch(data, ((at,),), False).length for at in range(len(data))}
    assert len(lengths) <= 32
    assert max(lengths) <= seq_length, "as was planned"
    assert all(length % 8 == 0 or length < 128 or length == seq_length for length in lengths)
    for at, tokens in enumerate(longest):
        assert TrainingMicroBatch(data, ((at,),), False).length >= tokens
        assert TrainingMicroBatch(data, ((at,),), True).length == seq_length + 1, "always one"


@settings(max_examples=examples(60))
@given(st.lists(st.integers(2, 127), min_size=1, max_size=12))
def test_no_other_lengths_have_less_padding(make_dataset: Any, lengths: list[int]) -> None:
    """Against all choices of as few lengths; with one fewer more than 5 % is padding."""
    data = make_dataset(lengths, seq_length=127)

    def tokens(tops: Sequence[int]) -> int:
        return sum(min(top for top in tops if top >= length) for length in lengths)

    def fewest(number: int) -> int:
        others = sorted(set(lengths))[:-1]
        if number == len(others) + 1:
            return sum(lengths)
        return min(tokens([*tops, max(lengths)]) for tops in combinations(others, number - 1))

    chosen = data.row_lengths
    assert chosen == sorted(set(chosen))
    assert tokens(chosen) == fewest(len(chosen)) <= 1.05 * sum(lengths)
    assert len(chosen) == 1 or fewest(len(chosen) - 1) > 1.05 * sum(lengths)
