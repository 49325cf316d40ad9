"""duoka's server beside `transformers serve`: the same model on the CPU, the same open load.

    python benchmarks/serve_beside.py [--seconds 20] [--rates 4 8 16 32]

Requests of 32 new tokens come at random (Poisson), at so many a second. transformers' server runs
twice, without and with its continuous batching. For each: requests that were answered and that were
refused or failed, tokens a second, time to the first text and to the end (medians and 99th of a
hundred, in milliseconds; random bytes make text only now and then, so that nothing is told of the
time between tokens). Clients and servers share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve import open_load, shown
from served import serving
from tuning import write_model

import duoka

_START_SECONDS = 120
_WORK = duoka.Workload(batch=8, prompt_tokens=96, new_tokens=32, dtype="float32", cache="paged")
_BATCHING = ("--continuous-batching", "--cb-block-size", "16", "--cb-num-blocks", "128")


@contextmanager
def transformers_serving(model: Path, log: Path, *options: str) -> Iterator[str]:
    """The address of `transformers serve` with a model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = str(Path(sys.executable).with_name("transformers"))
    command = [program, "serve", str(model), "--device", "cpu", "--dtype", "float32"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), *options],
            stdout=output,
            stderr=output,
        )
    try:
        end = time.monotonic() + _START_SECONDS
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def measure(
    title: str, url: str, rates: list[float], seconds: float, more: Mapping[str, Any] | None
) -> None:
    """Print a row for each rate; the first requests aren't counted."""
    asyncio.run(open_load(url, rates[0], 3, more))
    for rate in rates:
        answers, _, passed = asyncio.run(open_load(url, rate, seconds, more))
        answered = answers.statuses.count(200) - answers.num_cut
        print(
            f"| {title} | {rate:g} | {answered} | {len(answers.statuses) - answered} | "
            f"{answers.num_tokens / passed:.0f} | {shown(answers.first_seconds)} | "
            f"{shown(answers.whole_seconds)} |",
            flush=True,
        )


def main() -> None:
    """Run it all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rates", type=float, nargs="+", default=[4, 8, 16, 32])
    options = parser.parse_args()
    print("| server | requests/s | answered | not | tokens/s | first text | whole answer |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        model, log = write_model("llama", Path(folder) / "llama"), Path(folder) / "log"
        plan = duoka.plan(model, "virtual:1x256MiB", _WORK)
        file = Path(folder) / "plan.json"
        file.write_text(plan.to_json().replace("vgpu:", "cpu:"))
        with serving(model, log, "--max-queue", "64", gpus=("--plan", str(file))) as served:
            measure("duoka", served.url, options.rates, options.seconds, None)
        (model / "generation_config.json").write_text("{}")  # no answer ends before it is that long
        for more in ((), _BATCHING):
            with transformers_serving(model, log, *more) as url:
                title = "transformers" + ", continuous batching" * bool(more)
                body = {"model": str(model)}
                measure(title, url, options.rates, options.seconds, body)


if __name__ == "__main__":
    main()
