"""Tensors that travel in lists, dictionaries, tuples and dataclasses."""

import torch
import torch.nn.functional as F
from torch import nn
from seeded import case


# case: fault_comprehension
"""Feature pyramids of two backbones are fused in a list comprehension.

Level by level one feature is on cuda:0 and the other on cuda:1.
"""


class Pyramid(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Conv2d(3 if level == 0 else width, width, 3, 2, 1) for level in range(3)
        )

    def forward(self, x):
        levels = []
        for stage in self.stages:
            x = stage(x).relu()
            levels.append(x)
        return levels


class TwoStream(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.rgb = Pyramid(width)
        self.flow = Pyramid(width)
        self.heads = nn.ModuleList(nn.Conv2d(width, 1, 1) for _ in range(3))

    def forward(self, rgb, flow):
        pairs = zip(self.rgb(rgb), self.flow(flow), strict=True)
        fused = [colour * motion for colour, motion in pairs]  # fault: mixed-devices
        return [head(level) for head, level in zip(self.heads, fused, strict=True)]


case(TwoStream, {"rgb": 0, "flow": 1, "heads": 1}, {"rgb": (1, 3, 16, 16), "flow": (1, 3, 16, 16)})


# case: fault_namedtuple_features
"""Features travel in a NamedTuple, out of two encoders on two cards, into a cosine similarity.

The tuple is put together by the model and read by the model: no placed module in between.
"""

from typing import NamedTuple

from torch import Tensor, nn


class Pair(NamedTuple):
    query: Tensor
    document: Tensor

    def score(self) -> Tensor:
        return F.cosine_similarity(self.query, self.document)  # fault: mixed-devices


class Retriever(nn.Module):
    def __init__(self, vocab=40, width=8):
        super().__init__()
        self.query_encoder = nn.EmbeddingBag(vocab, width)
        self.document_encoder = nn.EmbeddingBag(vocab, width)

    def encode(self, query: Tensor, document: Tensor) -> Pair:
        return Pair(self.query_encoder(query), self.document_encoder(document))

    def forward(self, query: Tensor, document: Tensor) -> Tensor:
        return self.encode(query, document).score()


case(
    Retriever,
    {"query_encoder": "cuda:0", "document_encoder": "cuda:1"},
    lambda: {
        "query": torch.randint(0, 40, (3, 4)),
        "document": torch.randint(0, 40, (3, 9)),
    },
)


# case: fault_nested_dataclasses
"""Outputs in nested dataclasses and dictionaries, taken apart again by the model."""

from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass
class Branch:
    hidden: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Outputs:
    image: Branch
    text: Branch

    @property
    def gap(self):
        return torch.dist(self.image.hidden, self.text.hidden)  # fault: mixed-devices


class Encoder(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.fc = nn.Linear(inside, 4)

    def forward(self, x):
        h = self.fc(x)
        return Branch(h, {"norm": h.norm(dim=-1)})


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = Encoder(6), Encoder(3)

    def forward(self, image, text):
        outputs = Outputs(self.image(image), self.text(text))
        norms = [part.extras["norm"] for part in (outputs.image, outputs.text)]
        return outputs.gap, torch.stack(norms).mean()  # fault: mixed-devices


case(Model, {"image": 0, "text": 1}, {"image": (2, 6), "text": (2, 3)})


# case: fault_star_args
"""`torch.addcmul(*terms, value=...)` with terms of several cards.

The list is put together from a base on cuda:0 and two factors on cuda:1.
"""


class Cross(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)

    def forward(self, x):
        terms = [module(x) for module in (self.base, self.left, self.right)]
        return torch.addcmul(*terms, value=0.5)  # fault: mixed-devices


case(Cross, {"base": 0, "left": 1, "right": 1}, [(2, 5)])


# case: fault_tensor_in_list
"""A list membership test and `list.index` compare tensors, across cards."""


class Deduplicate(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        seen = []
        for layer in self.layers:
            x = layer(x)
            score = x.sum()
            if score not in seen:  # fault: mixed-devices
                seen.append(score)
        return x, len(seen)


case(Deduplicate, {"layers.0": 0, "layers.1": 0, "layers.2": 1}, [(2, 4)])


# case: fault_map_mul
"""Gates and values are multiplied pairwise through `map(torch.mul, gates, values)`.

`map` is lazy: the products are made by `torch.stack(tuple(...))` on the next line, where the
generator is consumed.
"""


class Heads(nn.Module):
    def __init__(self, width=4, count=3):
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.values = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x):
        gates = [gate(x).sigmoid() for gate in self.gates]
        values = [value(x) for value in self.values]
        products = map(torch.mul, gates, values)
        together = tuple(products)  # fault: mixed-devices
        return torch.stack(together).mean(0)


case(Heads, {"gates": 0, "values": 1}, [(2, 4)])


# case: fault_multiline_cat
"""A call over many lines: all of DenseNet's earlier features are concatenated.

The call begins on the marked line, and that is the line that Python names.
"""


class Dense(nn.Module):
    def __init__(self, growth=3):
        super().__init__()
        self.a = nn.Conv1d(2, growth, 3, padding=1)
        self.b = nn.Conv1d(growth, growth, 3, padding=1)
        self.c = nn.Conv1d(2 * growth, growth, 3, padding=1)
        self.last = nn.Conv1d(3 * growth, 1, 1)

    def forward(self, x):
        a = self.a(x).relu()
        b = self.b(a).relu()
        c = self.c(
            torch.cat(  # fault: mixed-devices
                [
                    a,
                    b,
                ],
                dim=1,
            )
        ).relu()
        together = torch.cat(  # fault: mixed-devices
            (
                a,
                b,
                c,
            ),
            dim=1,
        )
        return self.last(together)


case(Dense, {"a": 0, "b": 1, "c": 1, "last": 1}, [(1, 2, 8)])


# case: fault_stack_layer_outputs
"""ELMo-like scalar mixing: the outputs of all layers are stacked and weighted.

The layers lie on two cards, and `torch.stack` takes all of their outputs at once. The mixing
weights belong to the model, on cuda:1, where the stack then is.
"""


class ScalarMix(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_layers))

    def forward(self, stacked):
        share = self.weights.softmax(0)
        return torch.einsum("l,lbtd->btd", share, stacked)


class Mixed(nn.Module):
    def __init__(self, vocab=32, width=16, num_layers=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
            for _ in range(num_layers)
        )
        self.mix = ScalarMix(num_layers)

    def forward(self, input_ids):
        h = self.embed(input_ids)
        outputs = []
        for layer in self.layers:
            h = layer(h)
            outputs.append(h)
        return self.mix(torch.stack(outputs))  # fault: mixed-devices


PLACEMENT = {
    "embed": "cuda:0",
    "layers.0": "cuda:0",
    "layers.1": "cuda:0",
    "layers.2": "cuda:1",
    "layers.3": "cuda:1",
    "mix": "cuda:1",
}
build = Mixed


def inputs():
    return {"input_ids": torch.randint(0, 32, (2, 5))}


# case: fault_parameter_list_prefix
"""Prefix tuning: one learned prefix per layer, all in a `ParameterList` on cuda:0.

The list belongs to the model's root; the second layer's states are on cuda:1 when its prefix is
concatenated with them.
"""


class PrefixTuned(nn.Module):
    def __init__(self, width=8, depth=2, prefix=3):
        super().__init__()
        self.prefixes = nn.ParameterList(torch.randn(1, prefix, width) for _ in range(depth))
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 20)
        self.embed.requires_grad_(False)

    def forward(self, ids):
        h = self.embed(ids)
        for prefix, layer in zip(self.prefixes, self.layers, strict=True):
            h = torch.cat((prefix.expand(h.shape[0], -1, -1), h), 1)  # fault: mixed-devices
            h = layer(h)[:, prefix.shape[1] :]
        return self.head(h).logsumexp(-1).mean()


