"""Tensors and modules made in forward, on the CPU where nobody says otherwise."""

import torch
from torch import nn
from seeded import case


# case: fault_eye_graph
"""A graph convolution that adds self-loops with `torch.eye` on the CPU.

The adjacency matrix is an argument of the placed layer and thus on its card; `eye` isn't.
"""


class GraphConv(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.lin = nn.Linear(inside, outside)

    def forward(self, nodes, adjacency):
        looped = adjacency + torch.eye(adjacency.shape[0])  # fault: mixed-devices
        degree = looped.sum(-1).rsqrt()
        normal = degree[:, None] * looped * degree[None, :]
        return normal @ self.lin(nodes)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GraphConv(5, 8)
        self.conv2 = GraphConv(8, 2)

    def forward(self, nodes, adjacency):
        return self.conv2(self.conv1(nodes, adjacency).relu(), adjacency)


PLACEMENT = {"conv1": "cuda:0", "conv2": "cuda:1"}
build = GCN


def inputs():
    ring = torch.roll(torch.eye(6), 1, 0)
    return {"nodes": torch.randn(6, 5), "adjacency": ring + ring.t()}


# case: fault_randn_noise
"""A variational autoencoder whose noise is drawn on the CPU.

`torch.randn(mu.shape)` has no device, and is multiplied with a GPU deviation.
"""


class VAE(nn.Module):
    def __init__(self, inside=12, latent=3):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inside, 16), nn.ReLU())
        self.mu = nn.Linear(16, latent)
        self.log_var = nn.Linear(16, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 16), nn.ReLU(), nn.Linear(16, inside))

    def reparameterise(self, mu, log_var):
        std = torch.exp(0.5 * log_var)
        return mu + std * torch.randn(mu.shape)  # fault: mixed-devices

    def forward(self, x):
        h = self.encoder(x)
        mu, log_var = self.mu(h), self.log_var(h)
        out = self.decoder(self.reparameterise(mu, log_var))
        kl = -0.5 * (1 + log_var - mu.pow(2) - log_var.exp()).mean()
        return {"out": out, "loss": (out - x.to(out.device)).pow(2).mean() + kl.to(out.device)}


case(VAE, {"encoder": 0, "mu": 0, "log_var": 0, "decoder": 1}, [(4, 12)], train=True)


# case: fault_layer_made_in_forward
"""A projection that is made on first use, when the width is known: its weights are on the CPU."""


class Lazy(nn.Module):
    def __init__(self, outside):
        super().__init__()
        self.outside = outside
        self.gain = nn.Parameter(torch.ones(outside))
        self.proj = None

    def forward(self, x):
        if self.proj is None:
            self.proj = nn.Linear(x.shape[-1], self.outside)
        return self.gain * self.proj(x)  # fault: mixed-devices


case(lambda: nn.Sequential(nn.Linear(4, 6), Lazy(3)), {"0": 0, "1": 1}, [(2, 4)])


# case: fault_norm_made_in_forward
"""`nn.LayerNorm(width)(x)` written as if it were a function: fresh weights on the CPU each time."""


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = nn.LayerNorm(x.shape[-1])(x)  # fault: mixed-devices
        return x + self.fc(y)


case(lambda: nn.Sequential(Block(4), Block(4)), {"0": 0, "1": 1}, [(2, 4)])


# case: fault_many_layers
"""Eight layers with the same fault on the same line: one fault, met eight times.

Each makes its sinks on the CPU.
"""


class SinkLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.score = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x):
        scores = self.score(x)
        sinks = torch.zeros(*scores.shape[:-1], 1)
        share = torch.cat((sinks, scores), -1).softmax(-1)[..., 1:]  # fault: mixed-devices
        return x + share * self.value(x)


