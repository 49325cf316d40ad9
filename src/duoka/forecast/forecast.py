"""Forecast: bytes per device by kind, and seconds, of a placement at a workload."""

from __future__ import annotations

from dataclasses import dataclass

from .latency import Seconds
from .serving_speed import ServingSpeed, StepSeconds
from .stage_bytes import StageBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Bytes of each device in use, and seconds where speeds are known.

    Parameters
    ----------
    devices : tuple of StageBytes
        In order of first use.
    seconds : Seconds, optional
        What each stage takes, and what that adds up to; None where a device's speed is unknown.
    host_bytes : int
        Weights that stay in the host's memory. Every step copies them to the devices, once: so
        many bytes go over PCIe for each token that is generated.
    copy_seconds : float, optional
        What that takes in each step; None where nothing is copied, or a link's speed is unknown.
    serving_speeds : tuple of ServingSpeed
        Of a cache in pages, where speeds are known: from one request on to as many as there can be.
    step_seconds : StepSeconds, optional
        Of a cache in pages, where speeds are known: of steps that read a prompt.
    """

    devices: tuple[StageBytes, ...]
    seconds: Seconds | None = None
    host_bytes: int = 0
    copy_seconds: float | None = None
    serving_speeds: tuple[ServingSpeed, ...] = ()
    step_seconds: StepSeconds | None = None
