"""Options: what a person decides of vLLM, beside the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from duoka.errors import UsageError

from .nodes import Node

# Those that the plan decides, and those by which vLLM would answer elsewhere, or not say what it
# has; each with its short form.
_DECIDED = """
    model revision dtype pipeline-parallel-size pp tensor-parallel-size tp
    prefill-context-parallel-size pcp max-model-len max-num-seqs max-num-batched-tokens
    kv-cache-memory-bytes kv-cache-dtype num-gpu-blocks-override gpu-memory-utilization
    device-memory-utilization distributed-executor-backend nnodes n node-rank r master-addr
    master-port headless host port uds grpc ssl-keyfile ssl-certfile api-key served-model-name
    api-server-count asc config disable-log-stats shutdown-timeout
"""
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
    arguments : tuple of str
        Further arguments of ``vllm serve``.
    """

    python: Path
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    trust_remote_code: bool = False
    nodes: tuple[Node, ...] = ()
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        refuse_decided(self.arguments)

    def has(self, *names: str) -> bool:
        """Whether the further arguments have an option, by one of its names."""
        return any(_option(argument) in names for argument in self.arguments)


def refuse_decided(arguments: Sequence[str]) -> None:
    """Refuse further arguments that would undo the plan; long ones may be cut short."""
    decided = _DECIDED.split()
    for argument in arguments:
        name = _option(argument)
        is_cut = name and argument.startswith("--")
        if name is not None and (
            name in decided
            or name.startswith(_OF_SEVERAL)
            or (is_cut and any(known.startswith(name) for known in decided))
        ):
            raise UsageError(
                f"{argument.partition('=')[0][:60]} can't be given to vLLM here: the plan or an "
                "option of duoka's decides it",
                hint="plan for what you want (--context, --batch, --gpus), say --host, --port, "
                "--name, --api-key-file or --nodes, or run vLLM yourself: duoka plan --export vllm",
            )


def _option(argument: str) -> str | None:
    """An option's name as vLLM reads it, where dashes and underscores are the same."""
    if not argument.startswith("-"):
        return None
    name = argument.lstrip("-").partition("=")[0].partition(".")[0].replace("_", "-")
    # A short one has its number right behind it: -n2.
    return name if argument.startswith("--") else name.rstrip("0123456789")