case(
    PrefixTuned,
    {"prefixes": 0, "embed": 1, "layers.0": 1, "layers.1": 0, "head": 0},
    lambda: (torch.randint(0, 20, (2, 4)),),
    train=True,
)


# case: fault_three_cards
"""Three towers on three cards, fused in one call: every input is somewhere else."""


class Trimodal(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.audio, self.video = nn.Linear(3, width), nn.Linear(5, width)
        self.text = nn.Embedding(7, width)
        self.fuse = nn.Bilinear(width, width, 2)

    def forward(self, audio, video, text):
        parts = self.audio(audio), self.video(video), self.text(text)
        total = torch.stack(parts).sum(0)  # fault: mixed-devices
        scores = torch.einsum("bi,bi,bi->b", *parts)  # fault: mixed-devices
        return self.fuse(total, parts[0]), scores


case(
    Trimodal,
    {"audio": 0, "video": 1, "text": 2, "fuse": 2},
    lambda: {
        "audio": torch.randn(2, 3),
        "video": torch.randn(2, 5),
        "text": torch.randint(0, 7, (2,)),
    },
)


# case: clean_structured_arguments
"""Placed modules take tuples, dictionaries and named tuples; the tensors in them are moved."""

from typing import NamedTuple


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Combine(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, pair, options, *rest):
        y = self.fc(pair.left + pair.right) * options["scale"]["by"]
        return y + sum(part for group in rest for part in group)


class Model(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.combine = Combine(width)

    def forward(self, x):
        pair = Pair(self.a(x), self.b(x))
        return self.combine(pair, {"scale": {"by": x.abs()}}, [x, pair.left], (pair.right,))


case(Model, {"a": 0, "b": 1, "combine": 1}, [(2, 5)])
