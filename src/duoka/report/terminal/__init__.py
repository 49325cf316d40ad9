"""Output for terminals.

- `plan`, `explain`: a plan, and its reasons
- `serving`: capacity and throughput of a plan for concurrent requests
- `measured`: measurements beside the forecast
- `check`, `excerpt`: the report of a check, with source lines
- `words`: descriptions of modules, places and devices
"""

from .check import render_plain, render_report
from .explain import render_explanation
from .measured import render_measured
from .plan import render_plan
from .words import name_modules

__all__ = [
    "name_modules",
    "render_explanation",
    "render_measured",
    "render_plain",
    "render_plan",
    "render_report",
]
