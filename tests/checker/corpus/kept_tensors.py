"""Constants kept as plain tensors: they stay on the CPU when their module moves."""

import torch
from torch import nn
from seeded import case


# case: fault_table_class_attribute
"""A window function that is an attribute of the class.

`Spectral.window` is made on the CPU at import; both instances multiply GPU frames with it.
"""


class Spectral(nn.Module):
    window = torch.hann_window(8)

    def __init__(self, bins):
        super().__init__()
        self.mel = nn.Linear(8, bins)

    def forward(self, audio):
        frames = audio.unfold(-1, 8, 4)
        return self.mel(frames * self.window)  # fault: mixed-devices


class Audio(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine, self.coarse = Spectral(6), Spectral(3)

    def forward(self, audio):
        return self.fine(audio), self.coarse(audio)


case(Audio, {"fine": 0, "coarse": 1}, [(2, 32)])


# case: fault_table_dict
"""Normalisation statistics kept in a dictionary of tensors.

A dictionary isn't moved with its module; the statistics are read by the decoder on cuda:1.
"""


class Forecaster(nn.Module):
    def __init__(self, features=4):
        super().__init__()
        self.stats = {"mean": torch.randn(features), "scale": torch.rand(features) + 0.5}
        self.encoder = nn.GRU(features, 8, batch_first=True)
        self.decoder = nn.Linear(8, features)

    def forward(self, series):
        _, last = self.encoder(series)
        step = self.decoder(last[-1])
        step = step * self.stats["scale"]  # fault: mixed-devices
        return torch.add(step, self.stats["mean"])  # fault: mixed-devices


case(Forecaster, {"encoder": 0, "decoder": 1}, {"series": (2, 7, 4)})


# case: fault_module_constant
"""A constant of the Python file, made at import, and a nested list of tensors joined in forward."""


COEFFICIENTS = torch.tensor([1.0, 0.5, 0.25])


class Polynomial(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.roots = [[torch.tensor([0.1 * i])] for i in range(4)]

    def forward(self, x):
        powers = torch.stack([self.fc(x) ** k for k in range(3)], dim=-1)
        y = powers @ COEFFICIENTS  # fault: mixed-devices
        roots = torch.cat([root for (root,) in self.roots])
        return y - roots  # fault: mixed-devices


case(lambda: nn.Sequential(nn.Linear(4, 4), Polynomial()), {"0": 0, "1": 1}, [(2, 4)])


# case: fault_default_argument
"""A tensor as a default argument: made once, on the CPU, when the function is defined."""


def smoothed(x, kernel=torch.tensor([0.25, 0.5, 0.25])):  # noqa: B008
    windows = x.unfold(-1, 3, 1)
    return torch.matmul(windows, kernel)  # fault: mixed-devices


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(6, 8), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(smoothed(self.inp(x)))


case(Model, {"inp": 0, "out": 1}, [(2, 6)])


# case: fault_distribution
"""A prior of `torch.distributions` made in `__init__`: its parameters stay on the CPU.

`log_prob` subtracts its mean, on the CPU, from a sample of a GPU; the sample itself is fine.
"""

from torch.distributions import Normal


class Flow(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.prior = Normal(torch.zeros(width), torch.ones(width), validate_args=False)
        self.encoder, self.decoder = nn.Linear(5, 2 * width), nn.Linear(width, 5)

    def forward(self, x):
        mean, log_scale = self.encoder(x).chunk(2, -1)
        posterior = Normal(mean, log_scale.exp(), validate_args=False)
        z = posterior.rsample()
        ratio = posterior.log_prob(z) - self.prior.log_prob(z)  # fault: mixed-devices
        out = self.decoder(z)
        return {"loss": (out - x.to(out.device)).square().mean() + ratio.mean().to(out.device)}


case(Flow, {"encoder": 0, "decoder": 1}, {"x": (4, 5)}, train=True)


# case: fault_two_on_one_line
"""Two faults on one line: each of two products takes a CPU table of its own.

Settling one of them doesn't cure the other.
"""


class Complex(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.phase = [torch.linspace(0, 1, width).cos(), torch.linspace(0, 1, width).sin()]
        self.re, self.im = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        re, im = self.re(x), self.im(x)
        real, imag = re * self.phase[0], im * self.phase[1]  # fault: mixed-devices
        return torch.stack((real, imag), -1)


case(lambda: nn.Sequential(nn.Linear(4, 4), Complex()), {"0": 0, "1": 1}, [(2, 4)])


# case: fault_two_in_sequence
"""Two faults of different causes in one forward.

A table on the CPU is gathered from with GPU indices, and then a skip of cuda:0 meets the last
stage's output on cuda:1.
"""


class Bucketed(nn.Module):
    def __init__(self, width=6, buckets=8):
        super().__init__()
        self.offsets = torch.arange(buckets, dtype=torch.float32)
        self.inp = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x, buckets):
        shift = torch.index_select(self.offsets, 0, buckets)  # fault: mixed-devices
        skip = self.inp(x)
        h = self.out(skip.relu())
        h = h - skip  # fault: mixed-devices
        return h * shift.to(h.device)[:, None]


case(
    Bucketed,
    {"inp": 0, "out": 1},
    lambda: {"x": torch.randn(3, 6), "buckets": torch.tensor([1, 0, 7])},
)


# case: fault_only_on_cuda
"""A fast path that is taken on CUDA alone, with a table that stays on the CPU."""


class Fast(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.scales = torch.linspace(0.5, 1.5, width)

    def forward(self, x):
        y = self.fc(x)
        if y.is_cuda:
            y = y * self.scales  # fault: mixed-devices
        return y


PLACEMENT = {"0": 0, "1": 1}
UNJUDGED = "a virtual GPU isn't CUDA"


def build():
    return nn.Sequential(Fast(), nn.Linear(4, 4))


SHAPES = [(2, 4)]


# case: fault_only_on_cuda_type
"""The same with `device.type == "cuda"`, in a layer of the second card."""


class Fast(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.offset = [torch.ones(width)]

    def forward(self, x):
        y = self.fc(x)
        if x.device.type == "cuda":
            y = torch.sub(y, self.offset[0])  # fault: mixed-devices
        return y


PLACEMENT = {"0": 0, "1": 1}
UNJUDGED = "a virtual GPU isn't CUDA"


def build():
    return nn.Sequential(nn.Linear(4, 4), Fast())


SHAPES = [(2, 4)]


# case: clean_distributions
"""Distributions, their samples and divergences, all made of tensors of one card."""

from torch.distributions import Categorical, Normal, kl_divergence


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head, self.value = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x):
        h = self.trunk(x).tanh()
        policy = Categorical(logits=self.head(h))
        action = policy.sample()
        mean, scale = self.value(h).chunk(2, -1)
        value = Normal(mean, scale.exp())
        prior = Normal(torch.zeros_like(mean), torch.ones_like(scale))
        loss = kl_divergence(value, prior).mean() - policy.log_prob(action).mean()
        return {"loss": loss - 0.01 * policy.entropy().mean()}


case(Agent, {"trunk": 0, "head": 1, "value": 1}, {"x": (4, 5)}, train=True)


# case: clean_fourier
"""Fourier features: complex numbers, FFT and back."""


class SpectralConv(nn.Module):
    def __init__(self, channels, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.cfloat))

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        out = torch.zeros_like(spectrum)
        low = spectrum[..., : self.modes]
        out[..., : self.modes] = torch.einsum("bim,iom->bom", low, self.weight)
        return torch.fft.irfft(out, n=x.size(-1))


class Operator(nn.Module):
    def __init__(self, channels=4):
        super().__init__()
        self.lift = nn.Conv1d(1, channels, 1)
        self.spectral = nn.ModuleList(SpectralConv(channels, 3) for _ in range(2))
        self.local = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(2))

    def forward(self, x):
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = nn.functional.gelu(spectral(x) + local(x))
        return x


case(
    Operator,
    {"lift": 0, "spectral.0": 0, "local.0": 0, "spectral.1": 1, "local.1": 1},
    [(2, 1, 16)],
)
