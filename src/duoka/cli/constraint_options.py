"""From ``--strategy``, ``--pin``, ``--uncut`` and ``--reserve`` to constraints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from duoka.base.text import choose
from duoka.base.units import parse_bytes
from duoka.errors import UsageError
from duoka.planner.constraints import STRATEGIES, Constraints

_SHOWN = 60


def read_constraints(
    strategy: str | None,
    pins: Sequence[str],
    uncut: Sequence[str],
    reserves: Sequence[str],
    *,
    offload: bool = False,
) -> Constraints:
    """Read the options.

    Examples
    --------
    >>> read_constraints(None, ["lm_head=cuda:1"], [], ["cuda:0=2GiB"]).pins
    (('lm_head', 'cuda:1'),)
    """
    return Constraints(
        strategy=choose("the strategy", strategy or "auto", STRATEGIES),
        pins=tuple(_pairs("--pin", pins, "lm_head=cuda:1")),
        uncut=tuple(uncut),
        reserve=tuple(
            (device, parse_bytes(size))
            for device, size in _pairs("--reserve", reserves, "cuda:0=2GiB")
        ),
        offload=offload,
    )


def _pairs(option: str, texts: Sequence[str], example: str) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, sign, value = text.rpartition("=")
        if not sign or not name.strip() or not value.strip():
            raise UsageError(
                f"{option} {text[:_SHOWN]!r} is not two parts with a = between them",
                hint=f"as {option} {example}",
            )
        yield name.strip(), value.strip()
