"""Forecast: a profile and a workload become bytes and seconds."""
