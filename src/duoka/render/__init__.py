"""What people read: a plan, and the report of a check. It computes nothing that isn't shown."""

from .plan import name_modules, render_plan
from .report import plain, render_report

__all__ = ["name_modules", "plain", "render_plan", "render_report"]
