"""`pack_padded_sequence` takes its lengths from the CPU alone, and gets them from a GPU."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, True, False)  # fault: mixed-devices
        return pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.encoder = nn.Embedding(9, 4), Encoder(4)

    def forward(self, ids, lengths):
        return self.encoder(self.embed(ids), lengths)


PLACEMENT = {"embed": 0, "encoder": 1}
TRAIN = False
UNJUDGED = "a virtual GPU packs on the CPU"


def build():
    return Model()


def inputs():
    return {"ids": torch.randint(0, 9, (2, 4)), "lengths": torch.tensor([4, 2])}
