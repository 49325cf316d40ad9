"""Operators called in unusual ways, compiled code, and a detour over the CPU."""

import torch
from torch import nn
from seeded import case


# case: fault_bmm_out
"""`torch.bmm(..., out=...)` into scratch space that was made for another card.

The scratch tensor is a buffer of the model's root on cuda:0, the factors are on cuda:1.
"""


class Scratch(nn.Module):
    def __init__(self, width=4, length=3):
        super().__init__()
        self.register_buffer("scratch", torch.empty(2, length, length), persistent=False)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.requires_grad_(False)

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        scores = torch.bmm(q, k.transpose(1, 2), out=self.scratch)  # fault: in-place
        return scores.softmax(-1)


case(Scratch, {"scratch": 0, "q": 1, "k": 1}, [(2, 3, 4)])


# case: fault_foreach
"""`torch._foreach_add` over lists: the pairs are on two cards."""


class Averaged(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fast, self.slow = nn.Linear(width, width), nn.Linear(width, width)

    @torch.no_grad()
    def blended(self):
        fast, slow = list(self.fast.parameters()), list(self.slow.parameters())
        return torch._foreach_add(slow, fast, alpha=0.1)  # fault: mixed-devices

    def forward(self, x):
        weight, bias = self.blended()
        return nn.functional.linear(x.to(weight.device), weight, bias) + self.slow(x).to(weight)


case(Averaged, {"fast": 0, "slow": 1}, [(2, 4)])


# case: fault_torch_ops
"""Operators called by their registered names, past PyTorch's Python functions."""


class Raw(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return torch.ops.aten.mul.Tensor(a, b)  # fault: mixed-devices


case(Raw, {"a": 0, "b": 1}, [(2, 4)])


# case: fault_operation_by_name
"""The operation is looked up by a name from the configuration: `getattr(torch, name)`."""

import operator


class Merge(nn.Module):
    def __init__(self, how, width=4):
        super().__init__()
        self.how = how
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        merge = getattr(torch, self.how)
        ab = merge(self.a(x), self.b(x))  # fault: mixed-devices
        return operator.sub(ab, self.c(x))  # fault: mixed-devices


case(lambda: Merge("minimum"), {"a": 0, "b": 1, "c": 2}, [(2, 4)])


# case: fault_custom_operator
"""An operator registered with `torch.library.custom_op`, called with tensors of two cards."""


# A name of its own each time it is loaded: another registration frees what the first one calls.
@torch.library.custom_op(f"duoka_corpus::blend_{id(globals())}", mutates_args=())
def blend(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return 0.5 * a + 0.5 * b


@blend.register_fake
def _(a, b):
    return torch.empty_like(a)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return blend(self.a(x), self.b(x))  # fault: mixed-devices


case(lambda: Model().requires_grad_(False), {"a": 0, "b": 1}, [(2, 4)])


# case: fault_numpy_of_a_gpu_tensor
"""`.numpy()` on a GPU tensor: CUDA's tensors have to be brought to the CPU first."""

import numpy as np


class Quantile(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = self.fc(x)
        values = y.detach().numpy()  # fault: mixed-devices
        return y - float(np.median(values))


PLACEMENT = {"0": 0, "1": 1}
UNJUDGED = "the error is no mixture that could be settled by moving"


def build():
    return nn.Sequential(nn.Linear(4, 4), Quantile(4))


SHAPES = [(2, 4)]


# case: fault_compiled_block
"""A block that is wrapped in `torch.compile`.

It builds its positions on the CPU; compiled or not, the sum mixes them with a GPU tensor.
"""


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        ramp = torch.linspace(0.0, 1.0, x.shape[-1])
        return self.fc(x) + ramp  # fault: mixed-devices


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.block = torch.compile(Block(width))

    def forward(self, x):
        return self.block(self.stem(x))


case(Model, {"stem": 0, "block": 1}, [(2, 6)])


# case: fault_compiled_function
"""A function at module level with `@torch.compile`, as fused activations are written.

Compiled or not, the bias of cuda:0 meets states of cuda:1 in it.
"""


@torch.compile(dynamic=True)
def bias_gelu(x, bias):
    return nn.functional.gelu(x + bias)  # fault: mixed-devices


class Model(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return bias_gelu(self.down(bias_gelu(self.up(x), self.bias)), self.bias)


case(Model, {"bias": 0, "up": 0, "down": 1}, [(2, 5)])


# case: clean_numpy_round_trip
"""A detour through numpy that comes back to the card that it left."""

import numpy as np


class Quantile(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = self.fc(x)
        levels = np.quantile(y.detach().cpu().numpy(), [0.1, 0.9], axis=0)
        low, high = torch.from_numpy(levels).to(device=y.device, dtype=y.dtype)
        return (y - low) / (high - low + 1.0)


case(lambda: nn.Sequential(Quantile(4), Quantile(4)), {"0": 0, "1": 1}, [(8, 4)])


# case: clean_post_processing_on_cpu
"""Results are brought to the CPU and decoded there with plain CPU tables."""


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.anchors = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])]
        self.backbone = nn.Conv2d(3, 4, 3, 2, 1)
        self.heads = nn.ModuleList(nn.Conv2d(4, 2, 1) for _ in range(2))

    def forward(self, image):
        h = self.backbone(image).relu()
        found = []
        for head, anchor in zip(self.heads, self.anchors, strict=True):
            raw = head(h).flatten(2).mT.cpu()
            grid = torch.arange(raw.shape[1]).float()[:, None]
            found.append(raw.exp() * anchor + grid)
        return torch.cat(found, dim=1)


case(Detector, {"backbone": 0, "heads.0": 0, "heads.1": 1}, [(1, 3, 8, 8)])


# case: clean_gpu_checks
"""Code that asserts that it runs on CUDA, and asks for its current device and capability."""


class Kernel(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = self.fc(x)
        assert y.device.type != "cpu"
        with torch.autocast(y.device.type, enabled=False):
            y = y.float().square()
        if torch.cuda.is_available():
            torch.cuda.synchronize(y.device)
        return y.to(x.dtype)


PLACEMENT = {"0": 0, "1": 1}
UNJUDGED = "its code wants a GPU"


def build():
    return nn.Sequential(Kernel(), Kernel())


SHAPES = [(2, 4)]


# case: clean_compiled
"""A block wrapped in `torch.compile`, with nothing wrong in it."""


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return self.fc(x) + torch.linspace(0.0, 1.0, x.shape[-1], device=x.device)


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.block = torch.compile(Block(width))

    def forward(self, x):
        return self.block(self.stem(x))


case(Model, {"stem": 0, "block": 1}, [(2, 6)])
