"""Serving speed: tokens per second for a number of concurrent requests, over a paged cache.

A decode step through all stages takes a + c b seconds for b requests: weights are read once, keys
and values for each request. With the stages running one after the other, b requests get b tokens in
this time. With the requests in s groups, each group in another of s stages, they get b tokens in
a + c b / s. The speedup is (a + c b) / (a + c b / s): 1 for a single request, and larger the more a
request costs. This holds if all stages are equally fast. Otherwise each group passes the slowest
stage once per token, so s groups take s times the slowest stage; if that is more than one step with
all requests, a single group is faster. Concurrent prefill and sampling are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet

from .latency import LatencyModel, Seconds, refuse_impossible
from .profile import Profile
from .replay_serving import ServingReplay
from .serving import Capacity
from .workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSpeed:
    """Decode speed for a number of concurrent requests, each at half the context length.

    Parameters
    ----------
    requests : int
        Concurrent requests.
    tokens_per_second : float
        Tokens of all requests, with one group of requests per stage, all stages busy.
    serial_tokens_per_second : float
        Tokens of all requests in a single group, with the stages running one after the other.
    """

    requests: int
    tokens_per_second: float
    serial_tokens_per_second: float

    @property
    def is_grouped(self) -> bool:
        """True if groups are at least as fast as a single group."""
        return self.tokens_per_second >= self.serial_tokens_per_second

    @property
    def best_tokens_per_second(self) -> float:
        """The speed in groups or in a single group, whichever is faster."""
        return max(self.tokens_per_second, self.serial_tokens_per_second)

    def __post_init__(self) -> None:
        refuse_impossible(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """The seconds of a step through all stages: a fixed part plus parts for its tokens.

    `token_seconds` is added for each token, `pair_seconds` for each (token, earlier token) pair of
    attention.
    """

    fixed_seconds: float
    token_seconds: float
    pair_seconds: float

    def __post_init__(self) -> None:
        refuse_impossible(self)

    def piece(self, tokens: int, past: int, num_answering: int, num_stages: int) -> int:
        """Return the best prefill chunk of a prompt of `tokens`, for the chunk after `past` tokens.

        A step with one of m equal chunks takes a + p / m seconds through all s stages, where p is
        the time of all prompt tokens and a the time of the rest, such as `num_answering` decoding
        requests. In a pipeline m chunks take (m + s - 1) / s such steps. This is minimal if a
        chunk's tokens take sqrt(a p / (s - 1)) seconds.
        """
        # (m + s - 1) / s * (a + p / m) is minimal at m = sqrt((s - 1) p / a). With s = 2 stages,
        # a = 10 ms and p = 90 ms, prompts in m = 1, 3 and 9 chunks take 100, 80 and 100 ms.
        rest_seconds = self.fixed_seconds + self.token_seconds * num_answering
        seconds = sqrt(rest_seconds * self.token_seconds * tokens / (num_stages - 1))
        per_token = self.token_seconds + self.pair_seconds * past
        return round(seconds / per_token) if per_token else tokens


def step_seconds(
    profile: Profile,
    workload: Workload,
    places: Sequence[Sequence[int]],
    stages: Sequence[tuple[str, int, int]],
    fleet: Fleet,
    host: Device | None = None,
) -> StepSeconds | None:
    """Return the seconds of prefill steps of a placement; None if a device's speed is unknown."""
    size = max(2, Capacity.of(workload).step_tokens)

    def seconds_at(prompt_tokens: int) -> float | None:
        """Return the seconds of a prompt, prefilled in chunks of the largest step size."""
        prompt_workload = replace(
            workload,
            batch=1,
            prompt_tokens=prompt_tokens,
            new_tokens=1,
            prefill_chunk_tokens=size,
            pages=None,
        )
        model = LatencyModel(ServingReplay(profile, prompt_workload, brief=True), places, host)
        seconds = model.seconds_of(stages, fleet)
        return None if seconds is None else seconds.first_token_seconds

    # Three prompts determine three unknowns: a single token the fixed part, one chunk the part per
    # token, and a second chunk after the first the part per (token, earlier token) pair.
    token, chunk, chunks = map(seconds_at, (1, size, 2 * size))
    if token is None or chunk is None or chunks is None:
        return None
    return StepSeconds(
        fixed_seconds=token,
        token_seconds=max(0.0, chunk - token) / (size - 1),
        pair_seconds=max(0.0, chunks - 2 * chunk) / size**2,
    )


def serving_speeds(
    profile: Profile,
    workload: Workload,
    places: Sequence[Sequence[int]],
    stages: Sequence[tuple[str, int, int]],
    fleet: Fleet,
    host: Device | None = None,
) -> Iterator[ServingSpeed]:
    """Yield the speeds of a placement for several loads; nothing if a device's speed is unknown.

    `places` are the blocks between which stages may be cut, each with its attached blocks; `stages`
    are (device name, start, stop).
    """
    half = workload.context_tokens // 2

    def seconds_at(requests: int) -> Seconds | None:
        """Return the seconds of decoding for this number of concurrent requests."""
        load = replace(workload, batch=requests, prompt_tokens=half, new_tokens=2, pages=None)
        replay = ServingReplay(profile, load, brief=True, engine=Capacity.of(workload))
        return LatencyModel(replay, places, host).seconds_of(stages, fleet)

    numbers = {workload.batch, *(n for n in _LOADS if n < workload.batch)}
    for requests in sorted(numbers):
        groups = min(len(stages), requests)
        serial, grouped = seconds_at(requests), seconds_at(-(-requests // groups))
        if serial is None or grouped is None:
            return
        # The time per token of each request: the slowest stage serves all groups in turn.
        slowest = max(s.decode_seconds + s.decode_transfer_seconds for s in grouped.stages)
        period = max(grouped.token_seconds or 0.0, groups * slowest)
        if serial.token_seconds and period:
            yield ServingSpeed(
                requests=requests,
                tokens_per_second=requests / period,
                serial_tokens_per_second=requests / serial.token_seconds,
            )


_LOADS = (1, 4, 16, 64, 256)
