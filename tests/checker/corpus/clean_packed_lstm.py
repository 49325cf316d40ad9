"""A packed LSTM: the lengths are on the CPU, where `pack_padded_sequence` wants them."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, x, lengths):
        start = x.new_zeros(2, x.shape[0], x.shape[-1])
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = self.lstm(packed, (start, torch.zeros_like(start)))
        return pad_packed_sequence(out, batch_first=True)[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.encoder = Encoder(6)

    def forward(self, ids, lengths):
        return self.encoder(self.embed(ids), lengths)


PLACEMENT = {"embed": 0, "encoder": 1}
TRAIN = False


def build():
    return Model()


def inputs():
    return {"ids": torch.randint(0, 10, (2, 4)), "lengths": torch.tensor([4, 2])}
