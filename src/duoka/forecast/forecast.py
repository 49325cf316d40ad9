"""Forecast: bytes per device by kind, and seconds, for a placement at a workload."""

from __future__ import annotations

from dataclasses import dataclass, field

from duoka.base.serialization import OMIT_DEFAULT

from .latency import Seconds
from .serving_speed import ServingSpeed, StepSeconds
from .stage_bytes import StageBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Bytes of each device with a stage, and seconds if device speeds are known.

    Parameters
    ----------
    devices : tuple of StageBytes
        Bytes of each device, in order of first use.
    seconds : Seconds, optional
        Seconds of each stage and of a request; None if a device's speed is unknown.
    host_bytes : int
        Bytes of weights offloaded to the host's memory. Every step copies these weights to the
        devices once, so each generated token sends `host_bytes` over PCIe.
    copy_seconds : float, optional
        Seconds to copy `host_bytes` in each step; None if nothing is offloaded or a host link's
        speed is unknown.
    expert_bytes : int
        Bytes of experts' weights in the host's memory, where the CPU computes.
    serving_speeds : tuple of ServingSpeed
        For a paged cache if speeds are known: decode speeds for one request up to the batch.
    step_seconds : StepSeconds, optional
        For a paged cache if speeds are known: seconds of prefill steps; otherwise None.
    """

    devices: tuple[StageBytes, ...]
    seconds: Seconds | None = None
    host_bytes: int = 0
    copy_seconds: float | None = None
    expert_bytes: int = field(default=0, metadata=OMIT_DEFAULT)
    serving_speeds: tuple[ServingSpeed, ...] = ()
    step_seconds: StepSeconds | None = None
