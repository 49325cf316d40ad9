"""Hooks, closures, decorators and whatever else runs beside forward."""

import torch
import torch.nn.functional as F
from torch import nn
from seeded import case


# case: fault_forward_hook_steering
"""Activation steering: a forward hook adds a vector that the hook's closure holds on the CPU.

The hook runs after a placed layer; its vector is on no card.
"""


def steer(vector, strength):
    def hook(module, args, output):
        return output + strength * vector  # fault: mixed-devices

    return hook


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


PLACEMENT = {"layers.0": 0, "layers.1": 0, "layers.2": 1}


def build():
    net = Net()
    for layer in list(net.layers)[1:]:
        layer.register_forward_hook(steer(torch.randn(6), 2.0))
    return net


SHAPES = [(2, 6)]


# case: fault_forward_pre_hook
"""A forward pre-hook that blends a layer's input with the one that it saw in another layer.

The pre-hook of a module inside the placed block on cuda:1 reads what the first block's kept on
cuda:0.
"""


class Memory:
    def __init__(self):
        self.seen = None

    def __call__(self, module, args):
        (x,) = args
        if self.seen is not None:
            x = 0.5 * (x + self.seen)  # fault: mixed-devices
        self.seen = x
        return (x,)


class Block(nn.Module):
    def __init__(self, width, memory):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)
        self.fc.register_forward_pre_hook(memory)

    def forward(self, x):
        return x + self.fc(self.norm(x))


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.memory = Memory()
        self.blocks = nn.ModuleList(Block(width, self.memory) for _ in range(2))

    def forward(self, x):
        self.memory.seen = None
        for block in self.blocks:
            x = block(x)
        return x


case(Net, {"blocks.0": 0, "blocks.1": 1}, [(2, 6)])


# case: fault_full_backward_hook
"""A full backward hook scales the gradient with a tensor on the CPU."""


class Scaling:
    def __init__(self, width):
        self.by = torch.linspace(0.5, 1.0, width)

    def __call__(self, module, grad_input, grad_output):
        (grad,) = grad_input
        return (grad * self.by,)  # fault: mixed-devices


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.b(self.a(x).tanh()).square().mean()


PLACEMENT = {"a": 0, "b": 1}
TRAIN = True


def build():
    model = Model()
    model.b.register_full_backward_hook(Scaling(4))
    return model


SHAPES = [(2, 4)]


# case: fault_tensor_hook
"""A tensor hook rescales the gradient with a parameter of another card.

Forward is fine. In backward the gradient of the second stage's input is on cuda:1, the scale that
the lambda reads on cuda:0.
"""


class Second(nn.Module):
    def __init__(self, width, owner):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.scale = lambda: owner.grad_scale

    def forward(self, x):
        h = self.fc(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * self.scale())  # fault: mixed-devices
        return h.tanh()


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.register_buffer("grad_scale", torch.linspace(0.5, 1.5, width))
        self.first = nn.Linear(width, width)
        self.second = Second(width, self)

    def forward(self, x):
        return {"loss": self.second(self.first(x)).pow(2).mean()}


case(Net, {"grad_scale": 0, "first": 0, "second": 1}, {"x": (3, 6)}, train=True)


# case: fault_closure_steering
"""A closure that keeps the first layer's output and adds it to later ones.

`make_skip` remembers a tensor of cuda:0; the function that it returns is called on cuda:1.
"""


def make_skip(remembered, strength):
    def add(x):
        return x + strength * remembered  # fault: mixed-devices

    return add


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, width)

    def forward(self, x):
        x = self.first(x).relu()
        skip = make_skip(x, 0.1)
        x = skip(self.second(x).relu())
        return skip(self.third(x))


case(Net, {"first": 0, "second": 1, "third": 1}, [(3, 6)])


# case: fault_context_manager
"""A context manager notes the states that pass, and a method compares the first and the last.

The first state is on cuda:0, the last one on cuda:1; `mse_loss` gets both.
"""

from contextlib import contextmanager


