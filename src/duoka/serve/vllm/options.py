"""Options: what a person decides of vLLM, beside the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from duoka.errors import UsageError

from .nodes import Node

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
    "served-model-name": "--name",
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
    name : str, optional
        What clients call the model; by default its repository, or the name of its directory.
    api_key : str, optional
        The key that requests have to come with.
    trust_remote_code : bool
        Let the checkpoint's code run.
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
    name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    trust_remote_code: bool = False
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
        if self.api_key is not None and not _is_key(self.api_key):
            raise UsageError(
                f"the API key has {len(self.api_key)} characters; vLLM takes letters, digits and "
                "signs of ASCII, without spaces, and at least one",
                hint="head -c 32 /dev/urandom | base64 > key",
            )
        refuse_decided(self.arguments)

    def has(self, *names: str) -> bool:
        """Whether the further arguments have an option, by one of its names."""
        return any(_option(argument) in names for argument in self.arguments)


def _is_key(text: str) -> bool:
    """Whether a header can have it as it is."""
    return text.isascii() and text.isprintable() and " " not in text and text != ""


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
