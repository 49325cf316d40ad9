"""Planner: a fleet, a profile and a workload become the best plan, or what would fit instead."""
