"""Run large language models on several GPUs: plan, prove, load, serve, fine-tune.

Public names are imported on first use, so that the program starts quickly and planning from a
cached profile never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors
from .base.quiet import quiet_libraries

if TYPE_CHECKING:
    from .api.check import check
    from .api.load import dispatch, load, lora_targets, tokenizer
    from .api.plan import plan, plan_replicas
    from .checker.fix.fix import repair
    from .checkpoint.checkpoint import Checkpoint
    from .engine import Engine, Grammar, SamplingParams
    from .forecast.forecast import Forecast
    from .forecast.workload import Training, Workload
    from .hardware.device import Device, Link
    from .hardware.fleet import Fleet
    from .planner.constraints import Constraints
    from .planner.explain import explain
    from .planner.placement import Placement
    from .planner.plan import Plan
    from .report.export import export
    from .tuner.settings import TuneSettings
    from .tuner.tune import tune

__version__ = "0.2.0"
__all__ = [
    "Checkpoint",
    "Constraints",
    "Device",
    "Engine",
    "Fleet",
    "Forecast",
    "Grammar",
    "Link",
    "Placement",
    "Plan",
    "SamplingParams",
    "Training",
    "TuneSettings",
    "Workload",
    "check",
    "dispatch",
    "errors",
    "explain",
    "export",
    "load",
    "lora_targets",
    "plan",
    "plan_replicas",
    "repair",
    "tokenizer",
    "tune",
]

# Public names by the module that defines them.
_NAMES = {
    "api.check": ("check",),
    "api.load": ("dispatch", "load", "lora_targets", "tokenizer"),
    "api.plan": ("Plan", "plan", "plan_replicas"),
    "checker.fix.fix": ("repair",),
    "checkpoint.checkpoint": ("Checkpoint",),
    "engine": ("Engine", "Grammar", "SamplingParams"),
    "forecast.forecast": ("Forecast",),
    "forecast.workload": ("Training", "Workload"),
    "hardware.device": ("Device", "Link"),
    "hardware.fleet": ("Fleet",),
    "planner.constraints": ("Constraints",),
    "planner.explain": ("explain",),
    "planner.placement": ("Placement",),
    "report.export": ("export",),
    "testing": ("testing",),
    "tuner.settings": ("TuneSettings",),
    "tuner.tune": ("tune",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        with quiet_libraries():
            module = import_module(f".{_MODULES[name]}", __name__)
            return module if name == "testing" else getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__", "testing"]
