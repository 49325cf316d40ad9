"""Mixtures of experts, routing, and other choices token by token."""

import torch
import torch.nn.functional as F
from torch import nn
from seeded import case


# case: fault_experts_index_add
"""Mixtral's classical loop: `final.index_add_(0, rows, expert(...) * weight)`.

Expert 1 lies on cuda:1, and its output is weighted with routing weights of cuda:0. If the weighting
goes on where the expert ran, the write into a tensor of cuda:0 fails too, but for that reason
alone: weighted on cuda:0, all is well.
"""


class SparseMoe(nn.Module):
    def __init__(self, width=8, num_experts=2):
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))

    def forward(self, hidden_states):
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        weights, chosen = torch.topk(self.gate(flat).softmax(-1), 2, dim=-1)
        final = torch.zeros_like(flat)
        hot = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            rank, rows = torch.where(hot[number])
            out = expert(flat[rows])
            out = out * weights[rows, rank, None]  # fault: mixed-devices
            final.index_add_(0, rows, out)  # followup
        return final.view_as(hidden_states)


case(
    SparseMoe,
    {"gate": "cuda:0", "experts.0": "cuda:0", "experts.1": "cuda:1"},
    {"hidden_states": (2, 4, 8)},
)


# case: fault_experts_setitem
"""A mixture of experts on two cards: each writes its tokens with `out[rows] = ...`.

An expert's tokens move to its card; what comes back is written into a tensor on cuda:0.
"""


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.w1 = nn.Linear(width, 2 * width, bias=False)
        self.w2 = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)))


class TopOne(nn.Module):
    def __init__(self, width=8, num_experts=4):
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(num_experts))

    def forward(self, x):
        flat = x.flatten(0, 1)
        choice = self.router(flat).argmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero(as_tuple=True)[0]
            out[rows] = expert(flat[rows])  # fault: in-place
        return out.view_as(x)


case(
    TopOne,
    {"router": 0, "experts.0": 0, "experts.1": 0, "experts.2": 1, "experts.3": 1},
    [(2, 16, 8)],
)


# case: fault_where_two_experts
"""Two experts on two cards, chosen token by token with `torch.where`.

Both branches are computed; the first comes out on cuda:0 and the second on cuda:1.
"""


class Switch(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 1)
        self.left = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.right = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        to_left = self.gate(x) > 0
        left, right = self.left(x), self.right(x)
        y = torch.where(to_left, left, right)  # fault: mixed-devices
        return self.norm(y)


case(lambda: Switch(12), {"gate": 0, "left": 0, "right": 1, "norm": 1}, [(2, 7, 12)])


# case: fault_scatter_vote
"""Votes are collected with `scatter_add_` into a tensor made beside the keys.

The keys stay on cuda:0 with the encoder; the scores come from a head on cuda:1.
"""


class Voting(nn.Module):
    def __init__(self, width=6, bins=5):
        super().__init__()
        self.bins = bins
        self.encoder = nn.Linear(width, width)
        self.scorer = nn.Linear(width, 1)

    def forward(self, x, keys):
        scores = self.scorer(self.encoder(x).relu()).squeeze(-1)
        votes = x.new_zeros(x.shape[0], self.bins)
        votes.scatter_add_(1, keys, scores)  # fault: in-place
        return votes.softmax(-1)


case(
    Voting,
    {"encoder": 0, "scorer": 1},
    lambda: {"x": torch.randn(2, 4, 6), "keys": torch.randint(0, 5, (2, 4))},
)


# case: fault_value_branch
"""A branch that depends on a value: tokens above a threshold take a detour.

The detour reads a CPU constant. Inputs make sure that it is taken.
"""


class EarlyExit(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.prior = torch.ones(width) / width
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x, confidence):
        h = self.first(x)
        if confidence.max().item() > 0.5:
            h = torch.maximum(h, self.prior)  # fault: mixed-devices
        return self.second(h)


case(
    EarlyExit,
    {"first": 0, "second": 1},
    lambda: {"x": torch.randn(2, 5), "confidence": torch.tensor([0.2, 0.9])},
)


# case: fault_repeat_interleave
"""Durations that are computed on the CPU and given to `repeat_interleave` of GPU states."""


class Regulator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = self.fc(x)
        durations = torch.arange(1, y.shape[0] + 1)
        return torch.repeat_interleave(y, durations, dim=0)  # fault: mixed-devices


case(lambda: nn.Sequential(nn.Linear(4, 4), Regulator(4)), {"0": 0, "1": 1}, [(3, 4)])


# case: fault_lambda_fusion
"""The way in which two streams are fused is chosen from a table of lambdas.

The chosen lambda multiplies a gate of cuda:1 with a state of cuda:0.
"""


FUSIONS = {
    "sum": lambda a, b: a + b.to(a.device),
    "gate": lambda a, b: a * b.sigmoid(),  # fault: mixed-devices
    "left": lambda a, _: a,
}


