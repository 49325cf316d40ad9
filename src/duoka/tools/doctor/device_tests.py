"""Tests on the devices, run in a child process because CUDA may hang or become unusable.

The argument is a JSON object with the tests. The process writes one line of JSON about torch, then
one line after each test. A test that raises ends the process: CUDA is unreliable after an error.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from duoka import virtual
from duoka.runtime.dispatch.copies import copy_fault

_WIDTH = 256
# The product is rounded to bfloat16's 8 significant bits: an error of up to 1/512, or a few times
# that if partial sums are rounded too.
_MAX_ERROR = 1 / 64
_LARGE_BYTES, _SMALL_BYTES = 32 * 2**20, 4096
_ROUNDS, _SMALL_COPIES = 3, 20

Outcome = dict[str, Any]


def main() -> None:
    """Run the tests that the first argument lists as JSON."""
    request = json.loads(sys.argv[1])
    _write_line(about_torch())
    if request["capacities_bytes"]:
        virtual.set_gpus(request["capacities_bytes"], data="cpu")
    for kind, *names in request["tests"]:
        try:
            _write_line(_TESTS[kind](*names))
        except torch.OutOfMemoryError:
            _write_line({"skipped": "too little memory is free"})
        except Exception as error:
            text = " ".join(str(error).split())[:200] or type(error).__name__
            _write_line({"fault": text, "raised": True})
            return


def about_torch() -> Outcome:
    """Report torch's build and its visible GPUs."""
    about: Outcome = {"version": torch.__version__, "cuda": torch.version.cuda, "uuids": []}
    try:
        torch.cuda.init()
        properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        about["uuids"] = [str(gpu.uuid) for gpu in properties]
        about["architectures"] = torch.cuda.get_arch_list()
    except (RuntimeError, AssertionError) as error:
        about["error"] = " ".join(str(error).split())[:300]
    return about


def _test_matrix(name: str) -> Outcome:
    """Compare a bfloat16 product on a device with the product in float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    factor, other_factor = (
        torch.randn(_WIDTH, _WIDTH, generator=generator).to(torch.bfloat16) for _ in range(2)
    )
    expected = factor.double() @ other_factor.double()
    product = (factor.to(name) @ other_factor.to(name)).cpu().double()
    difference = float((product - expected).abs().max() / expected.abs().max())
    is_right = difference <= _MAX_ERROR  # False for NaN
    return {"fault": "" if is_right else f"it is off by {difference:.0%}"}


def _test_copy(source: str, target: str) -> Outcome:
    """Check copies from one device to another for lost data, and measure their speed."""
    fault = copy_fault(source, target)
    large = _copy_seconds(source, target, _LARGE_BYTES, 1)
    return {
        "fault": fault,
        "bytes_per_second": _LARGE_BYTES / large,
        "latency_seconds": _copy_seconds(source, target, _SMALL_BYTES, _SMALL_COPIES),
        "direct": source.startswith("cuda")
        and torch.cuda.can_device_access_peer(int(source[5:]), int(target[5:])),
    }


def _copy_seconds(source: str, target: str, size: int, copies: int) -> float:
    """Measure the seconds of one copy of `size` bytes: the best round of `copies` copies."""
    sent, received = (torch.zeros(size, dtype=torch.uint8, device=n) for n in (source, target))
    rounds = []
    for _ in range(_ROUNDS + 1):  # the first round also warms up
        start = time.perf_counter()
        for _ in range(copies):
            received.copy_(sent, non_blocking=True)
        for name in (source, target):
            torch.get_device_module(name).synchronize(name)
        rounds.append((time.perf_counter() - start) / copies)
    return max(min(rounds), 1e-9)


_TESTS: Mapping[str, Callable[..., Outcome]] = {"matrix": _test_matrix, "copy": _test_copy}


def _write_line(line: Outcome) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