class Consistent(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.trace = None
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    @contextmanager
    def tracing(self):
        self.trace = []
        try:
            yield self.trace
        finally:
            self.trace = None

    def step(self, layer, x):
        x = layer(x).tanh()
        if self.trace is not None:
            self.trace.append(x)
        return x

    def forward(self, x):
        with self.tracing() as states:
            for layer in self.layers:
                x = self.step(layer, x)
            drift = F.mse_loss(states[0], states[-1])  # fault: mixed-devices
        return {"loss": drift, "out": x}


case(
    Consistent,
    {"layers.0": "cuda:0", "layers.1": "cuda:1", "layers.2": "cuda:1"},
    {"x": (2, 6)},
    train=True,
)


# case: fault_conditional_import_helper
"""A helper bound at run time: a method is replaced on the instance by a plain function."""

import types


def patched(self, x):
    y = self.fc(x)
    return y * torch.arange(1.0, y.shape[-1] + 1)  # fault: mixed-devices


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def transform(self, x):
        return self.fc(x)

    def forward(self, x):
        return x + self.transform(x)


PLACEMENT = {"0": 0, "1": 1}


def build():
    model = nn.Sequential(Layer(4), Layer(4))
    model[1].transform = types.MethodType(patched, model[1])
    return model


SHAPES = [(2, 4)]


# case: clean_hooks
"""Hooks of all kinds that follow the tensors that they get."""


def steer(vector):
    return lambda module, args, output: output + vector.to(output)


def centred(module, args):
    return (args[0] - args[0].mean(-1, keepdim=True),)


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
            if x.requires_grad:
                x.register_hook(lambda grad: grad.clamp(-1, 1) * 0.5)
        return x.pow(2).mean()


PLACEMENT = {"layers.0": 0, "layers.1": 1, "layers.2": 1}
TRAIN = True


def build():
    net = Net()
    net.layers[2].register_forward_hook(steer(torch.randn(6)))
    net.layers[1].register_forward_pre_hook(centred)
    return net


SHAPES = [(2, 6)]


# case: clean_closure_over_parameter
"""A closure and a lambda over parameters, called on the parameters' own card."""


def gated(parameter):
    def apply(x):
        return x * parameter.sigmoid()

    return apply


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.zeros(width))
        self.scale = lambda x: x * self.gain + self.fc.bias

    def forward(self, x):
        return gated(self.gain)(self.fc(x)) + self.scale(x)


case(lambda: nn.Sequential(Layer(5), Layer(5)), {"0": 0, "1": 1}, [(2, 5)])


# case: clean_parametrizations
"""Weight norm, spectral norm and a parametrization of the project's own."""

from torch.nn.utils import parametrizations, parametrize


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(width, width))
        self.spectral = parametrizations.spectral_norm(nn.Linear(width, width))
        self.symmetric = nn.Linear(width, width)
        parametrize.register_parametrization(self.symmetric, "weight", Symmetric())

    def forward(self, x):
        return self.symmetric(self.spectral(self.normed(x).relu()).relu()).square().mean()


case(Model, {"normed": "cuda:0", "spectral": "cuda:1", "symmetric": "cuda:1"}, [(3, 6)], train=True)


# case: clean_random_depth
"""Stochastic depth with Python's and PyTorch's random numbers; unique values and counts."""

import random


class Stochastic(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.embed = nn.Embedding(9, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, ids):
        values, inverse, counts = ids.unique(return_inverse=True, return_counts=True)
        h = self.embed(values)[inverse] * counts[inverse].unsqueeze(-1)
        for layer in self.layers:
            if random.random() < 0.9 and torch.rand(()) < 0.9:
                h = h.to(layer.weight.device) + layer(h)
        return h.sort(dim=1).values, torch.bincount(ids.flatten())


case(
    Stochastic,
    {"embed": 0, "layers.0": 0, "layers.1": 1, "layers.2": 0, "layers.3": 1},
    lambda: (torch.randint(0, 9, (2, 5)),),
)
