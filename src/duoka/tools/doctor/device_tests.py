"""Tests on the devices, in a child process: CUDA may hang there, or be lost.

The process takes a list of tests, and writes a line of JSON about torch and then after each test.
A test that raises ends the process: after an error CUDA is unreliable.
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
# Rounding to 8 binary digits is off by 1 in 512 of a number, sums of halves by some times that.
_MOST_ERROR = 1 / 64
_LARGE_BYTES, _SMALL_BYTES = 32 * 2**20, 4096
_ROUNDS, _SMALL_COPIES = 3, 20

Outcome = dict[str, Any]


def main() -> None:
    """Run the tests listed in the first argument."""
    request = json.loads(sys.argv[1])
    _write(about_torch())
    if request["capacities_bytes"]:
        virtual.set_gpus(request["capacities_bytes"], data="cpu")
    for kind, *names in request["tests"]:
        try:
            _write(_TESTS[kind](*names))
        except torch.OutOfMemoryError:
            _write({"skipped": "too little memory is free"})
        except Exception as error:
            text = " ".join(str(error).split())[:200] or type(error).__name__
            _write({"fault": text, "raised": True})
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
    generator = torch.Generator().manual_seed(0)
    factor, other_factor = (
        torch.randn(_WIDTH, _WIDTH, generator=generator).to(torch.bfloat16) for _ in range(2)
    )
    expected = factor.double() @ other_factor.double()
    product = (factor.to(name) @ other_factor.to(name)).cpu().double()
    difference = float((product - expected).abs().max() / expected.abs().max())
    is_right = difference <= _MOST_ERROR  # False for NaN
    return {"fault": "" if is_right else f"it is off by {difference:.0%}"}


def _test_copy(source: str, target: str) -> Outcome:
    fault = copy_fault(source, target)
    large = _seconds(source, target, _LARGE_BYTES, 1)
    return {
        "fault": fault,
        "bytes_per_second": _LARGE_BYTES / large,
        "latency_seconds": _seconds(source, target, _SMALL_BYTES, _SMALL_COPIES),
        "direct": source.startswith("cuda")
        and torch.cuda.can_device_access_peer(int(source[5:]), int(target[5:])),
    }


def _seconds(source: str, target: str, size: int, copies: int) -> float:
    """Measure the seconds of a copy, the best of a few rounds."""
    sent, received = (torch.zeros(size, dtype=torch.uint8, device=n) for n in (source, target))
    rounds = []
    for _ in range(_ROUNDS + 1):  # the first one is warming up
        start = time.perf_counter()
        for _ in range(copies):
            received.copy_(sent, non_blocking=True)
        for name in (source, target):
            torch.get_device_module(name).synchronize(name)
        rounds.append((time.perf_counter() - start) / copies)
    return max(min(rounds), 1e-9)


_TESTS: Mapping[str, Callable[..., Outcome]] = {"matrix": _test_matrix, "copy": _test_copy}


def _write(line: Outcome) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
