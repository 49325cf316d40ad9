"""Doctor: checks of the machine and of a model; each finding has a consequence and advice.

An exception in a check becomes a finding, and the other checks still run.

- `diagnose`: run all checks in order
- `facts`: shared facts, findings, and the start of device tests
- `gpus`: driver, visibility, memory
- `devices`: torch's build and the tests' outcomes; `device_tests`: the tests, in a child process
- `host`: memory, libraries
- `model`: checkpoint, plan
"""

from .diagnose import Diagnosis, Examined, diagnose
from .facts import Finding
from .model import ModelFacts

__all__ = ["Diagnosis", "Examined", "Finding", "ModelFacts", "diagnose"]
