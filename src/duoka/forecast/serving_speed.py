"""Serving speed: how fast so many requests are answered at once, over a paged cache.

A step of all stages takes a + c b seconds for b requests: weights are read once, keys and values
for each. One stage after the other, b requests get b tokens in that time; in s groups, each in
another stage, in a + c b / s. So what is gained is (a + c b) / (a + c b / s): nothing for one
request, and the more the dearer requests are. It knows nothing of prompts that are read meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from duoka.errors import FormatError
from duoka.hardware.fleet import Fleet

from .latency import LatencyModel, Seconds
from .profile import Profile
from .replay_serving import ServingReplay
from .workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSpeed:
    """How fast so many requests are answered at once, while all of them have half a context.

    Parameters
    ----------
    requests : int
    tokens_per_second : float
        Of all of them, with as many groups of them as there are stages, each in another stage.
    serial_tokens_per_second : float
        The same where the stages run one after the other.
    """

    requests: int
    tokens_per_second: float
    serial_tokens_per_second: float

    def __post_init__(self) -> None:
        for speed in (self.tokens_per_second, self.serial_tokens_per_second):
            if not 0 <= speed < inf:
                raise FormatError(f"{speed} tokens a second is no speed")


def serving_speeds(
    profile: Profile,
    workload: Workload,
    places: Sequence[Sequence[int]],
    stages: Sequence[tuple[str, int, int]],
    fleet: Fleet,
) -> Iterator[ServingSpeed]:
    """Speeds of the stages of a placement; none where the speed of a device is unknown.

    `places` are the blocks that are cut apart, each with what goes with it.
    """
    half = workload.context_tokens // 2

    def seconds_at(requests: int) -> Seconds | None:
        at = replace(workload, batch=requests, prompt_tokens=half, new_tokens=2, pages=None)
        replay = ServingReplay(profile, at, brief=True)
        return LatencyModel(replay, places).seconds_of(stages, fleet)

    numbers = {workload.batch, *(n for n in _LOADS if n < workload.batch)}
    for requests in sorted(numbers):
        groups = min(len(stages), requests)
        serial, grouped = seconds_at(requests), seconds_at(-(-requests // groups))
        if serial is None or grouped is None:
            return
        # One token each; groups follow one another as closely as the slowest stage lets them.
        slowest = max(s.decode_seconds + s.decode_transfer_seconds for s in grouped.stages)
        around = max(grouped.token_seconds or 0.0, groups * slowest)
        if serial.token_seconds and around:
            yield ServingSpeed(
                requests=requests,
                tokens_per_second=requests / around,
                serial_tokens_per_second=requests / serial.token_seconds,
            )


_LOADS = (1, 4, 16, 64, 256)
