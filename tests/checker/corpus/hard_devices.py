"""Devices written into the code."""

import torch
import torch.nn.functional as F
from torch import nn
from seeded import case


# case: fault_hard_cuda_method
"""Positions are moved with `.cuda()` before they index a parameter.

`.cuda()` is cuda:0; the position table belongs to a layer on cuda:1, and an index on another card
is refused.
"""


class PatchEmbed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.proj = nn.Linear(12, width)

    def forward(self, patches):
        return self.proj(patches)


class Encoder(nn.Module):
    def __init__(self, width, size=16):
        super().__init__()
        self.position = nn.Parameter(torch.randn(size, width))
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        where = torch.arange(x.shape[1]).cuda()  # origin
        x = x + self.position[where]  # fault: hard-coded-device
        return self.layer(x)


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = PatchEmbed(8)
        self.encoder = Encoder(8)

    def forward(self, patches):
        return self.encoder(self.embed(patches)).mean(1)


case(ViT, {"embed": 0, "encoder": 1}, {"patches": (2, 4, 12)})


# case: fault_hard_device_number
"""An accumulator made with `device=0` in a layer on the second card.

The in-place addition writes a tensor of cuda:1 into one of cuda:0.
"""


class Ensemble(nn.Module):
    def __init__(self, width, num_members):
        super().__init__()
        self.width = width
        self.members = nn.ModuleList(nn.Linear(width, width) for _ in range(num_members))

    def forward(self, x):
        total = torch.zeros(x.shape[0], self.width, device=0)  # origin
        for member in self.members:
            total += member(x)  # fault: in-place
        return total / len(self.members)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.ensemble = Ensemble(8, 3)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.ensemble(self.stem(x).relu()))


case(Net, {"stem": 0, "ensemble": 1, "head": 1}, [(3, 5)])


# case: fault_hard_device_object
"""A module-level `DEVICE = torch.device("cuda", 0)` that the decoder's loop uses.

The start state is made on cuda:0; the cell runs on cuda:1.
"""


DEVICE = torch.device("cuda", 0)


class Decoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.recur = nn.Linear(2 * width, width)

    def forward(self, memory):
        state = torch.zeros((memory.shape[0], self.width), device=DEVICE)  # origin
        for step in range(memory.shape[1]):
            both = torch.cat((memory[:, step], state), dim=1)  # fault: hard-coded-device
            state = torch.tanh(self.recur(both))
        return state


case(lambda: nn.Sequential(nn.Conv1d(4, 6, 1), Decoder(6)), {"0": 0, "1": 1}, [(2, 4, 6)])


# case: fault_hard_device_string
"""A sliding-window mask made with `device="cuda"` in each layer.

"cuda" means cuda:0. That is right in the first layer; in the second, on cuda:1, the mask meets
scores of another card.
"""


class WindowAttention(nn.Module):
    def __init__(self, width, window):
        super().__init__()
        self.window = window
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def window_mask(self, length):
        ones = torch.ones(length, length, dtype=torch.bool, device="cuda")  # origin
        return ones.tril() & ones.triu(-self.window)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2)
        mask = self.window_mask(x.shape[1])
        scores = scores.masked_fill(~mask, -1e9)  # fault: hard-coded-device
        return x + self.proj(scores.softmax(-1) @ v)


case(
    lambda: nn.Sequential(WindowAttention(8, 2), WindowAttention(8, 2)),
    {"0": "cuda:0", "1": "cuda:1"},
    [(1, 6, 8)],
)


# case: fault_hard_to_cuda
"""A residual layer that brings its input to "cuda" before its own projection.

On cuda:1 the projection's weight and its input are on two cards: `.to("cuda")` takes the input
away from the card that the layer lies on.
"""


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = self.norm(x)
        y = self.fc(y.to("cuda"))  # fault: hard-coded-device
        return x + y.relu()


class Tabular(nn.Module):
    def __init__(self):
        super().__init__()
        self.bins = nn.Embedding(10, 6)
        self.block = Residual(6)

    def forward(self, bins):
        return self.block(self.bins(bins).mean(1))


case(Tabular, {"bins": "cuda:0", "block": "cuda:1"}, lambda: {"bins": torch.randint(0, 10, (4, 3))})


# case: fault_hard_to_number
"""Labels are sent to card 0 with `.to(0)`, where the logits aren't.

The head is on cuda:1, so the loss gets its target from another card.
"""


class Tagger(nn.Module):
    def __init__(self, vocab=25, width=8, tags=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, ids, labels):
        h, _ = self.lstm(self.embed(ids))
        logits = self.head(h)
        labels = labels.to(0)  # origin
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # fault: hard-coded-device


