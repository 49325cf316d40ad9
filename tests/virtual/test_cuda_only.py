"""Recurrent networks equal the CPU's, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from duoka import virtual


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(world: virtual.World, kind: type[nn.RNNBase], bias: bool) -> None:
    torch.manual_seed(0)
    layer = kind(5, 6, num_layers=2, bias=bias, batch_first=True)
    x = torch.randn(3, 4, 5)
    results = []
    for device in ("cpu", "vgpu:1"):
        layer.zero_grad()
        layer.to(device)
        out, state = layer(x.to(device))
        (out.square().sum() + sum(item.sum() for item in state)).backward()
        gradients = [p.grad.cpu().clone() for p in layer.parameters() if p.grad is not None]
        results.append([out.detach().cpu(), *gradients])
        del out, state
    assert len(results[0]) == len(results[1]) == 1 + (8 if bias else 4)
    for expected, found in zip(*results, strict=True):
        assert torch.allclose(expected, found, atol=1e-5)


def test_cells(world: virtual.World) -> None:
    x = torch.randn(3, 5)
    for cell in (nn.LSTMCell(5, 6), nn.GRUCell(5, 6)):
        with torch.no_grad():
            expected = cell(x)
            found = cell.to("vgpu:0")(x.to("vgpu:0"))
        if isinstance(expected, tuple):
            expected, found = expected[0], found[0]
        assert torch.allclose(found.cpu(), expected, atol=1e-5)


def test_packed_sequences_keep_their_lengths_on_the_cpu(world: virtual.World) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(4, 3, batch_first=True)
    x, lengths = torch.randn(2, 5, 4), torch.tensor([5, 3])
    results = []
    for device in ("cpu", "vgpu:0"):
        start = x.to(device).detach().requires_grad_()
        packed = nn.utils.rnn.pack_padded_sequence(start, lengths, batch_first=True)
        assert packed.batch_sizes.device == torch.device("cpu")
        out, _ = nn.utils.rnn.pad_packed_sequence(layer.to(device)(packed)[0], batch_first=True)
        out.square().sum().backward()
        assert start.grad is not None
        results.append((out.detach().cpu(), start.grad.cpu()))
        layer.zero_grad()
        del out, packed, start
    for expected, found in zip(*results, strict=True):
        assert torch.allclose(expected, found, atol=1e-5)
