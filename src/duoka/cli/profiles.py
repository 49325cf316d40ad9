"""Profiles for a command: those that were kept, and others from a trace, which is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import duoka
from duoka.forecast.profile import Profile
from duoka.forecast.profile_cache import find_profile
from duoka.planner.resolve import Find, workload_for

from .terminal import working


@contextmanager
def finding(checkpoint: duoka.Checkpoint) -> Iterator[Find]:
    """Find the profiles of a checkpoint while a plan is looked for; that both go on is shown.

    A model that was planned before needs no torch to be planned again.
    """
    with working("planning") as tell:

        def find(workload: duoka.Workload) -> Profile:
            known = find_profile(checkpoint.fingerprint, workload_for(checkpoint, workload))
            if known is not None:
                return known
            tell("tracing the model; the next plan of it takes a second")
            from duoka.tracing.get_profile import profile_checkpoint

            found = profile_checkpoint(checkpoint, workload)
            tell("planning")
            return found

        yield find
