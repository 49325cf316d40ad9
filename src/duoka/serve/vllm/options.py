"""Options: what a person decides of vLLM, beside the plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from duoka.base.files import read_text, why
from duoka.errors import UsageError

from .nodes import Node

_MOST_KEY_BYTES = 4096
# Those that the plan decides, and those by which vLLM would answer elsewhere, or not say what it
# has; each with its short form.
_DECIDED = {
    "model": "the plan",
    "revision": "the plan",
    "dtype": "the plan",
    "pipeline-parallel-size": "the plan",
    "pp": "the plan",
    "tensor-parallel-size": "the plan",
    "tp": "the plan",
    "prefill-context-parallel-size": "the plan",
    "pcp": "the plan",
    "max-model-len": "the plan",
    "max-num-seqs": "the plan",
    "max-num-batched-tokens": "the plan",
    "kv-cache-memory-bytes": "the plan",
    "kv-cache-dtype": "the plan",
    "num-gpu-blocks-override": "the plan",
    "gpu-memory-utilization": "the plan",
    "device-memory-utilization": "the plan",
    "distributed-executor-backend": "--nodes",
    "nnodes": "--nodes",
    "n": "--nodes",
    "node-rank": "--nodes",
    "r": "--nodes",
    "master-addr": "--nodes",
    "master-port": "--nodes",
    "headless": "--nodes",
    "host": "--host",
    "port": "--port",
    "uds": "--port",
    "grpc": "--port",
    "ssl-keyfile": "--port",
    "ssl-certfile": "--port",
    "api-key": "--api-key-file",
    "api-server-count": "one process",
    "asc": "one process",
    "config": "options one by one",
    "disable-log-stats": "the number of blocks, which is read from them",
    "shutdown-timeout": "the time to drain",
}
# There is one engine; those of several have many options.
_OF_SEVERAL = ("data-parallel", "dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """What a person decides.

    Parameters
    ----------
    python : Path
        The Python that vLLM is installed for.
    host, port
        Where vLLM answers; port 0 is a free one.
    api_key_file : Path, optional
        A file with the key that requests have to come with.
    nodes : tuple of Node
        The machines that share the plan, this one first; empty for this one alone.
    master_port : int
        Where the machines find each other.
    arguments : tuple of str
        Further arguments of ``vllm serve``.
    start_seconds : float
        How long vLLM may take until it answers.
    drain_seconds : int
        How long requests in flight have after SIGTERM or Ctrl-C.
    """

    python: Path
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    nodes: tuple[Node, ...] = ()
    master_port: int = 29501
    arguments: tuple[str, ...] = ()
    start_seconds: float = 1800.0
    drain_seconds: int = 30

    def __post_init__(self) -> None:
        for name, port, least in (("port", self.port, 0), ("master_port", self.master_port, 1)):
            if not least <= port < 2**16:
                raise UsageError(
                    f"{name} is {port}; it must be from {least} to 65535",
                    hint="8000 is usual" if name == "port" else "29501 is usual",
                )
        if self.start_seconds <= 0 or self.drain_seconds < 0:
            raise UsageError(
                f"vLLM has {self.start_seconds} s to start and {self.drain_seconds} s to end",
                hint="say how many seconds each may take",
            )
        refuse_decided(self.arguments)

    def has(self, *names: str) -> bool:
        """Whether the further arguments have an option, by one of its names."""
        return any(_option(argument) in names for argument in self.arguments)


def refuse_decided(arguments: Sequence[str]) -> None:
    """Refuse further arguments that would undo the plan."""
    for argument in arguments:
        name = _option(argument)
        if name is None:
            continue
        decider = _decider(name, is_long=argument.startswith("--"))
        if decider is not None:
            raise UsageError(
                f"{argument.partition('=')[0][:60]} can't be given to vLLM here: {decider} "
                "decides it",
                hint="plan for what you want (--context, --batch, --gpus), or run vLLM yourself: "
                "duoka plan --export vllm",
            )


def _decider(name: str, *, is_long: bool) -> str | None:
    """What decides an option; a long one may be cut short, as long as it is clear which it is."""
    if name.startswith(_OF_SEVERAL):
        return "the plan"
    for decided, decider in _DECIDED.items():
        if name == decided or (is_long and name and decided.startswith(name)):
            return decider
    return None


def _option(argument: str) -> str | None:
    """An option's name as vLLM reads it, where dashes and underscores are the same."""
    if not argument.startswith("-"):
        return None
    name = argument.lstrip("-").partition("=")[0].partition(".")[0].replace("_", "-")
    # A short one has its number right behind it: -n2.
    return name if argument.startswith("--") else name.rstrip("0123456789")


def read_key(path: Path | None) -> str | None:
    """The key in a file; None without a file.

    Raises
    ------
    UsageError
        If it can't be read, or there isn't one key in it.
    """
    if path is None:
        return None
    try:
        text = read_text(path, most_bytes=_MOST_KEY_BYTES)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the key in {os.fspath(path)!r} can't be read: {why(error)}",
            hint="write one key into a file that only you can read",
        ) from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    key = lines[0] if len(lines) == 1 else ""
    if not key.isascii() or not key.isprintable() or not key or " " in key:
        raise UsageError(
            f"{os.fspath(path)!r} has {len(lines)} lines that aren't empty; vLLM takes one key, of "
            "letters, digits and signs",
            hint="write one key into it, on one line",
        )
    return key
