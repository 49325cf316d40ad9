"""What people read: a plan, and the report of a check. It computes nothing that isn't shown."""

from .comparison import render_comparison
from .explanation import render_explanation
from .names import name_modules
from .page import render_page
from .plan import render_plan
from .report import plain, render_report

__all__ = [
    "name_modules",
    "plain",
    "render_comparison",
    "render_explanation",
    "render_page",
    "render_plan",
    "render_report",
]
