"""Doctor: checks of the machine and of a model, each with findings, consequences and advice.

A check that fails doesn't stop the others.

- `diagnose`: all checks, in their order
- `facts`: shared facts, findings, and the start of tests on devices
- `gpus`: driver, visibility, memory, health, PCIe
- `devices`: torch's build and the tests' outcomes; `device_tests`: the tests, in a child process
- `host`: memory, shared memory, libraries
- `model`: checkpoint, hashes, plan
- `bundle`: a report to attach, without names and secrets
"""

from .bundle import bundle
from .diagnose import Diagnosis, Examined, diagnose
from .facts import Finding
from .model import ModelFacts

__all__ = ["Diagnosis", "Examined", "Finding", "ModelFacts", "bundle", "diagnose"]
