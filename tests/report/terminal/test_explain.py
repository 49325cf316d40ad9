"""Why, in words, with the numbers of the explanation."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from duoka.planner.explain import BoundaryMove, Explanation, Fewer, Share
from duoka.report.terminal import render_explanation

GIB = 2**30
LAYERS = tuple(f"model.layers.{number}" for number in range(24, 40))


def share(device: str, modules: tuple[str, ...], needed: float, budget: float) -> Share:
    return Share(
        device=device,
        modules=modules,
        requested_bytes=round(needed * GIB),
        budget_bytes=round(budget * GIB),
    )


FIRST = share("cuda:0", ("model.embed_tokens", "model.layers.0"), 23.69, 24)
SECOND = share("cuda:1", (*LAYERS, "lm_head"), 11, 12)
EXPLANATION = Explanation(
    work="request",
    objective="headroom",
    value=0.31 * GIB,
    bound=0.31 * GIB,
    binding_device="cuda:0",
    shares=(FIRST, SECOND),
    changes=(
        BoundaryMove(
            giver=share("cuda:1", LAYERS[1:], 10.6, 12),
            taker=share("cuda:0", (*FIRST.modules, LAYERS[0]), 24.1, 24),
            modules=LAYERS[:1],
            outcome="impossible",
        ),
        BoundaryMove(
            giver=share("cuda:0", FIRST.modules[:1], 23.3, 24),
            taker=share("cuda:1", (FIRST.modules[1], *SECOND.modules), 11.9, 12),
            modules=FIRST.modules[1:],
            outcome="worse",
            value=0.1 * GIB,
        ),
    ),
    fewer=Fewer(devices=("cuda:0",), missing_bytes=10 * GIB),
)


def printed(explanation: Explanation, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render_explanation(explanation))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [30, 80, 200])
def test_every_reason_has_its_numbers(width: int) -> None:
    text = printed(EXPLANATION, width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for wanted in (
        "The tightest, cuda:0, has 317.44 MiB of headroom; proved bound: on 2 GPUs no "
        "placement leaves more headroom than 317.44 MiB",
        "2 GPUs and not 1: on the largest one, cuda:0, at least 10.00 GiB are missing.",
        "cuda:1 has layers.24-39, lm_head",
        "No fewer modules: layers.24 would go to cuda:0, which has 317.44 MiB of headroom and "
        "would need 419.84 MiB: 102.40 MiB are missing.",
        "No more modules: with layers.0 of cuda:0 it would need 11.90 GiB of 12.00 GiB: the "
        "tightest GPU would have 102.40 MiB of headroom instead of 317.44 MiB.",
    ):
        assert wanted in words, wanted


def test_fragmentation_is_no_number() -> None:
    fragmented = share("cuda:0", (*FIRST.modules, LAYERS[0]), 24 + 1 / GIB, 24)
    impossible = replace(EXPLANATION.changes[0], taker=fragmented)
    changed = replace(EXPLANATION, changes=(impossible,))
    words = " ".join(printed(changed).split())
    assert (
        "No fewer modules: with layers.24 fragmentation on cuda:0 would exceed its budget." in words
    )
    assert (
        "No more modules: with layers.24 of cuda:1 fragmentation would exceed its budget." in words
    )


def test_a_step_of_training_is_no_request() -> None:
    step = replace(EXPLANATION, work="step", objective="latency", value=2.5, bound=2.5)
    assert "A step takes 2.50 s; proved bound: on 2 GPUs no placement takes less" in " ".join(
        printed(step).split()
    )


def test_a_map_is_not_called_an_optimum() -> None:
    words = " ".join(printed(replace(EXPLANATION, objective="given", fewer=None)).split())
    assert "No objective: the device map was given" in words
    assert "2 GPUs and not 1" not in words


def test_other_objectives_have_their_own_amounts() -> None:
    latency = replace(EXPLANATION, objective="latency", value=0.0335, bound=0.0335)
    assert "A request takes 33.5 ms" in " ".join(printed(latency).split())
    balance = replace(EXPLANATION, objective="balance", value=0.0129, bound=0.0129)
    assert "has 1.3% of headroom" in " ".join(printed(balance).split())
    order = replace(EXPLANATION, objective="order", value=2.0, bound=2.0)
    assert "each GPU completely" in " ".join(printed(order).split())


def test_a_bound_of_next_to_nothing_is_no_number() -> None:
    little = replace(EXPLANATION, fewer=Fewer(devices=("cuda:0",), missing_bytes=1))
    words = " ".join(printed(little).split())
    assert "it misses the budget slightly for every split" in words
