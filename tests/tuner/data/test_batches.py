from __future__ import annotations

from collections import Counter
from typing import Any

import families
import pytest
import torch
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from duoka.errors import UsageError
from duoka.tuner.data import Batches, Dataset, MicroBatch, Step

PACKINGS = pytest.mark.parametrize("packing", [False, True])


def samples_of(step: Step) -> list[int]:
    return [s for micro_batch in step.micro_batches for row in micro_batch.rows for s in row]


def rows_of(step: Step) -> list[tuple[int, ...]]:
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


@pytest.mark.parametrize(("batch", "micro_batch"), [(3, 2), (0, 1), (2, 0)])
def test_what_makes_no_batch(make_dataset: Any, batch: int, micro_batch: int) -> None:
    with pytest.raises(UsageError, match="can't be cut into micro-batches"):
        Batches(make_dataset([5]), batch=batch, micro_batch=micro_batch)


def test_tensors(make_dataset: Any) -> None:
    data: Dataset = make_dataset([5, 11])
    ids, is_trained = (torch.from_numpy(array) for array in (data.ids, data.is_trained))
    labels = torch.where(is_trained, ids, -100).long()
    (whole,) = Batches(data, batch=2, micro_batch=2, shuffle=False)[0].micro_batches
    tensors = whole.tensors()
    assert set(tensors) == {"input_ids", "labels"}
    assert tensors["input_ids"].tolist() == [
        ids[:5].tolist() + [0] * 11,
        ids[5:].tolist() + [0] * 5,
    ]
    assert tensors["labels"].tolist() == [
        labels[:5].tolist() + [-100] * 11,
        labels[5:].tolist() + [-100] * 5,
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


@pytest.mark.parametrize("seq_length", [9, 64, 100, 130, 2048, 5000])
def test_rows_have_few_lengths(make_dataset: Any, seq_length: int) -> None:
    longest = range(2, seq_length + 1, max(1, seq_length // 200))
    data = make_dataset(longest, seq_length)
    lengths = {MicroBatch(data, ((at,),), False).length for at in range(len(data))}
    assert len(lengths) <= 16
    assert max(lengths) <= seq_length
    assert all(length % 8 == 0 or length == seq_length for length in lengths)
    for at, tokens in enumerate(longest):
        assert MicroBatch(data, ((at,),), False).length >= tokens
        assert MicroBatch(data, ((at,),), True).length == seq_length + 1, "always one"


# A tokens' own attention is all that may reach it: what is behind it must not count.
@pytest.mark.parametrize("name", families.sample(["llama", *sorted(families.FAST)[:40]]))
def test_padding_is_not_seen(name: str, make_dataset: Any) -> None:
    model: Any = families.build(name)
    if model.config.is_encoder_decoder:
        return
    data = make_dataset([6, 11], seq_length=24)
    (both,) = Batches(data, batch=2, micro_batch=2, shuffle=False)[0].micro_batches
    with torch.no_grad():
        loss = model(**both.tensors(), use_cache=False).loss * both.trained_tokens
        alone = 0.0
        for sample in range(2):
            ids, is_trained = (torch.from_numpy(array) for array in data.tokens(sample))
            labels = torch.where(is_trained, ids, -100).long()[None]
            single = model(ids[None].long(), labels=labels, use_cache=False).loss
            alone += single * int(data.trained_tokens[sample])
    torch.testing.assert_close(loss, alone, rtol=1e-4, atol=1e-4)
