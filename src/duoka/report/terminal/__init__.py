"""What people read: a plan, and the report of a check. It computes nothing that isn't shown."""

from .check import plain, render_report
from .compare import render_comparison
from .explain import render_explanation
from .plan import render_plan
from .words import name_modules

__all__ = [
    "name_modules",
    "plain",
    "render_comparison",
    "render_explanation",
    "render_plan",
    "render_report",
]
