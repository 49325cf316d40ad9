"""A Ray cluster of several nodes on this machine: ``python ray_cluster.py NAME=GPUS …``.

It prints its address, then takes lines from the standard input: the name of a node to lose. It ends
with its input, and all its nodes with it. What GPUs a node has is what its environment says
(`DUOKA_GPUS`); Ray is told their number.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STORE_BYTES = 80 * 2**20
_END_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class RayCluster:
    """A cluster that runs, its address, and the variable that marks all its processes."""

    address: str
    mark: str
    process: subprocess.Popen[str]

    def lose(self, node: str) -> None:
        """End a node as if its machine had lost its power."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(node, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == f"{node}\n"

    def processes(self) -> list[str]:
        """The command lines of all processes that its nodes have started, and those of these."""
        lines = []
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in (directory / "environ").read_bytes():
                    lines.append((directory / "cmdline").read_text().replace("\0", " "))
        return list(filter(None, lines))


@contextlib.contextmanager
def running_cluster(**nodes: str) -> Iterator[RayCluster]:
    """A cluster of a head and nodes with GPUs, as ``DUOKA_GPUS`` has them."""
    mark = f"DUOKA_TEST_CLUSTER={os.getpid()}"
    command = [sys.executable, __file__, *(f"{name}={gpus}" for name, gpus in nodes.items())]
    environment = {
        **os.environ,
        **dict([mark.split("=")]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # by default other tests' processes come before its workers
    }
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            yield RayCluster(address=address, mark=mark, process=process)
        finally:
            process.stdin.close()
            process.wait(_END_SECONDS)


def main() -> None:
    """Run a cluster until nobody asks any more."""
    from ray.cluster_utils import Cluster

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints
    common = {"object_store_memory": _STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **common})
    try:
        nodes = {}
        for word in sys.argv[1:]:
            name, _, gpus = word.partition("=")
            number = int(gpus.removeprefix("virtual:").partition("x")[0])
            nodes[name] = cluster.add_node(
                wait=False,
                node_name=name,
                num_cpus=number,
                num_gpus=number,
                env_vars={"DUOKA_GPUS": gpus},
                **common,
            )
        cluster.wait_for_nodes()
        print(cluster.address, file=out, flush=True)
        for line in sys.stdin:
            cluster.remove_node(nodes[line.strip()], allow_graceful=False)
            print(line.strip(), file=out, flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
