"""Device checks: torch's build, products of matrices, and copies between devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from duoka.base.units import format_count
from duoka.hardware import cuda_driver, nvml

from .facts import Facts, Finding, by_gpu, join_names, or_ok

_WRONG_COPY = (
    "data copied between the GPUs is lost without an error, so models split over them generate "
    "nonsense; duoka detects this during loading and copies through CPU memory",
    "set NCCL_P2P_DISABLE=1 for programs with NCCL (vLLM, torch.distributed); the usual cause is "
    "the IOMMU (disable it with the kernel parameter intel_iommu=off or amd_iommu=off) or PCIe "
    "ACS (disable it in the BIOS)",
)
_FAILED_COPY = (
    "a copy fails: one of the GPUs or the link between them hangs",
    "find the GPU with `dmesg | grep -i xid`; set NCCL_P2P_DISABLE=1 if copies hang",
)


def check_torch(facts: Facts) -> Iterator[Finding]:
    """Compare torch's build with the driver and each GPU."""
    about = facts.probed.torch
    version, cuda = about.get("version"), about.get("cuda")
    if version is None:
        meaning = str(about.get("error", ""))
        yield Finding("error", "torch can't be imported", meaning, "install torch again")
    elif facts.machine is None:
        yield Finding("ok", f"torch {version}")
    elif cuda is None:
        text = f"torch {version} is a CPU-only build, and this machine has GPUs"
        advice = "install the CUDA build of that PyTorch version"
        yield Finding("error", text, "no GPU can be used", advice)
    else:
        text = f"torch {version} for CUDA {cuda} supports the driver and every GPU"
        yield from or_ok(_check_build(facts, about, cuda), text)


def _check_build(facts: Facts, about: Mapping[str, Any], cuda: str) -> Iterator[Finding]:
    """Compare torch's CUDA version, kernels and visible GPUs with the driver's."""
    newest = facts.machine and facts.machine.cuda_version
    built = tuple(int(part) for part in cuda.split(".")[:2])
    if newest and newest < built:
        text = f"torch is built for CUDA {cuda}, and the driver supports {newest[0]}.{newest[1]}"
        if newest[0] < built[0]:
            advice = f"update the NVIDIA driver, or install a torch for CUDA {newest[0]}"
            yield Finding("error", text, "torch can't use a GPU with this driver", advice)
        else:
            meaning = "kernels that are compiled at first use will fail"
            yield Finding("note", text, meaning)
    visible = {present.gpu.index: present.gpu for present in facts.present if present.torch_name}
    yield from by_gpu(visible.values(), partial(_check_kernels, about.get("architectures", [])))
    visible_uuids, uuids = cuda_driver.visible_uuids(), about["uuids"]
    if about.get("error") and visible_uuids:
        meaning = f"{format_count(len(visible_uuids), 'GPU')} are visible to CUDA's driver"
        yield Finding("error", f"torch can't initialize CUDA: {about['error']}", meaning)
    elif len(uuids) != len(visible_uuids):
        text = f"torch sees {len(uuids)} GPUs, and CUDA's driver {len(visible_uuids)}"
        meaning = "torch ignores GPUs that it can't use"
        yield Finding("warning", text, meaning, "see the checks of the GPUs above")


def _check_kernels(listed: Sequence[str], gpu: nvml.NvmlGpu) -> Iterator[Finding]:
    """Report a GPU that no architecture of torch's build supports, as binary code or as PTX."""
    capability = gpu.compute_capability
    if listed and capability and not any(_can_run(kernels, capability) for kernels in listed):
        text = (
            f"{gpu.name} has compute capability {capability[0]}.{capability[1]}, and this torch "
            f"has kernels for {', '.join(listed)}"
        )
        meaning = "no kernel runs on it: no kernel image is available"
        advice = (
            "install a torch build that supports it: a newer one for a new GPU, an older one "
            "for an old GPU"
        )
        yield Finding("error", text, meaning, advice)


def _can_run(architecture: str, capability: tuple[int, int]) -> bool:
    """Return True if kernels of an architecture run on a GPU.

    Binary code ("sm_80") needs the same major version and at least the minor version; PTX
    ("compute_80") is compiled by the driver for any newer GPU.
    """
    kind, _, digits = architecture.rstrip("af").partition("_")
    built = int(digits[:-1]), int(digits[-1])
    return built <= capability and (kind == "compute" or built[0] == capability[0])


def check_matrices(facts: Facts) -> Iterator[Finding]:
    """Report for each device if its bfloat16 matrix product equals the CPU's."""
    outcomes = _outcomes(facts, "matrix")
    for name, outcome in outcomes.items():
        if outcome.get("fault"):
            text = f"{name}: a bfloat16 matrix product is wrong: {outcome['fault']}"
            meaning = "results of models on it are unreliable"
            advice = "exclude it (--gpus), and check its temperature, clocks, power and cables"
            yield Finding("error", text, meaning, advice)
    yield from _skipped_tests(outcomes)
    right = [name for name, outcome in outcomes.items() if outcome.get("fault") == ""]
    if right:
        yield Finding("ok", f"bfloat16 matrix products are right on {', '.join(right)}")


def check_copies(facts: Facts) -> Iterator[Finding]:
    """Check copies between each ordered pair of devices, and report their speed."""
    outcomes = _outcomes(facts, "copy")
    broken: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for pair, outcome in outcomes.items():
        if outcome.get("fault"):
            broken[outcome["fault"], "raised" in outcome].append(pair)
    for (text, is_raised), pairs in broken.items():
        follows = _FAILED_COPY if is_raised else _WRONG_COPY
        yield Finding("error", f"{', '.join(pairs)}: {text}", *follows)
    yield from _skipped_tests(outcomes)
    sound = {pair: outcome for pair, outcome in outcomes.items() if outcome.get("fault") == ""}
    if sound:
        rates = [outcome["bytes_per_second"] / 1e9 for outcome in sound.values()]
        times = [outcome["latency_seconds"] * 1e6 for outcome in sound.values()]
        direct = sum(outcome["direct"] for outcome in sound.values())
        text = (
            f"copies arrive intact in {format_count(len(sound), 'direction')} ({direct} "
            f"peer-to-peer): {_format_range(rates)} GB/s, {_format_range(times)} µs"
        )
        yield Finding("ok", text, figures={"pairs": sound})


def _outcomes(facts: Facts, kind: str) -> dict[str, Mapping[str, Any]]:
    """Return the outcomes of one kind of test by device, or by "source → target"."""
    return {
        " → ".join(names): outcome
        for (test, *names), outcome in facts.probed.outcomes.items()
        if test == kind
    }


def _skipped_tests(outcomes: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Report the skipped tests, grouped by reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for names, outcome in outcomes.items():
        if "skipped" in outcome:
            reasons[outcome["skipped"]].append(names)
    for reason, pairs in reasons.items():
        yield Finding("skipped", f"{join_names(pairs)}: {reason}")


def _format_range(numbers: Sequence[float]) -> str:
    """Format the lowest and the highest of some numbers."""
    lowest, highest = f"{min(numbers):.3g}", f"{max(numbers):.3g}"
    return lowest if lowest == highest else f"{lowest} to {highest}"
