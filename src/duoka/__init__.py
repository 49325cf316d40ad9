"""Run large language models on several GPUs: plan, prove, load, serve, fine-tune.

Every public name is imported on first use, so that the program starts at once and planning from a
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
    from .planner.compare import compare
    from .planner.constraints import Constraints
    from .planner.explain import explain
    from .planner.placement import Placement
    from .planner.plan import Plan
    from .report.export import export
    from .tuner.settings import TuneSettings
    from .tuner.tune import tune

__version__ = "0.1.0"
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
    "compare",
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

# Where each public name is defined.
_MODULES = {
    "Checkpoint": "checkpoint.checkpoint",
    "Constraints": "planner.constraints",
    "Device": "hardware.device",
    "Engine": "engine",
    "Fleet": "hardware.fleet",
    "Forecast": "forecast.forecast",
    "Grammar": "engine",
    "Link": "hardware.device",
    "Placement": "planner.placement",
    "Plan": "api.plan",
    "SamplingParams": "engine",
    "Training": "forecast.workload",
    "TuneSettings": "tuner.settings",
    "Workload": "forecast.workload",
    "check": "api.check",
    "compare": "planner.compare",
    "dispatch": "api.load",
    "explain": "planner.explain",
    "export": "report.export",
    "load": "api.load",
    "lora_targets": "api.load",
    "plan": "api.plan",
    "plan_replicas": "api.plan",
    "repair": "checker.fix.fix",
    "testing": "testing",
    "tokenizer": "api.load",
    "tune": "tuner.tune",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        with quiet_libraries():
            module = import_module(f".{_MODULES[name]}", __name__)
            return module if name == "testing" else getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__", "testing"]