class Deep(nn.Module):
    def __init__(self, width=4, depth=8):
        super().__init__()
        self.layers = nn.ModuleList(SinkLayer(width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


case(Deep, {f"layers.{i}": f"cuda:{i // 3}" for i in range(8)}, [(2, 3, 4)])


# case: clean_factories_with_device
"""Every tensor that forward makes is made where its partner is."""


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.register_buffer("inv_freq", 1 / 10 ** torch.linspace(0, 1, width // 2))

    def forward(self, x):
        length, options = x.shape[1], {"device": x.device, "dtype": x.dtype}
        t = torch.arange(length, device=self.inv_freq.device)
        angle = torch.outer(t, self.inv_freq)
        q, k, v = (self.qkv(x) * torch.cat((angle.cos(), angle.sin()), -1).repeat(1, 3)).chunk(
            3, -1
        )
        mask = torch.full((length, length), float("-inf"), **options).triu(1)
        bias = torch.eye(length, **options) + torch.tensor([0.0], **options)
        state = x.new_zeros(length) + torch.zeros_like(mask[0]) + torch.linspace(0, 1, length).to(x)
        return x + (q @ k.mT + mask + bias + state).softmax(-1) @ v


case(lambda: nn.Sequential(Attention(6), Attention(6)), {"0": 0, "1": 1}, [(2, 4, 6)])


# case: clean_linear_algebra
"""Decompositions, solves and determinants on the second card."""


class Whitening(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = self.fc(x)
        y = y - y.mean(0)
        cov = y.t() @ y / (len(y) - 1) + 0.1 * torch.eye(y.shape[1], device=y.device)
        factor = torch.linalg.cholesky(cov)
        white = torch.linalg.solve_triangular(factor, y.t(), upper=False).t()
        return white + torch.logdet(cov) + torch.linalg.matrix_norm(cov)


case(lambda: nn.Sequential(nn.Linear(3, 3), Whitening(3)), {"0": 0, "1": 1}, [(8, 3)])


# case: clean_cpu_scalars
"""CPU tensors without dimensions mix with any card, from either side and in place."""

import math


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.eps = torch.tensor(1e-5)
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        scale = torch.tensor(1 / math.sqrt(x.shape[-1]))
        y = scale * self.fc(x) + self.eps
        y = torch.where(y > 0, y, torch.tensor(0.01))
        y = torch.clamp(y, max=torch.tensor(5.0)).masked_fill(y.isnan(), torch.tensor(0.0))
        y.mul_(torch.tensor(0.5))
        return x + y


case(lambda: nn.Sequential(Block(4), Block(4)), {"0": "cuda:0", "1": "cuda:1"}, [(3, 4)])


# case: clean_copies_across
"""`copy_` and assignments to slices copy from any device to any other."""


class Collect(nn.Module):
    def __init__(self, width=6, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.register_buffer("last", torch.zeros(2, width), persistent=False)

    def forward(self, x):
        outputs = x.new_empty(len(self.layers), *x.shape)
        for index, layer in enumerate(self.layers):
            x = layer(x).tanh()
            outputs[index] = x
        outputs[0, :, :2] = x[:, :2]
        self.last.copy_(x.detach())
        outputs[..., -1] = torch.tensor([3.0, 4.0])
        return outputs


case(
    lambda: Collect().requires_grad_(False),
    {"last": 0, "layers.0": 0, "layers.1": 1, "layers.2": 1},
    [(2, 6)],
)


# case: clean_device_of_parameters
"""Modules that ask their parameters for a device, and a `with torch.device(...)` block."""


class Start(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.cell = nn.GRUCell(width, width)

    @property
    def device(self):
        return next(self.parameters()).device

    def forward(self, x):
        state = torch.zeros(x.shape[0], self.width, device=self.device)
        with torch.device(self.cell.weight_hh.device):
            ramp = torch.linspace(0, 1, self.width)
        for step in x.to(self.device).unbind(1):
            state = self.cell(step, state) * ramp
        return state


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.start = Start(6)

    def forward(self, x):
        return self.start(self.inp(x))


case(Model, {"inp": "cuda:0", "start": "cuda:1"}, [(2, 3, 4)])
