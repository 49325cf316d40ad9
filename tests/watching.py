"""Processes of duoka for tests of what watches them: published, without a process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from staged import forecast

from duoka.report.live import LiveDevice

MIB, GIB = 2**20, 2**30


def live_device(
    device: str = "vgpu:0", *, now_bytes: int = GIB, peak_bytes: int = 2 * GIB, **changes: Any
) -> LiveDevice:
    """A process on a device of 4 GiB: a quarter GiB of weights, 3 MiB of overhead."""
    stage = forecast(device, 1, 4 * GIB)
    parts = {"kv_cache_bytes": 128 * MIB, "activation_bytes": 64 * MIB}
    parts["allocated_bytes"] = stage.weight_bytes + sum(parts.values())
    measured = replace(stage, **parts, reserved_bytes=now_bytes)
    planned = replace(stage, **parts, reserved_bytes=peak_bytes)
    made = LiveDevice(
        pid=4242, model="LlamaForCausalLM", uuid="", measured=measured, forecast=planned
    )
    return replace(made, **changes)
