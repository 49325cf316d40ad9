"""Device maps by hand: a `device_map` as people write it, held against a model's tensors.

A map names modules or tensors by the model's own names, by those of its published checkpoint, or
by both, and gives each a device. It becomes one device for every block, or an error that lists
everything that is missing, unknown, doubled and split, with the nearest real names and a completed
map. Neither the model, its weights nor torch is needed; memory is unknown here.

- `read`: maps in all their forms (a dict, one device, or a file), and their devices
- `names`: names of modules, tensors and devices, and the entries of a map
- `validate`: the judgement: one device for every block, or everything that is wrong at once
- `suggest`: real names that are similar to an unknown one
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
