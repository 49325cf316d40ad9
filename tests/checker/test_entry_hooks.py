from __future__ import annotations

from typing import Any

import torch
from torch import nn

import duoka
from duoka import Placement


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(4, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Model(nn.Module):
    """Calls a part of a placed module by itself, as models do with their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.eyes, self.tower = nn.Linear(3, 3), Tower()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.tower.embed(ids)
        return self.tower(self.eyes(words))


IDS = torch.tensor([[1, 2]])


def test_what_comes_to_a_part_from_outside_is_moved() -> None:
    report = duoka.check(Model(), {"eyes": 0, "tower": 1}, inputs=(IDS,))
    assert report.ok, report.faults
    # The part that runs first is on cuda:1, so that is where the inputs start.
    links = {(each.source, each.target, each.hops) for each in report.transfers}
    assert links == {("cuda:1", "cuda:0", 1), ("cuda:0", "cuda:1", 1)}


def test_inside_a_running_module_nothing_moves() -> None:
    class Inside(Tower):
        def forward(self, x: torch.Tensor, far: Any = None) -> torch.Tensor:
            return self.body(self.hidden["far"])

    model = nn.Sequential(nn.Linear(3, 3), Inside())
    model[1].hidden = {}
    model[0].register_forward_hook(lambda m, a, y: model[1].hidden.update(far=y))
    report = duoka.check(model, {"0": 0, "1": 1}, inputs=torch.ones(1, 3))
    (fault,) = report.faults
    assert fault.source == 'self.body(self.hidden["far"])'


class Residual(nn.Module):
    """Its parts are blocks of their own; what enters it goes to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x + self.a(x))


def test_duokas_own_placement_is_run_as_it_is_dispatched() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Residual())
    entries = (("0", "cuda:0"), ("1.a", "cuda:1"), ("1.b", "cuda:1"))
    inputs = torch.ones(1, 3)
    assert duoka.check(model, Placement(entries=entries), inputs=inputs).ok
    (fault,) = duoka.check(model, dict(entries), inputs=inputs).faults
    assert fault.source == "x + self.a(x)"
