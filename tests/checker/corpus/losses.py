"""Losses: labels, class weights, auxiliary terms, and what a policy is rewarded for."""

import torch
import torch.nn.functional as F
from torch import nn
from seeded import case


# case: fault_loss_labels
"""The causal-LM loss: labels stay on the inputs' card, logits come from the last one.

Shifted logits on cuda:1, shifted labels on cuda:0, and `CrossEntropyLoss` over both.
"""

from dataclasses import dataclass


@dataclass
class CausalOutput:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class CausalLM(nn.Module):
    def __init__(self, vocab=30, width=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(2))
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids, labels=None):
        h = self.embed(input_ids)
        for layer in self.layers:
            h, _ = layer(h)
        logits = self.lm_head(h)
        if labels is None:
            return CausalOutput(logits)
        shift_logits = logits[..., :-1, :].contiguous().view(-1, logits.size(-1))
        shift_labels = labels[..., 1:].contiguous().view(-1)
        loss = nn.CrossEntropyLoss()(shift_logits, shift_labels)  # fault: mixed-devices
        return CausalOutput(logits, loss)


PLACEMENT = {"embed": 0, "layers.0": 0, "layers.1": 1, "lm_head": 1}
TRAIN = True
build = CausalLM


def inputs():
    ids = torch.randint(0, 30, (2, 6))
    return {"input_ids": ids, "labels": ids.clone()}


# case: fault_loss_class_weights
"""Class weights kept as a plain tensor attribute and given to `cross_entropy`.

The labels are moved properly; the weights stay on the CPU, for the module's state doesn't know
them.
"""


class Imbalanced(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.class_weights = torch.tensor([0.2, 0.3, 0.5])
        self.features = nn.Sequential(nn.Linear(10, 16), nn.ReLU())
        self.classifier = nn.Linear(16, classes)

    def forward(self, x, labels):
        logits = self.classifier(self.features(x))
        labels = labels.to(logits.device)
        weight = self.class_weights
        loss = F.cross_entropy(logits, labels, weight=weight)  # fault: mixed-devices
        return {"logits": logits, "loss": loss}


case(
    Imbalanced,
    {"features": "cuda:0", "classifier": "cuda:1"},
    lambda: {"x": torch.randn(6, 10), "labels": torch.tensor([0, 1, 2, 0, 1, 2])},
    train=True,
)


# case: fault_loss_module
"""A loss that is a submodule with a buffer, placed with the first stage, called as a function.

`nn.CrossEntropyLoss(weight=...)` is a module that the map names: its arguments move to it. What it
gives is then added to an auxiliary loss of the last stage.
"""


class Weighted(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.3, 0.5]))
        self.trunk, self.head = nn.Linear(5, 8), nn.Linear(8, classes)

    def forward(self, x, labels):
        logits = self.head(self.trunk(x).relu())
        loss = self.criterion(logits, labels)
        penalty = logits.square().mean()
        return {"loss": loss + 0.1 * penalty}  # fault: mixed-devices


PLACEMENT = {"criterion": 0, "trunk": 0, "head": 1}
TRAIN = True
build = Weighted


def inputs():
    return {"x": torch.randn(4, 5), "labels": torch.tensor([0, 1, 2, 1])}


# case: fault_loss_auxiliary_sum
"""Load-balancing losses of all layers are summed with Python's `sum`.

Each is a scalar, but of a GPU: only CPU scalars mix. The layers lie on two cards.
"""


class Routed(nn.Module):
    def __init__(self, width, num_experts=3):
        super().__init__()
        self.gate = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        parts = torch.stack([expert(x) for expert in self.experts], dim=-1)
        balance = share.mean((0, 1)).pow(2).sum() * share.shape[-1]
        return x + (parts * share.unsqueeze(-2)).sum(-1), balance


class Model(nn.Module):
    def __init__(self, width=6, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Routed(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        auxiliary = []
        for layer in self.layers:
            x, balance = layer(x)
            auxiliary.append(balance)
        loss = self.head(x).pow(2).mean()
        return loss + 0.01 * sum(auxiliary)  # fault: mixed-devices


case(Model, {"layers.0": 0, "layers.1": 1, "layers.2": 1, "head": 1}, [(2, 3, 6)], train=True)


# case: fault_loss_distillation
"""Distillation: a frozen teacher on cuda:0 and a student on cuda:1.

`kl_div` takes the student's log-probabilities and the teacher's probabilities from two cards.
"""


class Distilled(nn.Module):
    def __init__(self, classes=5, temperature=2.0):
        super().__init__()
        self.temperature = temperature
        self.teacher = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, classes))
        self.student = nn.Linear(8, classes)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            target = F.softmax(self.teacher(x) / self.temperature, dim=-1)
        log_probs = F.log_softmax(self.student(x) / self.temperature, dim=-1)
        loss = F.kl_div(log_probs, target, reduction="batchmean")  # fault: mixed-devices
        return {"loss": loss * self.temperature**2}


case(Distilled, {"teacher": 0, "student": 1}, {"x": (4, 8)}, train=True)


# case: fault_partial_loss
"""A loss with its class weights bound by `functools.partial` in `__init__`.

The bound tensor is neither parameter nor buffer; it stays on the CPU.
"""

from functools import partial


