"""Commands: what is to be run on each machine of a plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from duoka.errors import UsageError
from duoka.forecast.profile import Profile
from duoka.hardware.device import Device
from duoka.planner.plan import Plan
from duoka.report.export import common
from duoka.report.export.text import format_command
from duoka.report.export.vllm import NAME, VllmCommand, read_command

from .nodes import Node, devices_by_node
from .options import VllmOptions

MODULE = "vllm.entrypoints.cli.main"
"""The module of vLLM's command line."""
DRAIN_SECONDS = 30
"""How long requests in flight have after SIGTERM or Ctrl-C."""
_QUANTIZATION = ("quantization", "q")
# Where the machines find each other.
_MASTER_PORT = "29501"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """What is run on one machine.

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
        """The same for a shell, with the Python that vLLM is installed for."""
        words = [os.fspath(python), "-P", "-m", MODULE, *self.words]
        return format_command(self.environment, words, self.options)


def commands(
    plan: Plan, options: VllmOptions, profile: Profile | None = None
) -> tuple[NodeCommand, ...]:
    """What is run on each machine, in the order of ranks; the first one answers requests.

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
    refuse_unservable(plan, options)
    plan = plan.lasting()  # other machines have another working directory
    command = read_command(plan, profile)
    code = ("--trust-remote-code",) if options.trust_remote_code else ()
    # Of an option that is there twice vLLM takes the last one: the plan's come after a person's.
    head = NodeCommand(
        address=options.host,
        words=("serve", command.model, *options.arguments, *code),
        options=(*command.options, *_listening(plan, options)),
        environment=tuple(command.environment),
    )
    if len(options.nodes) < 2:
        return (head,)
    parts = devices_by_node(command.pipeline, options.nodes)
    return tuple(
        replace(
            head,
            address=node.address,
            words=(*head.words, "--headless") if rank else head.words,
            options=(
                *(command.options if rank else head.options),
                *_joining(parts[0][0], rank, len(parts)),
            ),
            environment=_environment_there(command, devices),
        )
        for rank, (node, devices) in enumerate(parts)
    )


def _environment_there(
    command: VllmCommand, devices: Sequence[Device]
) -> tuple[tuple[str, str], ...]:
    """The plan's environment on the machine of some of its GPUs, which have other numbers there."""
    shared = [pair for pair in command.environment if not pair[0].startswith("CUDA_")]
    return (*common.visible_environment(NAME, devices), *shared)


def _joining(head: Node, rank: int, num_nodes: int) -> list[tuple[str, str]]:
    """How a machine finds the others."""
    return [
        ("--distributed-executor-backend", "mp"),
        ("--nnodes", str(num_nodes)),
        ("--node-rank", str(rank)),
        ("--master-addr", head.address),
        ("--master-port", _MASTER_PORT),
    ]


def _listening(plan: Plan, options: VllmOptions) -> list[tuple[str, str]]:
    """Where requests are answered, and for which name."""
    return [
        ("--served-model-name", served_name(plan, options)),
        ("--host", options.host),
        ("--port", str(options.port)),
        ("--shutdown-timeout", str(DRAIN_SECONDS)),
    ]


def served_name(plan: Plan, options: VllmOptions) -> str:
    """What clients call the model."""
    name = common.model_name(plan)
    return options.name or (PurePath(name).name if PurePath(name).is_absolute() else name)


def refuse_unservable(plan: Plan, options: VllmOptions) -> None:
    """Refuse a plan that can be written down for vLLM, and that it couldn't run as planned."""
    if plan.workload.training is not None:
        raise UsageError(
            "vLLM serves models, and the plan is for training one", hint="plan without training"
        )
    if plan.devices[0].startswith("vgpu"):
        raise UsageError(
            f"the plan is for virtual GPUs ({', '.join(plan.devices)[:80]}), and vLLM needs real "
            "ones",
            hint="plan for the GPUs of this machine: --gpus all",
        )
    if not plan.source or plan.source.endswith(".json"):
        raise UsageError(
            "the plan was made from a config or a model in memory, and vLLM loads weights",
            hint="plan the directory or the repository with the weights",
        )
    if plan.workload.quantize != "none" and not options.has(*_QUANTIZATION):
        raise UsageError(
            f"the plan's weights are in {plan.workload.quantize}, made while loading; vLLM makes "
            "no such weights",
            hint="plan a checkpoint that is quantized already, or one whose weights fit as they "
            "are; --quantization is vLLM's own way",
        )
