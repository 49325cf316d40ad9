"""Recurrent states, and models that remember their last call."""

import torch
import torch.nn.functional as F
from torch import nn
from seeded import case


# case: fault_second_call
"""A cell that remembers its last output, fine when it is called first.

`forward` calls the pair of cells twice; on the second round the first cell's memory holds what the
second one wrote, on cuda:1, through the shared object.
"""


class Shared:
    value = None


class Cell(nn.Module):
    def __init__(self, width, shared):
        super().__init__()
        self.shared = shared
        self.fc = nn.Linear(width, width)

    def forward(self, x, *, writes):
        y = self.fc(x)
        if self.shared.value is not None and not writes:
            y = y + self.shared.value  # fault: mixed-devices
        if writes:
            self.shared.value = y
        return y.tanh()


class Loop(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.shared = Shared()
        self.reader, self.writer = Cell(width, self.shared), Cell(width, self.shared)

    def forward(self, x):
        self.shared.value = None
        for _ in range(2):
            x = self.writer(self.reader(x, writes=False), writes=True)
        return x


case(Loop, {"reader": 0, "writer": 1}, [(2, 5)])


# case: fault_second_question
"""A model with a memory: the first question is fine, the second one meets what was remembered.

`inputs` gives a function that asks twice. The first answer is remembered on the last card; the
second question's embedding, on the first card, is added to it.
"""


class Remembering(nn.Module):
    def __init__(self, vocab=20, width=6):
        super().__init__()
        self.memory = None
        self.embed = nn.Embedding(vocab, width)
        self.body = nn.GRU(width, width, batch_first=True)

    def forward(self, ids):
        h = self.embed(ids)
        if self.memory is not None:
            h = h + self.memory  # fault: mixed-devices
        h, last = self.body(h)
        self.memory = last.transpose(0, 1)
        return h


PLACEMENT = {"embed": 0, "body": 1}
UNJUDGED = "its inputs are a function"
build = Remembering


def twice(model):
    device = model.embed.weight.device
    for _ in range(2):
        out = model(torch.randint(0, 20, (1, 4), device=device))
    return out


def inputs():
    return twice


# case: fault_dataclass_state
"""Decoder state in a dataclass whose method blends old and new.

The state was made from the encoder's output on cuda:0 and isn't a tensor, so that nothing moves it
to the cell on cuda:1.
"""

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass
class State:
    hidden: Tensor
    steps: int = 0

    def blended(self, new: Tensor, gate: Tensor) -> "State":
        hidden = torch.lerp(self.hidden, new, gate)  # fault: mixed-devices
        return State(hidden, self.steps + 1)


class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.candidate = nn.Linear(width, width)

    def forward(self, x, state):
        return state.blended(self.candidate(x).tanh(), self.gate(x).sigmoid())


class Recurrent(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.start = nn.Linear(width, width)
        self.cell = Cell(width)

    def forward(self, xs):
        state = State(self.start(xs[:, 0]))
        for step in range(1, xs.shape[1]):
            state = self.cell(xs[:, step], state)
        return state.hidden


case(Recurrent, {"start": 0, "cell": 1}, [(2, 4, 5)])


# case: fault_zeros_state
"""A selective state-space scan that starts from `torch.zeros` on the CPU.

The first step mixes the CPU state with GPU decays; from then on the state is on the GPU, so the
line is at fault once a layer.
"""


class Mixer(nn.Module):
    def __init__(self, width, num_states=4):
        super().__init__()
        self.a_log = nn.Parameter(torch.rand(width, num_states))
        self.in_proj = nn.Linear(width, width)
        self.dt_proj = nn.Linear(width, width)
        self.bc_proj = nn.Linear(width, 2 * num_states)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x):
        u, dt = F.silu(self.in_proj(x)), F.softplus(self.dt_proj(x))
        b, c = self.bc_proj(x).chunk(2, dim=-1)
        decay = torch.exp(-dt.unsqueeze(-1) * self.a_log.exp())
        drive = (dt * u).unsqueeze(-1) * b.unsqueeze(2)
        state = torch.zeros(x.shape[0], *self.a_log.shape)
        outputs = []
        for step in range(x.shape[1]):
            state = state * decay[:, step] + drive[:, step]  # fault: mixed-devices
            outputs.append(torch.einsum("bdn,bn->bd", state, c[:, step]))
        return x + self.out_proj(torch.stack(outputs, dim=1))


case(lambda: nn.Sequential(Mixer(6), Mixer(6)), {"0": "cuda:0", "1": "cuda:1"}, [(2, 4, 6)])


# case: fault_lstm_start_state
"""An LSTM inside a placed block gets a start state made on the CPU.

The block brings its own arguments, but the LSTM is not placed by itself; cuDNN refuses a hidden
state on another device.
"""


class Captioner(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x):
        start = torch.zeros(1, x.shape[0], self.width)
        out, _ = self.lstm(x, (start, start))  # fault: mixed-devices
        return out


case(lambda: nn.Sequential(nn.Linear(6, 6), Captioner(6)), {"0": 0, "1": 1}, [(2, 3, 6)])


# case: fault_own_call_method
"""A metric that is no module but callable, and keeps a running tensor of the first card it met."""


class Running:
    def __init__(self):
        self.total = None

    def __call__(self, x):
        mean = x.mean(0)
        self.total = mean if self.total is None else self.total + mean  # fault: mixed-devices
        return self.total


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        running = Running()
        for layer in self.layers:
            x = layer(x).tanh()
            running(x)
        return x, running.total


case(Model, {"layers.0": 0, "layers.1": 1, "layers.2": 1}, [(2, 4)])


# case: fault_buffer_overwritten
"""A running memory that forward replaces with a CPU tensor.

The buffer starts on its card; `self.memory = torch.zeros(...)` puts a tensor of the CPU in its
place, and the following update reads it.
"""


class MemoryLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("memory", torch.zeros(1, width))
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        if self.memory.shape[0] != x.shape[0]:
            self.memory = torch.zeros(x.shape[0], x.shape[-1])
        y = self.fc(x)
        return y + 0.9 * self.memory  # fault: mixed-devices


case(lambda: nn.Sequential(nn.Linear(4, 4), MemoryLayer(4)), {"0": 0, "1": 1}, [(3, 4)])


# case: fault_packed_lengths_on_gpu
"""`pack_padded_sequence` takes its lengths from the CPU alone, and gets them from a GPU."""

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
UNJUDGED = "a virtual GPU packs on the CPU"
build = Model


def inputs():
    return {"ids": torch.randint(0, 9, (2, 4)), "lengths": torch.tensor([4, 2])}


# case: clean_state_space
"""A gated scan whose start state is made beside its input, with lazily made tables by layer."""


class Scan(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.decay = nn.Parameter(torch.rand(width))
        self.inp = nn.Linear(width, 2 * width)
        self.window = None

    def forward(self, x):
        if self.window is None or self.window.device != x.device:
            self.window = torch.hann_window(x.shape[1], device=x.device)
        value, gate = self.inp(x * self.window[:, None]).chunk(2, -1)
        state, outputs = x.new_zeros(x.shape[0], x.shape[-1]), []
        for step in range(x.shape[1]):
            state = state * self.decay.sigmoid() + value[:, step]
            outputs.append(state * gate[:, step].sigmoid())
        return x + torch.stack(outputs, 1)


case(lambda: nn.Sequential(Scan(4), Scan(4)), {"0": 0, "1": 1}, [(2, 5, 4)])


# case: clean_packed_lstm
"""A packed LSTM: the lengths are on the CPU, where `pack_padded_sequence` wants them."""

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


case(
    Model,
    {"embed": 0, "encoder": 1},
    lambda: {"ids": torch.randint(0, 10, (2, 4)), "lengths": torch.tensor([4, 2])},
)


# case: clean_state_is_kept
"""A model that counts its calls and keeps what it saw: a check must leave none of it behind."""


class Counting(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.calls, self.seen, self.last = 0, [], None
        self.options = {"warm": False}
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.a, self.b = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x):
        self.calls += 1
        self.steps += 1
        self.options["warm"] = True
        y = self.b(self.a(x))
        self.seen.append(tuple(y.shape))
        self.last = y.detach()
        return {"loss": y.square().mean()}


case(Counting, {"steps": 0, "a": 0, "b": 1}, {"x": (5, 4)}, train=True)
