"""The vLLM command for a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePath

from duoka.errors import UsageError
from duoka.forecast.profile import Profile
from duoka.planner.plan import Plan
from duoka.report.export import common
from duoka.report.export.vllm import read_command

MODULE = "vllm.entrypoints.cli.main"
"""The module of vLLM's command-line interface."""
DRAIN_SECONDS = 30
"""Seconds for running requests to finish after SIGTERM or Ctrl-C."""
_QUANTIZATION = ("--quantization", "-q")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """The user's options for vLLM, in addition to the plan.

    Parameters
    ----------
    python : Path
        The Python of the environment in which vLLM is installed.
    host, port
        The address at which vLLM listens; port 0 selects a free one.
    name : str, optional
        The model's name for clients; by default its repository, or the name of its directory.
    api_key : str, optional
        The API key that clients must send; by default none.
    trust_remote_code : bool
        Allow the checkpoint's own code to run.
    arguments : tuple of str
        Further arguments of ``vllm serve``.
    """

    python: Path
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    trust_remote_code: bool = False
    arguments: tuple[str, ...] = ()

    @property
    def argument_names(self) -> set[str]:
        """The option names in `arguments`, with dashes: vLLM accepts underscores, too."""
        words = (argument.partition("=")[0] for argument in self.arguments)
        return {word.replace("_", "-") for word in words}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommand:
    """The vLLM command that serves a plan.

    `words` are ``serve``, the model, the user's further arguments, and options without a value.
    `options` are pairs of name and value. `environment` are the variables that the plan sets in
    addition to the machine's environment.
    """

    words: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The argv of vLLM's command line, after the program."""
        return (*self.words, *(word for option in self.options for word in option))


def make_command(plan: Plan, options: VllmOptions, profile: Profile | None = None) -> ServeCommand:
    """Return the command that serves a plan with vLLM.

    Parameters
    ----------
    plan : Plan
        A plan for generation on GPUs, in stages of whole layers.
    options : VllmOptions
    profile : Profile, optional
        The profile of the plan's model, for the bytes of a KV cache that isn't paged.

    Raises
    ------
    UsageError
        If vLLM can't run this plan.
    """
    _refuse_unservable(plan, options)
    plan = plan.lasting()
    command = read_command(plan, profile)
    code = ("--trust-remote-code",) if options.trust_remote_code else ()
    server_options = (
        ("--served-model-name", served_name(plan, options)),
        ("--host", options.host),
        ("--port", str(options.port)),
        ("--shutdown-timeout", str(DRAIN_SECONDS)),
    )
    # Of a repeated option, vLLM uses the last one, so the plan's options follow the user's.
    served = ServeCommand(
        words=("serve", command.model, *options.arguments, *code),
        options=(*command.options, *server_options),
        environment=tuple(command.environment),
    )
    for name, _ in served.options:
        if name in options.argument_names:
            raise UsageError(
                f"{name} can't be passed to vLLM: the plan or another option of duoka sets it",
                hint="use --context, --batch, --gpus, --host, --port or --name, or run vLLM "
                "yourself: duoka plan --export vllm",
            )
    return served


def served_name(plan: Plan, options: VllmOptions) -> str:
    """Return the model's name for clients; see `VllmOptions`."""
    name = common.model_name(plan)
    return options.name or (PurePath(name).name if PurePath(name).is_absolute() else name)


def _refuse_unservable(plan: Plan, options: VllmOptions) -> None:
    """Refuse plans with an exported command, but which vLLM can't run as planned."""
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