class MultiLabel(nn.Module):
    def __init__(self, labels=4):
        super().__init__()
        positive = torch.linspace(1.0, 3.0, labels)
        self.criterion = partial(F.binary_cross_entropy_with_logits, pos_weight=positive)
        self.encoder = nn.Linear(9, 16)
        self.head = nn.Linear(16, labels)

    def forward(self, x, target):
        logits = self.head(self.encoder(x).relu())
        loss = self.criterion(logits, target.to(logits.device))  # fault: mixed-devices
        return {"loss": loss, "logits": logits}


case(
    MultiLabel,
    {"encoder": 0, "head": 1},
    lambda: {"x": torch.randn(5, 9), "target": torch.randint(0, 2, (5, 4)).float()},
    train=True,
)


# case: fault_gather_token_logprobs
"""A policy-gradient head that gathers the log-probabilities of the actions.

The actions are an input and stay on cuda:0 with the trunk; the logits come from cuda:1.
`gather` wants its index on the logits' card.
"""


class Policy(nn.Module):
    def __init__(self, observations=6, actions=4):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(observations, 16), nn.Tanh())
        self.actor = nn.Linear(16, actions)
        self.critic = nn.Linear(16, 1)

    def forward(self, observation, action):
        h = self.trunk(observation)
        log_probs = F.log_softmax(self.actor(h), dim=-1)
        value = self.critic(h).squeeze(-1)
        chosen = log_probs.gather(-1, action.unsqueeze(-1))  # fault: mixed-devices
        return chosen.squeeze(-1), value


case(
    Policy,
    {"trunk": 0, "actor": 1, "critic": 1},
    lambda: {"observation": torch.randn(5, 6), "action": torch.randint(0, 4, (5,))},
)


# case: fault_builtin_max
"""Python's `max` over the layers' losses: it compares scalars of two cards."""


class Hardest(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        losses = []
        for layer in self.layers:
            x = layer(x)
            losses.append(x.square().mean())
        return max(losses)  # fault: mixed-devices


case(Hardest, {"layers.0": 0, "layers.1": 1, "layers.2": 1}, [(2, 4)], train=True)


# case: fault_clip_logits
"""CLIP: two towers on two cards meet in the matrix product of their features.

Each tower's features stay on its card, so `image @ text.t()` multiplies matrices of two cards. The
loss's labels are made on the device of the logits, which is right.
"""


class Tower(nn.Module):
    def __init__(self, inside, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inside, width), nn.GELU(), nn.LayerNorm(width))
        self.projection = nn.Linear(width, 8, bias=False)

    def forward(self, x):
        return F.normalize(self.projection(self.body(x)), dim=-1)


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = Tower(24, 16)
        self.textual = Tower(10, 16)

    def forward(self, image, text):
        image_features = self.visual(image)
        text_features = self.textual(text)
        logits = 10.0 * image_features @ text_features.t()  # fault: mixed-devices
        labels = torch.arange(logits.shape[0], device=logits.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        return {"loss": loss, "logits": logits}


case(
    Clip, {"visual": "cuda:0", "textual": "cuda:1"}, {"image": (4, 24), "text": (4, 10)}, train=True
)


# case: clean_loss_labels_moved
"""The causal-LM loss as it should be: labels go to the logits."""


class CausalLM(nn.Module):
    def __init__(self, vocab=30, width=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(2))
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids, labels):
        h = self.embed(input_ids)
        for layer in self.layers:
            h, _ = layer(h)
        logits = self.lm_head(h).float()
        labels = labels.to(logits.device)
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


PLACEMENT = {"embed": 0, "layers.0": 0, "layers.1": 1, "lm_head": 1}
TRAIN = True
build = CausalLM


def inputs():
    ids = torch.randint(0, 30, (2, 6))
    return {"input_ids": ids, "labels": ids.clone()}


# case: clean_auxiliary_losses_moved
"""Losses of several cards are brought to the last one, and added."""


class Routed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.fc = nn.Linear(width, 3), nn.Linear(width, width)

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        return x + self.fc(x) * share[..., :1], share.mean(0).pow(2).sum()


class Model(nn.Module):
    def __init__(self, width=6, depth=3):
        super().__init__()
        self.register_buffer("class_weights", torch.tensor([0.5, 1.0, 1.5]))
        self.layers = nn.ModuleList(Routed(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x, labels):
        auxiliary = []
        for layer in self.layers:
            x, balance = layer(x)
            auxiliary.append(balance)
        logits = self.head(x)
        main = F.cross_entropy(logits, labels.to(logits.device), weight=self.class_weights)
        extra = torch.stack([each.to(main.device) for each in auxiliary]).sum()
        return {"loss": main + 0.1 * extra, "logits": logits}


case(
    Model,
    {"class_weights": 1, "layers.0": 0, "layers.1": 0, "layers.2": 1, "head": 1},
    lambda: {"x": torch.randn(4, 6), "labels": torch.tensor([0, 1, 2, 1])},
    train=True,
)


# case: clean_contrastive
"""Two towers on two cards whose features meet on one of them, with a learned temperature."""


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(10, 8), nn.Tanh())
        self.textual = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.logit_scale = nn.Parameter(torch.tensor(0.0))

    def forward(self, image, text):
        image, text = (
            F.normalize(self.visual(image), dim=-1),
            F.normalize(self.textual(text), dim=-1),
        )
        image = image.to(text.device)
        logits = self.logit_scale.exp().to(text.device) * image @ text.t()
        return F.cross_entropy(logits, torch.arange(len(logits)).to(logits.device))


case(
    Towers,
    {"visual": 0, "textual": 1, "logit_scale": 0},
    {"image": (3, 10), "text": (3, 6)},
    train=True,
)
