"""Autograd, checkpointing, compilation and function transforms."""

import torch
from torch import nn
from seeded import case


# case: fault_checkpoint_closure
"""Non-re-entrant checkpointing of a local function that closes over a tensor of the first card.

`checkpoint` runs `segment`, which adds the embedding's output (cuda:0) to the block's (cuda:1).
"""

from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.embed = nn.Embedding(15, width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, ids):
        h0 = self.embed(ids)

        def segment(h):
            h = self.second(torch.relu(self.first(h)))
            return torch.add(h, h0)  # fault: mixed-devices

        out = checkpoint(segment, h0, use_reentrant=False)
        return {"loss": out.square().mean()}


case(
    Model,
    {"embed": 0, "first": 0, "second": 1},
    lambda: {"ids": torch.randint(0, 15, (2, 3))},
    train=True,
)


# case: fault_checkpoint_reentrant
"""Re-entrant activation checkpointing around a block that makes its mask on the CPU.

The fault is met in the forward pass, without gradients, and again when backward recomputes.
"""

from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        scores = (q @ k.mT).masked_fill(future, -1e4)  # fault: mixed-devices
        return x + self.out(scores.softmax(-1) @ v)


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.inp = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x):
        h = self.inp(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return h.pow(2).mean()


case(Model, {"inp": 0, "blocks.0": 0, "blocks.1": 1}, [(2, 4, 3)], train=True)


# case: fault_function_backward
"""A custom `autograd.Function` that fails only in backward.

Forward moves the mask properly, but backward multiplies the gradient, on cuda:1, with the mask as
it was: on the CPU.
"""


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask):
        ctx.mask = mask
        return x * mask.to(x.device)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.mask, None  # fault: mixed-devices


class Pruned(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.keep = (torch.arange(width) % 2).float()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x):
        h = Masked.apply(self.second(self.first(x)), self.keep)
        return {"loss": h.pow(2).sum(), "hidden": h}


case(Pruned, {"first": 0, "second": 1}, {"x": (2, 6)}, train=True)


# case: fault_function_forward
"""A custom `autograd.Function` whose forward multiplies across cards.

The activation's slopes are a parameter on cuda:0, its input comes from cuda:1.
"""


class Slope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(x, slope)
        return x * slope  # fault: mixed-devices

    @staticmethod
    def backward(ctx, grad):
        x, slope = ctx.saved_tensors
        return grad * slope.to(grad.device), (grad * x).sum(0).to(slope.device)


class Net(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(width))
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x):
        h = self.fc2(self.fc1(x))
        return Slope.apply(h, self.slope).square().mean()


case(Net, {"slope": "cuda:0", "fc1": "cuda:0", "fc2": "cuda:1"}, [(4, 5)], train=True)


# case: fault_function_gradient_device
"""A custom "bridge" whose backward leaves the gradient on the wrong card.

Forward brings its input from cuda:0 to cuda:1. Backward returns what came in, on cuda:1; autograd
refuses a gradient on another device than the input's.
"""


class Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, like):
        return x.to(like.device)

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), None  # fault: gradient


