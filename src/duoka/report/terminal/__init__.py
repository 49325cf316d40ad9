"""What people read at a terminal.

- `plan`, `explain`, `compare`: a plan, why it is so, and two beside each other
- `serving`: what a plan for many requests is good for
- `measured`: what answering took, beside its forecast
- `check`, `excerpt`: the report of a check, with lines of source
- `words`: modules, places and devices in words
"""

from .check import plain, render_report
from .compare import render_comparison
from .explain import render_explanation
from .measured import render_measured
from .plan import render_plan
from .words import name_modules

__all__ = [
    "name_modules",
    "plain",
    "render_comparison",
    "render_explanation",
    "render_measured",
    "render_plan",
    "render_report",
]
