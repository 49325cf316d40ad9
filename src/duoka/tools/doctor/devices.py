"""What torch is built for, what bytes do between devices, and whether these compute rightly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from duoka.base.units import format_count

from .facts import Facts, named
from .findings import Finding

_LOST_BYTES = (
    "what one GPU copies to the other is lost and nobody reports it: models that are spread over "
    "them answer nonsense. duoka notices when it loads, and goes through the host's memory"
)
_REMEDIES = (
    "NCCL_P2P_DISABLE=1 for what uses NCCL (vLLM, torch.distributed); the cause is mostly an "
    "IOMMU (off: intel_iommu=off or amd_iommu=off for the kernel) or PCIe's ACS (off in the BIOS)"
)
_NO_COPY = "a copy fails: one of the two is lost or hangs, or what lies between them"
_LOOK = "`dmesg | grep -i xid` tells which card it is; NCCL_P2P_DISABLE=1 where copies hang"


def check_torch(facts: Facts) -> Iterator[Finding]:
    """Whether torch's build fits the driver and each GPU."""
    about = facts.probed.torch
    version, cuda = about.get("version", "torch"), about.get("cuda")
    if facts.machine is None:
        yield Finding("ok", f"torch {version}")
        return
    if "version" not in about:
        yield Finding(
            "error", "torch can't be imported", str(about.get("error", "")), "install torch again"
        )
        return
    if cuda is None:
        yield Finding(
            "error",
            f"torch {version} is a build for the CPU alone, and there are GPUs",
            "no GPU can be used",
            "install PyTorch's CUDA build of that version in its place",
        )
        return
    problems = [*_driver(facts, cuda), *_architectures(facts, about), *_unseen(facts, about)]
    yield from problems
    if not problems:
        yield Finding("ok", f"torch {version} for CUDA {cuda} fits the driver and each GPU")


def _driver(facts: Facts, cuda: str) -> Iterator[Finding]:
    known = facts.health.cuda_version
    if known is None:
        return
    built = tuple(int(part) for part in cuda.split(".")[:2])
    texts = f"torch is built for CUDA {cuda}, and the driver knows {known[0]}.{known[1]}"
    if known[0] < built[0]:
        advice = f"update the NVIDIA driver, or install a torch for CUDA {known[0]}"
        yield Finding("error", texts, "torch can't use a GPU over it", advice)
    elif known < built:
        yield Finding(
            "note", texts, "that works but for kernels that are compiled when they are first used"
        )


def _architectures(facts: Facts, about: Mapping[str, Any]) -> Iterator[Finding]:
    """GPUs for which the wheel has no kernels: neither their own nor any that can be translated."""
    listed = about.get("architectures", [])
    for gpu in {one.gpu.index: one.gpu for one in facts.present if one.torch_name}.values():
        capability = gpu.compute_capability
        if not listed or capability is None or any(_runs(one, capability) for one in listed):
            continue
        yield Finding(
            "error",
            f"GPU {gpu.index} ({gpu.name}) has compute capability {capability[0]}.{capability[1]}, "
            f"and this torch has kernels for {', '.join(listed)}",
            "nothing runs on it: no kernel image is available",
            "install a torch whose build lists it: newer for a new card, older for an old one",
        )


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether kernels for an architecture run on a card: of its generation, or translated."""
    kind, _, digits = architecture.rstrip("af").partition("_")
    built = int(digits[:-1]), int(digits[-1])
    return built <= capability and (kind == "compute" or built[0] == capability[0])


def _unseen(facts: Facts, about: Mapping[str, Any]) -> Iterator[Finding]:
    visible = facts.visible_uuids
    if about.get("error") and visible:
        meaning = f"{format_count(len(visible), 'GPU')} are visible to CUDA's driver"
        yield Finding("error", f"torch starts no CUDA: {about['error']}", meaning)
    elif len(about["uuids"]) != len(visible):
        text = f"torch sees {len(about['uuids'])} GPUs, and CUDA's driver {len(visible)}"
        yield Finding(
            "warning", text, "torch leaves out what it can't use", "look at the GPUs' checks above"
        )


def check_matrices(facts: Facts) -> Iterator[Finding]:
    """Whether a product in bfloat16 is on each device what the processor makes of it."""
    outcomes = _outcomes(facts, "matrix")
    for (name,), outcome in outcomes:
        if outcome.get("fault"):
            yield Finding(
                "error",
                f"{name}: a product of matrices in bfloat16 fails: {outcome['fault']}",
                "what a model computes on it can't be trusted",
                "leave it out (--gpus), and look at its temperature, clocks, power and cables",
            )
    yield from _untested(outcomes)
    right = [name for (name,), outcome in outcomes if outcome.get("fault") == ""]
    if right:
        yield Finding("ok", f"products in bfloat16 are right on {', '.join(right)}")


def check_copies(facts: Facts) -> Iterator[Finding]:
    """Whether bytes arrive, between each two devices in each direction, and how fast."""
    outcomes = _outcomes(facts, "copy")
    broken: dict[tuple[str, bool], list[str]] = {}
    for pair, outcome in outcomes:
        if outcome.get("fault"):
            fault = outcome["fault"], "raised" in outcome
            broken.setdefault(fault, []).append(" → ".join(pair))
    for (text, is_raised), pairs in broken.items():
        meaning, advice = (_NO_COPY, _LOOK) if is_raised else (_LOST_BYTES, _REMEDIES)
        yield Finding("error", f"{', '.join(pairs)}: {text}", meaning, advice)
    yield from _untested(outcomes)
    sound = [(pair, outcome) for pair, outcome in outcomes if outcome.get("fault") == ""]
    if sound:
        rates = [outcome["bytes_per_second"] / 1e9 for _, outcome in sound]
        times = [outcome["latency_seconds"] * 1e6 for _, outcome in sound]
        direct = sum(outcome["direct"] for _, outcome in sound)
        yield Finding(
            "ok",
            f"bytes arrive between {format_count(len(sound), 'ordered pair')} ({direct} directly): "
            f"{_range(rates)} GB/s, {_range(times)} µs",
            figures={"pairs": [{"source": s, "target": t, **outcome} for (s, t), outcome in sound]},
        )


def _outcomes(facts: Facts, kind: str) -> list[tuple[tuple[str, ...], Mapping[str, Any]]]:
    return [
        (test[1:], outcome) for test, outcome in facts.probed.outcomes.items() if test[0] == kind
    ]


def _untested(outcomes: Sequence[tuple[Sequence[str], Mapping[str, Any]]]) -> Iterator[Finding]:
    reasons: dict[str, list[str]] = {}
    for names, outcome in outcomes:
        if "skipped" in outcome:
            reasons.setdefault(outcome["skipped"], []).append(" → ".join(names))
    for reason, pairs in reasons.items():
        yield Finding("skipped", f"{named(pairs)}: {reason}")


def _range(numbers: Sequence[float]) -> str:
    least, most = f"{min(numbers):.3g}", f"{max(numbers):.3g}"
    return least if least == most else f"{least} to {most}"