class Split(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.left = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        h = Bridge.apply(self.left(x), self.scale.detach())
        return (h * self.scale).pow(2).mean()


PLACEMENT = {"left": 0, "scale": 1}
TRAIN = True
UNJUDGED = "the wrong gradient would reach C++ code of autograd's, which can't pass on the error"
build = Split
SHAPES = [(3, 6)]


# case: fault_set_data
"""Fast weights written through `.data` and `torch.no_grad`: the update comes from another card."""


class FastWeights(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fast = nn.Linear(width, width, bias=False)
        self.slow = nn.Linear(width, width)

    def forward(self, x):
        y = self.slow(x)
        update = y.detach().t() @ y.detach()
        self.fast.weight.data.add_(update, alpha=0.01)  # fault: in-place
        return self.fast(x)


case(FastWeights, {"fast": 0, "slow": 1}, [(2, 4)])


# case: fault_vmap
"""`torch.vmap` over a function that closes over a tensor of another card."""


class Pairwise(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.keys, self.queries = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        keys = self.keys(x)

        def nearest(query):
            return (keys - query).square().sum(-1).amin()  # fault: mixed-devices

        return torch.vmap(nearest)(self.queries(x))


case(Pairwise, {"keys": 0, "queries": 1}, [(3, 4)])


# case: clean_checkpointed
"""Activation checkpointing, both ways, around blocks that are placed."""

from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, scale):
        return x + scale * self.fc(self.norm(x))


class Model(nn.Module):
    def __init__(self, width=6, depth=4):
        super().__init__()
        self.inp = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        h = self.inp(x)
        for index, block in enumerate(self.blocks):
            h = checkpoint(block, h, 0.5, use_reentrant=index % 2 == 0)
        return h.pow(2).mean()


case(
    Model,
    {"inp": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1},
    [(2, 4, 3)],
    train=True,
)


# case: clean_custom_function
"""A custom `autograd.Function` that crosses cards, and brings gradients back."""


class Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, like):
        ctx.home = x.device
        return x.to(like.device)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.home), None


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, limit):
        ctx.save_for_backward(x, limit)
        return torch.minimum(x, limit)

    @staticmethod
    def backward(ctx, grad):
        x, limit = ctx.saved_tensors
        inside = x < limit
        return grad * inside, (grad * ~inside).sum(0)


class Split(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.left = nn.Linear(width, width)
        self.limit = nn.Parameter(torch.ones(width))

    def forward(self, x):
        h = Bridge.apply(self.left(x), self.limit.detach())
        return Clipped.apply(h, self.limit).pow(2).mean()


case(Split, {"left": 0, "limit": 1}, [(3, 6)], train=True)


# case: clean_functional_transforms
"""`torch.func` and `vmap` on one card: per-sample gradients of a linear layer."""

from torch.func import functional_call, grad, vmap


class PerSample(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        h = self.embed(x).to(self.head.weight.device).detach()
        parameters = {name: p.detach() for name, p in self.head.named_parameters()}

        def loss(weights, row):
            return functional_call(self.head, weights, (row,)).square().sum()

        return vmap(grad(loss), in_dims=(None, 0))(parameters, h)["weight"].norm(dim=(1, 2))


case(PerSample, {"embed": 0, "head": 1}, [(5, 3)])


# case: clean_inference_mode
"""A forward in inference mode, in half precision."""


class Half(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.RMSNorm(width)

    @torch.inference_mode()
    def forward(self, ids):
        h = self.embed(ids)
        for layer in self.layers:
            h = h + layer(self.norm(h.to(self.norm.weight.device)).to(h.device)).to(h.device)
        return h.float().softmax(-1)


case(
    lambda: Half().to(torch.bfloat16),
    {"embed": 0, "layers.0": 0, "layers.1": 1, "layers.2": 0, "norm": 1},
    lambda: (torch.randint(0, 10, (2, 3)),),
)


# case: clean_autocast_dropout
"""Automatic mixed precision by the tensors' kind of device, and dropout that is on."""


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        with torch.autocast(device_type=x.device.type, dtype=torch.bfloat16):
            y = self.drop(self.fc(x).relu())
        return x + y.to(x.dtype)


case(lambda: nn.Sequential(Block(6), Block(6)), {"0": 0, "1": 1}, [(4, 6)])


# case: clean_sparse_gradients
"""An embedding with sparse gradients, and an embedding bag with offsets."""


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(12, 4, mode="sum")
        self.table = nn.Embedding(12, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, items, offsets):
        h = self.bag(items, offsets)
        h = h.to(self.out.weight.device) + self.table(items[: len(offsets)]).to(self.out.weight)
        return self.out(h).square().mean()


case(
    Bags,
    {"bag": 0, "table": 0, "out": 1},
    lambda: {"items": torch.randint(0, 12, (7,)), "offsets": torch.tensor([0, 3, 5])},
    train=True,
)
