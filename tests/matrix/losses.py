"""Chunked loss: loss and gradients of a head in chunks are those of the model's own loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import families
import pytest
import torch
from families import Family
from torch import Tensor

from duoka.forecast import workload
from duoka.models import chunked_loss

# Their code adds a bias to logits, or takes a log of their softmax, or leaves columns out.
WHOLE = {
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "inkling2_text", "led", "marian",
    "mbart", "mvp", "pegasus", "plbart", "prophetnet",
}  # fmt: skip
LEFT_OUT = {"big_bird": "its attention is another one from its second call on"}


def note_chunks(patch: pytest.MonkeyPatch) -> list[slice]:
    """Make chunks of four tokens, and return the list of those that were taken."""
    taken: list[slice] = []
    inherited = chunked_loss.ChunkedHead.chunks

    def noted(self: Any, num_rows: int) -> Iterator[slice]:
        for rows in inherited(self, num_rows):
            taken.append(rows)
            yield rows

    patch.setattr(workload, "_LOSS_CHUNK_TOKENS", 4)
    patch.setattr(chunked_loss.ChunkedHead, "chunks", noted)
    return taken


def learn(model: Any, **options: Any) -> dict[str, Tensor]:
    """The loss and all gradients of a batch of which two tokens don't count."""
    device = next(model.parameters()).device
    batch = families.inputs(model)
    labels = batch.pop("decoder_input_ids", batch["input_ids"]).clone()
    labels[0, :2] = -100
    torch.manual_seed(0)
    model.zero_grad()
    loss = model(
        **{name: value.to(device) for name, value in batch.items()},
        labels=labels.to(device),
        **options,
    ).loss
    loss.backward()
    found = {"loss": loss.detach().cpu()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.detach().cpu()
    return found


def assert_alike(expected: dict[str, Tensor], found: dict[str, Tensor], tolerance: float) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        worst = (found[name].float() - value.float()).abs().max().item()
        assert worst <= tolerance * max(1.0, value.abs().max().item()), name


def check(family: Family) -> None:
    """Compare in training mode; the heads of some families stay whole."""
    with pytest.MonkeyPatch.context() as patch:
        chunks = note_chunks(patch)
        model = family.model().train()
        expected = learn(model)
        chunked_loss.chunk_loss(model)
        assert_alike(expected, learn(model), 1e-5)
        assert (family.name in WHOLE) == (not chunks)