case(
    Tagger,
    {"embed": 0, "lstm": 0, "head": 1},
    lambda: {"ids": torch.randint(0, 25, (2, 6)), "labels": torch.randint(0, 4, (2, 6))},
    train=True,
)


# case: fault_cuda_if_available
"""The usual `"cuda" if torch.cuda.is_available() else "cpu"` inside a layer of the second card.

On a machine with cards this is cuda:0, without one it is the CPU; the layer is on cuda:1, so that
the subtraction fails either way.
"""


class Prototypes(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.count = count
        self.reduce = nn.Linear(width, 2)

    def forward(self, x):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        corners = torch.ones(self.count, 2, device=device).cumsum(0)  # origin
        distance = self.reduce(x)[:, None] - corners  # fault: mixed-devices
        return distance.pow(2).sum(-1)


case(
    lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Prototypes(6, 3)),
    {"0": "cuda:0", "2": "cuda:1"},
    [(4, 6)],
)


# case: fault_current_device
"""Positions on `f"cuda:{torch.cuda.current_device()}"`: the first card if nobody sets another."""


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, width))

    def forward(self, x):
        device = f"cuda:{torch.cuda.current_device()}"
        steps = torch.arange(x.shape[1], device=device)  # origin
        return x + self.table[steps]  # fault: hard-coded-device


case(lambda: nn.Sequential(nn.Linear(4, 4), Layer(4)), {"0": 0, "1": 1}, [(2, 3, 4)])


# case: fault_device_context
"""`with torch.device("cuda"):` around factories, in a layer of the second card."""


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        with torch.device("cuda"):  # origin
            ramp = torch.linspace(0, 1, x.shape[-1])  # origin
            shift = torch.zeros(x.shape[-1])  # origin
        y = self.fc(x) * ramp  # fault: mixed-devices
        return torch.maximum(y, shift)  # fault: mixed-devices


case(lambda: nn.Sequential(nn.Linear(4, 4), Layer(4)), {"0": 0, "1": 1}, [(2, 4)])


# case: warning_cuda_call_right_here
"""`.cuda()` on a tensor that is needed on cuda:0 anyway.

It works as long as the embedding lies on the first card.
"""


class Positions(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens = nn.Embedding(20, width)
        self.table = nn.Parameter(torch.randn(16, width))

    def forward(self, ids):
        steps = torch.arange(ids.shape[1]).cuda()  # warning: hard-coded-device
        return self.tokens(ids) + self.table.index_select(0, steps)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = Positions(8)
        self.body = nn.LSTM(8, 8, batch_first=True)

    def forward(self, ids):
        return self.body(self.positions(ids))[0]


case(Model, {"positions": "cuda:0", "body": "cuda:1"}, lambda: (torch.randint(0, 20, (2, 5)),))


# case: warning_explicit_pipeline
"""Model parallelism by hand: `.to("cuda:1")` between the halves, right on this placement alone."""


class ByHand(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        h = self.first(x).relu()
        h = h.to("cuda:1")  # warning: hard-coded-device
        return self.second(h) * self.scale


case(ByHand, {"first": "cuda:0", "second": "cuda:1", "scale": "cuda:1"}, [(2, 4)])


# case: warning_hard_device_right_here
"""A mask made with `device="cuda:0"` by a layer that happens to lie on cuda:0.

Nothing fails on this placement; on another one it would.
"""


class Causal(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        size = x.shape[1]
        mask = torch.ones(size, size, device="cuda:0").triu(1)  # warning: hard-coded-device
        return x + (q @ k.mT - 1e9 * mask).softmax(-1) @ v


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Causal(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        return self.mlp(self.attention(x))


case(Model, {"attention": "cuda:0", "mlp": "cuda:1"}, [(1, 4, 8)])


# case: warning_hard_spellings
"""Every way to write a hard-coded device, in a layer that happens to lie on the first card."""


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = self.fc(x)
        y = y + torch.ones(self.width).to("cuda")  # warning: hard-coded-device
        y = y + torch.ones(self.width).to(device="cuda:0")  # warning: hard-coded-device
        y = y + torch.ones(self.width).cuda(0)  # warning: hard-coded-device
        y = y + torch.ones(self.width).to(torch.device("cuda", 0))  # warning: hard-coded-device
        y = y + torch.as_tensor([1.0], device="cuda")  # warning: hard-coded-device
        y = y + torch.tensor([1.0], device=0)  # warning: hard-coded-device
        y = y + torch.empty_like(y, device="cuda").zero_()  # warning: hard-coded-device
        return y + y.new_zeros(self.width, device="cuda:0")  # warning: hard-coded-device


case(lambda: nn.Sequential(Layer(4), nn.Linear(4, 4)), {"0": 0, "1": 1}, [(2, 4)])