class Fused(nn.Module):
    def __init__(self, fusion, width=6):
        super().__init__()
        self.fuse = FUSIONS[fusion]
        self.state = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)

    def forward(self, x):
        return self.fuse(self.state(x), self.gate(x))


case(lambda: Fused("gate"), {"state": 0, "gate": 1}, [(2, 6)])


# case: fault_module_dict_heads
"""Task heads in a `ModuleDict`, spread over the cards, whose outputs are concatenated.

Each head brings its argument to its own card and leaves its output there.
"""


class MultiTask(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, width), nn.SiLU())
        self.heads = nn.ModuleDict(
            {
                "age": nn.Linear(width, 1),
                "income": nn.Linear(width, 2),
                "region": nn.Linear(width, 3),
            }
        )

    def forward(self, x):
        h = self.trunk(x)
        outputs = {task: head(h) for task, head in self.heads.items()}
        return torch.cat(list(outputs.values()), dim=-1)  # fault: mixed-devices


case(
    MultiTask,
    {
        "trunk": "cuda:0",
        "heads.age": "cuda:0",
        "heads.income": "cuda:1",
        "heads.region": "cuda:1",
    },
    {"x": (3, 4)},
)


# case: fault_walrus
"""A walrus in a condition: the norm of the update is divided by that of the state.

The update comes from cuda:1; state and threshold are on cuda:0. A GPU scalar of another card does
not mix, and the division fails before its result is ever compared.
"""


class Fixpoint(nn.Module):
    def __init__(self, width=5, steps=3):
        super().__init__()
        self.steps = steps
        self.inject = nn.Linear(width, width)
        self.update = nn.Linear(width, width)

    def forward(self, x):
        z = self.inject(x).tanh()
        for _ in range(self.steps):
            new = self.update(z).tanh()
            if (change := new.norm() / z.norm()) < 1e-6:  # fault: mixed-devices
                return z * change
            z = new.to(z.device)
        return z


case(Fixpoint, {"inject": 0, "update": 1}, [(2, 5)])


# case: fault_assert_and_format
"""Checks and messages mix devices too: an assertion, and a number in an f-string."""


class Careful(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.message = ""

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        assert not torch.equal(a, b)  # fault: mixed-devices
        self.message = f"{(a - b).abs().mean().item():.3f}"  # fault: mixed-devices
        return b


case(Careful, {"a": 0, "b": 1}, [(2, 4)])


# case: clean_experts_moved
"""Mixtral's loop with both moves that it needs."""


class SparseMoe(nn.Module):
    def __init__(self, width=8, num_experts=3):
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))

    def forward(self, hidden_states):
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        weights, chosen = torch.topk(self.gate(flat).softmax(-1), 2, dim=-1)
        final = torch.zeros_like(flat)
        hot = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            rank, rows = torch.where(hot[number])
            out = expert(flat[rows]).to(flat.device)
            final.index_add_(0, rows, out * weights[rows, rank, None])
        return final.view_as(hidden_states)


case(
    SparseMoe,
    {"gate": 0, "experts.0": 0, "experts.1": 1, "experts.2": 1},
    {"hidden_states": (2, 4, 8)},
)


# case: clean_cpu_indices
"""CPU tensors may index a GPU tensor: positions and masks, for reading and for writing."""


class Reordered(nn.Module):
    def __init__(self, width=8, groups=2):
        super().__init__()
        self.order = torch.arange(width).view(groups, -1).t().flatten()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = self.fc(x)[..., self.order]
        y = y[:, torch.tensor([True, False, True])]
        z = torch.zeros_like(y)
        z[:, torch.tensor([1])] = y[:, torch.tensor([0])]
        z[:, [0]] = 2.0
        return z


case(lambda: nn.Sequential(nn.Linear(8, 8), Reordered()), {"0": 0, "1": 1}, [(2, 3, 8)])


# case: clean_values_read
"""Model code that reads values: `.item()`, `.tolist()`, conditions and lengths."""


class Ragged(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.encoder = nn.Linear(width, width)

    def forward(self, ids):
        lengths = (ids != 0).sum(-1).tolist()
        h = self.encoder(self.embed(ids))
        longest = int(max(lengths))
        rows = [row[:length].mean(0) for row, length in zip(h, lengths, strict=True)]
        scale = h[:, :longest].abs().max().item()
        if bool((h > 0).any()):
            scale = scale + 1.0
        return torch.stack(rows) / scale


case(Ragged, {"embed": 0, "encoder": 1}, lambda: (torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0]]),))


# case: clean_scalars_that_are_read
"""Another card's scalar may fill: `fill_`, `masked_fill` and `index_fill` read its value."""


class Filled(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        low = self.a(x).amin()
        y = self.b(x)
        y = y.masked_fill(y > 0, low)
        y = y.index_fill(-1, torch.tensor([0], device=y.device), low)
        limits = torch.full((2,), low.item(), device=y.device)
        return y, torch.empty_like(y).fill_(low), limits


case(lambda: Filled().requires_grad_(False), {"a": 0, "b": 1}, [(2, 4)])
