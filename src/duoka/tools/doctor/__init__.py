"""The doctor: what is wrong with a machine, what that means, and what to do.

A check says what it found and what follows; one that fails doesn't stop the others.

- `diagnose`: all checks, in their order
- `facts`: what several of them look at, and what they say
- `gpus`: what the driver knows of the GPUs
- `devices`: what torch and the devices do; `device_tests`: tried in another process
- `host`: memory, limits, libraries
- `model`: a checkpoint, its disk, and whether it fits
- `bundle`: a report to attach, without names and secrets
"""

from .bundle import bundle
from .diagnose import Diagnosis, Examined, diagnose
from .facts import Finding
from .model import ModelFacts

__all__ = ["Diagnosis", "Examined", "Finding", "ModelFacts", "bundle", "diagnose"]
