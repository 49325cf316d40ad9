"""What torch is built for, what bytes do between devices, and whether these compute rightly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from duoka.base.units import format_count
from duoka.hardware.fleet import Fleet

from .facts import Facts, named
from .findings import Finding, error, note, ok, skipped, warning

_LEAST_SHARE = 0.3
_LOST_BYTES = (
    "what one GPU copies to the other is lost and nobody reports it: models that are spread over "
    "them answer nonsense. duoka notices when it loads, and goes through the host's memory"
)
_REMEDIES = (
    "NCCL_P2P_DISABLE=1 for what uses NCCL (vLLM, torch.distributed); the cause is mostly an "
    "IOMMU (off: intel_iommu=off or amd_iommu=off for the kernel) or PCIe's ACS (off in the BIOS)"
)


def check_torch(facts: Facts) -> Iterator[Finding]:
    """Whether torch's build fits the driver and each GPU."""
    about = facts.probed.torch
    version, cuda = about.get("version", "torch"), about.get("cuda")
    if facts.machine is None:
        yield ok(f"torch {version}")
        return
    if "version" not in about:
        yield error("torch can't be imported", str(about.get("error", "")), "install torch again")
        return
    if cuda is None:
        yield error(
            f"torch {version} is a build for the CPU alone, and there are GPUs",
            "no GPU can be used",
            "install PyTorch's CUDA build of that version in its place",
        )
        return
    problems = [*_driver(facts, cuda), *_architectures(facts, about), *_unseen(facts, about)]
    yield from problems
    if not problems:
        yield ok(f"torch {version} for CUDA {cuda} fits the driver and each GPU")


def _driver(facts: Facts, cuda: str) -> Iterator[Finding]:
    known = facts.health.cuda_version
    if known is None:
        return
    built = tuple(int(part) for part in cuda.split(".")[:2])
    texts = f"torch is built for CUDA {cuda}, and the driver knows {known[0]}.{known[1]}"
    if known[0] < built[0]:
        advice = f"update the NVIDIA driver, or install a torch for CUDA {known[0]}"
        yield error(texts, "torch can't use a GPU over it", advice)
    elif known < built:
        yield note(texts, "that works but for kernels that are compiled when they are first used")


def _architectures(facts: Facts, about: Mapping[str, Any]) -> Iterator[Finding]:
    """GPUs for which the wheel has no kernels: neither their own nor any that can be translated."""
    listed = [name.partition("_") for name in about.get("architectures", [])]
    if not listed or facts.machine is None:
        return
    kernels = {(kind, _capability(digits)) for kind, _, digits in listed}
    uncovered = [
        gpu
        for gpu in facts.machine.gpus
        if gpu.compute_capability is not None
        and not any(
            (kind == "sm" and one[0] == gpu.compute_capability[0] and one <= gpu.compute_capability)
            or (kind == "compute" and one <= gpu.compute_capability)
            for kind, one in kernels
        )
    ]
    for gpu in uncovered:
        capability = ".".join(map(str, gpu.compute_capability or ()))
        yield error(
            f"GPU {gpu.index} ({gpu.name}) has compute capability {capability}, and this torch "
            f"has kernels for {', '.join(about['architectures'])}",
            "nothing runs on it: no kernel image is available",
            "install a torch whose build lists it: newer for a new card, older for an old one",
        )


def _capability(digits: str) -> tuple[int, int]:
    number = digits.rstrip("af")
    return int(number[:-1] or 0), int(number[-1:] or 0)


def _unseen(facts: Facts, about: Mapping[str, Any]) -> Iterator[Finding]:
    visible = facts.visible_uuids
    if about.get("error") and visible:
        meaning = f"{format_count(len(visible), 'GPU')} are visible to CUDA's driver"
        yield error(f"torch starts no CUDA: {about['error']}", meaning)
    elif len(about["uuids"]) != len(visible):
        text = f"torch sees {len(about['uuids'])} GPUs, and CUDA's driver {len(visible)}"
        yield warning(text, "torch leaves out what it can't use", "look at the GPUs' checks above")


def check_matrices(facts: Facts) -> Iterator[Finding]:
    """Whether a product in bfloat16 is on each device what the processor makes of it."""
    outcomes = _outcomes(facts, "matrix")
    for (name,), outcome in outcomes:
        if outcome.get("fault"):
            yield error(
                f"{name}: a product of matrices in bfloat16 fails: {outcome['fault']}",
                "what a model computes on it can't be trusted",
                "leave it out (--gpus), and look at its temperature, clocks, power and cables",
            )
    yield from _untested(outcomes)
    right = [name for (name,), outcome in outcomes if outcome.get("fault") == ""]
    if right:
        yield ok(f"products in bfloat16 are right on {', '.join(right)}")


def check_copies(facts: Facts) -> Iterator[Finding]:
    """Whether bytes arrive, between each two devices in each direction, and how fast."""
    outcomes = _outcomes(facts, "copy")
    broken: dict[str, list[str]] = {}
    for pair, outcome in outcomes:
        if outcome.get("fault"):
            broken.setdefault(outcome["fault"], []).append(" → ".join(pair))
    for fault, pairs in broken.items():
        yield error(f"{', '.join(pairs)}: {fault}", _LOST_BYTES, _REMEDIES)
    yield from _untested(outcomes)
    sound = [(pair, outcome) for pair, outcome in outcomes if outcome.get("fault") == ""]
    yield from _slow(facts.fleet, sound)
    if sound:
        rates = [outcome["bytes_per_second"] / 1e9 for _, outcome in sound]
        times = [outcome["latency_seconds"] * 1e6 for _, outcome in sound]
        direct = sum(outcome["direct"] for _, outcome in sound)
        yield ok(
            f"bytes arrive between {len(sound)} ordered pairs ({direct} directly): "
            f"{_range(rates)} GB/s, {_range(times)} µs",
            pairs=[{"source": s, "target": t, **outcome} for (s, t), outcome in sound],
        )


def _slow(
    fleet: Fleet | None, sound: Sequence[tuple[Sequence[str], Mapping[str, Any]]]
) -> Iterator[Finding]:
    slow = []
    for pair, outcome in sound:
        link = None if fleet is None else fleet.link(*pair)
        if link is not None and outcome["bytes_per_second"] < _LEAST_SHARE * link.bytes_per_second:
            rate, expected = outcome["bytes_per_second"] / 1e9, link.bytes_per_second / 1e9
            slow.append(f"{' → '.join(pair)}: {rate:.1f} GB/s, not {expected:.0f}")
    if slow:
        yield warning(
            f"slower than their links: {named(slow)}",
            "hidden states take that much longer from GPU to GPU",
            "look at PCIe's width, the slots and the NUMA nodes above; who else uses the link?",
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
        yield skipped(f"{named(pairs)}: {reason}")


def _range(numbers: Sequence[float]) -> str:
    least, most = f"{min(numbers):.3g}", f"{max(numbers):.3g}"
    return least if least == most else f"{least} to {most}"
