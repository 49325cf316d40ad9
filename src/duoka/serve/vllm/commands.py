"""The vLLM command of each machine of a plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from duoka.errors import UsageError
from duoka.forecast.profile import Profile
from duoka.planner.plan import Plan
from duoka.report.export import common
from duoka.report.export.text import format_command
from duoka.report.export.vllm import NAME, VllmCommand, read_command

from .nodes import Node, devices_by_node

MODULE = "vllm.entrypoints.cli.main"
"""The module of vLLM's command line."""
DRAIN_SECONDS = 30
"""How long requests in flight have after SIGTERM or Ctrl-C."""
_QUANTIZATION = ("--quantization", "-q")
# Where the machines find each other.
_MASTER_PORT = "29501"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """The options of a person beside the plan.

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

    @property
    def argument_names(self) -> set[str]:
        """The names of the further arguments; vLLM takes dashes and underscores alike."""
        words = (argument.partition("=")[0] for argument in self.arguments)
        return {word.replace("_", "-") for word in words}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """The command of a machine.

    `words` are ``serve``, the model and what has no value; `options` are pairs of a name and a
    value; `environment` is what the plan adds to the machine's own.
    """

    address: str
    words: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of vLLM's command line."""
        return (*self.words, *(word for option in self.options for word in option))

    def shell_text(self, python: Path) -> str:
        """Return the command for a shell, with the Python of vLLM's environment."""
        words = [os.fspath(python), "-P", "-m", MODULE, *self.words]
        return format_command(self.environment, words, self.options)


def commands(
    plan: Plan, options: VllmOptions, profile: Profile | None = None
) -> tuple[NodeCommand, ...]:
    """Return the command of each machine, in the order of ranks; the first machine answers.

    Parameters
    ----------
    plan : Plan
        For generating, on GPUs, in stages of whole layers.
    options : VllmOptions
    profile : Profile, optional
        Of the plan's model, for the bytes of a cache that isn't paged.

    Raises
    ------
    UsageError
        If vLLM can't be told this plan, or not on these machines.
    """
    _refuse_unservable(plan, options)
    plan = plan.lasting()  # other machines have another working directory
    command = read_command(plan, profile)
    code = ("--trust-remote-code",) if options.trust_remote_code else ()
    listening = (
        ("--served-model-name", served_name(plan, options)),
        ("--host", options.host),
        ("--port", str(options.port)),
        ("--shutdown-timeout", str(DRAIN_SECONDS)),
    )
    # Of an option that is there twice vLLM takes the last one: the plan's come after a person's.
    head = NodeCommand(
        address=options.host,
        words=("serve", command.model, *options.arguments, *code),
        options=(*command.options, *listening),
        environment=tuple(command.environment),
    )
    for name, _ in head.options:
        if name in options.argument_names:
            raise UsageError(
                f"{name} can't be passed to vLLM: the plan or another option of duoka sets it",
                hint="use --context, --batch, --gpus, --host, --port or --name, or run vLLM "
                "yourself: duoka plan --export vllm",
            )
    return _on_nodes(head, command, options.nodes) if len(options.nodes) > 1 else (head,)


def _on_nodes(
    head: NodeCommand, command: VllmCommand, nodes: Sequence[Node]
) -> tuple[NodeCommand, ...]:
    """Return the command of each machine; only the first one answers requests."""
    parts = devices_by_node(command.pipeline, nodes)
    # On a machine its GPUs have other numbers than in the plan.
    shared = [pair for pair in command.environment if not pair[0].startswith("CUDA_")]
    commands = []
    for rank, (node, devices) in enumerate(parts):
        joining = (
            ("--distributed-executor-backend", "mp"),
            ("--nnodes", str(len(parts))),
            ("--node-rank", str(rank)),
            ("--master-addr", parts[0][0].address),
            ("--master-port", _MASTER_PORT),
        )
        commands.append(
            NodeCommand(
                address=node.address,
                words=(*head.words, "--headless") if rank else head.words,
                options=(*(command.options if rank else head.options), *joining),
                environment=(*common.visible_environment(NAME, devices), *shared),
            )
        )
    return tuple(commands)


def served_name(plan: Plan, options: VllmOptions) -> str:
    """Return the name of the model for clients."""
    name = common.model_name(plan)
    return options.name or (PurePath(name).name if PurePath(name).is_absolute() else name)


def _refuse_unservable(plan: Plan, options: VllmOptions) -> None:
    """Refuse a plan for which there is a command, though vLLM couldn't run it as planned."""
    if plan.devices[0].startswith("vgpu"):
        raise UsageError(
            f"the plan is for virtual GPUs ({', '.join(plan.devices)[:80]}), and vLLM needs real "
            "ones",
            hint="plan for the GPUs of this machine: --gpus all",
        )
    quantize = plan.workload.quantize
    if quantize != "none" and not options.argument_names.intersection(_QUANTIZATION):
        raise UsageError(
            f"the plan's weights are in {quantize}, quantized during loading; vLLM doesn't do that",
            hint="plan an already quantized checkpoint or unquantized weights, or use vLLM's own "
            "--quantization",
        )
