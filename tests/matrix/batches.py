"""Batches: samples in one row, and tokens behind the padding, don't see each other."""

from __future__ import annotations

from typing import Any

import families
import torch
from families import Family
from trainers import make_dataset

from duoka.tuner.data import Batches
from duoka.tuner.data.packing import FAMILIES

LENGTHS = (6, 9, 5)


def check(family: Family) -> None:
    """Check rows with padding for common decoders, and packed rows where they are allowed."""
    model = family.model()
    if family.name in families.FAST and not model.config.is_encoder_decoder:
        check_padding(model)
    if family.name in FAMILIES:
        check_packing(family.model())


def check_padding(model: Any) -> None:
    """Compare the loss of two padded samples with those of each alone."""
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


def check_packing(model: Any) -> None:
    """Compare the logits of a packed row with those of each of its samples alone."""
    data = make_dataset(LENGTHS, seq_length=24)
    micro_batch = Batches(data, batch=1, packing=True)[0].micro_batches[0]
    batch = micro_batch.tensors()
    assert len(micro_batch.rows[0]) == len(LENGTHS)
    with torch.no_grad():
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        packed = model(**inputs, use_cache=False).logits
        start = 0
        for sample in micro_batch.rows[0]:
            ids, _ = micro_batch.dataset.tokens(sample)
            alone = model(torch.tensor(ids)[None].long(), use_cache=False).logits
            torch.testing.assert_close(
                packed[:, start : start + len(ids)], alone, rtol=0, atol=1e-4
            )
            start += len(ids)
