"""Serving speed: how fast so many requests are answered at once, over a paged cache.

A step of all stages takes a + c b seconds for b requests: weights are read once, keys and values
for each. One stage after the other, b requests get b tokens in that time; in s groups, each in
another stage, in a + c b / s. So what is gained is (a + c b) / (a + c b / s): nothing for one
request, and the more the dearer requests are. That is of stages that are equally fast: each group
comes to the slowest stage once for each token, so that s groups take s times what it takes. Where
that is more than all stages take for all requests at once, one group is faster. It knows nothing of
prompts that are read meanwhile, and of how tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from duoka.hardware.fleet import Fleet

from .latency import LatencyModel, Seconds, refuse_impossible
from .profile import Profile
from .replay_serving import ServingReplay
from .serving import Capacity
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

    @property
    def is_grouped(self) -> bool:
        """True if groups are at least as fast."""
        return self.tokens_per_second >= self.serial_tokens_per_second

    @property
    def best_tokens_per_second(self) -> float:
        """The speed in groups or in a single group, whichever is faster."""
        return max(self.tokens_per_second, self.serial_tokens_per_second)

    def __post_init__(self) -> None:
        refuse_impossible(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """The seconds of a step in all stages: a fixed part, and more for its tokens.

    `token_seconds` is for each token, `pair_seconds` for each pair of a token and an earlier one.
    """

    fixed_seconds: float
    token_seconds: float
    pair_seconds: float

    def __post_init__(self) -> None:
        refuse_impossible(self)

    def piece(self, tokens: int, past: int, num_answering: int, num_stages: int) -> int:
        """Return the size of a prefill chunk of a prompt of so many tokens, from `past` on.

        In m pieces of equal seconds s stages read the prompt in (m + s - 1) / s of the seconds of a
        step with one: a + p / m, where p is for all its tokens and a for all else in the step. That
        is least where a piece takes sqrt(a p / (s - 1)).
        """
        # (m + s - 1) / s * (a + p / m) is least at m = sqrt((s - 1) p / a). With s = 2 stages, a =
        # 10 ms and p = 90 ms, prompts in m = 1, 3 and 9 pieces take 100, 80 and 100 ms.
        beside = self.fixed_seconds + self.token_seconds * num_answering
        seconds = sqrt(beside * self.token_seconds * tokens / (num_stages - 1))
        per_token = self.token_seconds + self.pair_seconds * past
        return round(seconds / per_token) if per_token else tokens


def step_seconds(
    profile: Profile,
    workload: Workload,
    places: Sequence[Sequence[int]],
    stages: Sequence[tuple[str, int, int]],
    fleet: Fleet,
) -> StepSeconds | None:
    """Return the seconds of prefill steps of a placement; None where speeds are unknown."""
    size = max(2, Capacity.of(workload).step_tokens)

    def seconds_at(prompt_tokens: int) -> float | None:
        """Return the seconds of a prompt, in chunks of the largest step."""
        at = replace(
            workload,
            batch=1,
            prompt_tokens=prompt_tokens,
            new_tokens=1,
            prefill_chunk_tokens=size,
            pages=None,
        )
        model = LatencyModel(ServingReplay(profile, at, brief=True), places)
        seconds = model.seconds_of(stages, fleet)
        return None if seconds is None else seconds.first_token_seconds

    # Three prompts give three unknowns: a single token the fixed part, a chunk the part of each of
    # its tokens, and a second chunk behind it the part of each pair of a token and an earlier one.
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
) -> Iterator[ServingSpeed]:
    """Yield the speeds of a placement; none where the speed of a device is unknown.

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
        period = max(grouped.token_seconds or 0.0, groups * slowest)
        if serial.token_seconds and period:
            yield ServingSpeed(
                requests=requests,
                tokens_per_second=requests / period,
                serial_tokens_per_second=requests / serial.token_seconds,
            )


_LOADS = (1, 4, 16, 64, 256)
