"""What transformers' `device_map="auto"` makes of a model and a machine, for `planner.py`.

The map is computed by transformers' own functions, as `from_pretrained` calls them, for the
model without data and with the machine's budgets as `max_memory`. What it holds is asked of the
same replay that duoka's own plans are forecast by. That is generous to it: what accelerate's
hooks copy besides is not counted, and the prompt may run in whatever chunk fits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.integrations.accelerate import get_balanced_memory, infer_auto_device_map

from duoka.forecast.profile import Profile
from duoka.forecast.replay import Replay
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet

_CPU_BYTES = 2**40


@dataclass
class AutoMap:
    """A map of "auto", and the GPU of each block; none where it can't run on GPUs alone."""

    entries: dict[str, Any]
    device_of: list[str] | None
    trouble: str = ""

    @property
    def num_gpus(self) -> int:
        return len({device for device in self.entries.values() if isinstance(device, int)})


def balanced_map(model: nn.Module, fleet: Fleet) -> dict[str, Any]:
    """The map that `from_pretrained(device_map="auto")` makes."""
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    budgets: dict[int | str, int | str] = {
        number: device.budget_bytes for number, device in enumerate(fleet.devices)
    }
    memory = get_balanced_memory(
        model,
        max_memory={**budgets, "cpu": _CPU_BYTES},
        no_split_module_classes=model._no_split_modules,
    )
    return dict(
        infer_auto_device_map(
            model, max_memory=memory, no_split_module_classes=model._no_split_modules
        )
    )


def auto_map(model: nn.Module, profile: Profile, fleet: Fleet) -> AutoMap:
    """Ask transformers for its map."""
    entries = balanced_map(model, fleet)
    if any(not isinstance(device, int) for device in entries.values()):
        return AutoMap(entries, None, "offloads")
    names = [name for name, _ in model.named_parameters()]
    found: list[str] = []
    for block in profile.blocks:
        inside = (name for name in names if any(_within(name, each) for each in block.modules))
        at = {_looked_up(entries, name) for name in inside}
        if len(at) > 1:
            return AutoMap(entries, None, f"cuts {', '.join(block.modules)}")
        # What has no parameters, as rotary frequencies, costs nothing worth telling: it is taken to
        # be where the model's own blocks have it.
        number = at.pop() if at else None
        root = found[block.tied_to or 0] if found else "cuda:0"
        found.append(root if number is None else f"cuda:{number}")
        if block.tied_to is not None and found[-1] != root:
            return AutoMap(entries, None, f"unties {', '.join(block.modules)}")
    return AutoMap(entries, found)


def _within(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def _looked_up(entries: dict[str, Any], name: str) -> Any:
    while name not in entries:
        name = name.rpartition(".")[0]
    return entries[name]


def holds(profile: Profile, device_of: Sequence[str], fleet: Fleet, workload: Workload) -> bool:
    """Whether every GPU holds its part."""
    parts = {
        name: [index for index, at in enumerate(device_of) if at == name] for name in set(device_of)
    }
    replay = Replay(profile, workload)
    return all(
        replay.run(blocks, fleet.device(name).budget_bytes, device_of=device_of) is not None
        for name, blocks in parts.items()
    )
