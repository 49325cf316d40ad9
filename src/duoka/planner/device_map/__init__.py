"""Device maps by hand: validation of a user's `device_map` against a model's tensors.

A map assigns devices to modules or tensors, by the model's own names, by those of its published
checkpoint, or by both. The result is one device for every block, or an error that lists all
missing, unknown, duplicate and split names, with similar real names and a completed map. The model,
its weights and torch aren't needed; memory isn't checked here.

- `read`: maps in all their forms (a dict, one device, or a file), and their devices
- `names`: names of modules, tensors and devices, and the entries of a map
- `validate`: one device for every block, or all faults of a map at once
- `suggest`: real names that are similar to an unknown name
"""

from .names import Spelling, find_device, published_names
from .read import DeviceMap
from .suggest import corrections, runs, shorten
from .validate import Judgement, judge

__all__ = [
    "DeviceMap",
    "Judgement",
    "Spelling",
    "corrections",
    "find_device",
    "judge",
    "published_names",
    "runs",
    "shorten",
]
