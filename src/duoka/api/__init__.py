"""API: the front doors: plan, load, check."""
