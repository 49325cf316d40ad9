"""Load a plan, dispatch a model, load a tokenizer."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from duoka.base.progress import say
from duoka.base.text import choose
from duoka.checker.prove import prove
from duoka.checkpoint.adapters import chatglm_targets
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import CheckpointError, ModelError, UsageError
from duoka.forecast.workload import Workload
from duoka.hardware.host import refuse_more
from duoka.models.chatglm import ChatGLMPreTrainedModel
from duoka.models.chunked_loss import chunk_loss
from duoka.models.from_checkpoint import tokenizer_of
from duoka.models.lora import LoraAdapter
from duoka.models.text.chatglm_tokenizer import ChatGLMTokenizer
from duoka.models.trainable import known_targets
from duoka.planner.placement import Placement
from duoka.planner.plan import Plan
from duoka.runtime import devices
from duoka.runtime import load as loader
from duoka.runtime.dispatch.copies import try_copies
from duoka.runtime.dispatch.dispatch import dispatch as spread
from duoka.runtime.load.adapter import apply_adapters, build_to_serve, read_adapter
from duoka.runtime.prepare_training import prepare_for_training
from duoka.runtime.prompt_reader import PromptReader

Model = TypeVar("Model", bound=nn.Module)
Progress = Callable[[int, int], None]
Outputs = Literal["return", "stay"]
_OUTPUTS = ("return", "stay")


def load(
    plan: Plan,
    *,
    progress: Progress | None = None,
    download_progress: Progress | None = None,
    trust_remote_code: bool = False,
    outputs: Outputs = "return",
    adapter: str | os.PathLike[str] | None = None,
) -> PreTrainedModel:
    """Prove a plan, then load the model onto its devices.

    Missing files of a model from the Hub are downloaded in between.

    Parameters
    ----------
    plan : Plan
        A plan of a checkpoint, for generation or training.
    progress : callable, optional
        Called with (bytes done, total bytes) while the weights are read.
    download_progress : callable, optional
        The same, while files are downloaded.
    trust_remote_code : bool
        Run the checkpoint's own model code.
    outputs : {"return", "stay"}
        As in `dispatch`.
    adapter : path, optional
        Directory of a LoRA adapter in peft's format, for modules named as in transformers' class
        or in the published code. The adapter is merged into the weights, without extra memory.

    Returns
    -------
    transformers.PreTrainedModel
        The model on its planned devices, in evaluation mode; `generate` works as usual. For a
        training plan the model is in training mode, ready for transformers' `Trainer` or your own
        loop: with `method="full"` all parameters are trainable, with `method="lora"` none are until
        peft has added adapters (see `lora_targets`).

    Raises
    ------
    ProofError
        If the plan fails on virtual GPUs; nothing has been read then.
    FormatError
        If the plan was made for another checkpoint.
    FleetError
        If a GPU of the plan is missing, or has less free memory now than the plan needs.
    CheckpointError
        If a file can't be downloaded, or its content is wrong.
    LoadError
        If the tensors in the files don't match the model; nothing stays loaded then.
    """
    outputs_stay = choose("outputs", outputs, _OUTPUTS) == "stay"
    if plan.workload.adapters:
        raise UsageError(
            "the plan has adapters that requests choose, which only an engine can do",
            hint="use duoka.Engine(plan), or plan without adapters",
        )
    lora = None if adapter is None else read_adapter_for(plan, adapter)
    opened = OpenedModel.open(plan, trust_remote_code=trust_remote_code)
    plan = prove_here(plan, opened, download_progress)
    return load_proved(plan, opened, progress=progress, lora=lora, outputs_stay=outputs_stay)


class OpenedModel:
    """A checkpoint with its model and tokenizer, each built once for all steps of a command.

    Parameters
    ----------
    checkpoint : Checkpoint
    workload : Workload
        Workload of the plan that the model is opened for.
    """

    def __init__(self, checkpoint: Checkpoint, workload: Workload) -> None:
        self.checkpoint = checkpoint
        self._workload = workload

    @classmethod
    def open(cls, plan: Plan, *, trust_remote_code: bool = False) -> OpenedModel:
        """Open the model of a plan; refuse a plan of a model given as an object."""
        if not plan.source:
            raise CheckpointError(
                "the plan was made for a model given as an object; there is no checkpoint to load",
                hint="dispatch that model: duoka.dispatch(model, plan)",
            )
        checkpoint = Checkpoint.open(plan.source, trust_remote_code=trust_remote_code)
        return cls(checkpoint, plan.workload)

    @cached_property
    def model(self) -> PreTrainedModel:
        """Model on the meta device; `load_proved` takes it and loads its weights."""
        return build_to_serve(self.checkpoint, self._workload)

    @cached_property
    def reader(self) -> PromptReader:
        """The tokenizer and prompt format."""
        return PromptReader.open(self.checkpoint, self._workload)


def load_proved(
    plan: Plan,
    opened: OpenedModel,
    *,
    progress: Progress | None = None,
    lora: LoraAdapter | None = None,
    outputs_stay: bool = False,
) -> PreTrainedModel:
    """Load a plan that `prove_here` has proved; see `load`."""
    devices.materialise(plan.fleet)
    try_copies(map(torch.device, plan.devices))  # before memory is allocated there
    say("reading the weights")
    model = _load_weights(plan, opened, progress)
    apply_adapters(model, opened.checkpoint, plan.workload, lora)
    model.train(plan.workload.training is not None)
    return _spread(model, plan, outputs_stay)


def prove_here(plan: Plan, opened: OpenedModel, download_progress: Progress | None = None) -> Plan:
    """Prove a plan on the current GPUs, then download its missing files; return the plan.

    Raises
    ------
    DuokaError
        As for `load`; no weight has been read then.
    """
    checkpoint = opened.checkpoint
    if not checkpoint.has_weights:
        hint = "plan for a directory with the weight files"
        raise CheckpointError(f"{plan.source} has no weight files", hint=hint)
    _require_private_directory(plan, checkpoint)
    plan.refuse_other(checkpoint.fingerprint, plan.source)
    gc.collect()  # reference cycles keep the memory of a closed engine
    devices.give_back()
    plan = plan.on_this_machine()
    refuse_more(plan.forecast.host_bytes + plan.forecast.expert_bytes)
    say("proving the plan on virtual GPUs")
    prove(plan, opened.model)
    opened.checkpoint = checkpoint.fetch(download_progress)
    plan.refuse_other(opened.checkpoint.fingerprint, plan.source)
    return plan


def _load_weights(plan: Plan, opened: OpenedModel, progress: Progress | None) -> PreTrainedModel:
    """Return the model with its weights on the planned devices."""
    model, checkpoint = opened.model, opened.checkpoint
    del opened.model  # so that only the caller keeps the model alive
    if plan.workload.training is not None:  # trained parameters are loaded in 32 bit
        prepare_for_training(model, plan.workload, has_adapters=False)
    offloaded = plan.offloaded
    loader.load_weights(model, checkpoint, plan.placement, progress=progress, offloaded=offloaded)
    return model


def read_adapter_for(plan: Plan, adapter: str | os.PathLike[str]) -> LoraAdapter:
    """Read a LoRA adapter; refuse plans with quantized or offloaded weights."""
    if plan.workload.quantize != "none" or plan.offloaded:
        raise UsageError(
            "an adapter can't be merged into quantized or offloaded weights, and the plan has "
            "such weights",
            hint="plan the checkpoint that `duoka merge MODEL ADAPTER --out DIR` writes",
        )
    return read_adapter(Path(adapter))


def _require_private_directory(plan: Plan, checkpoint: Checkpoint) -> None:
    """Refuse a plan made with the checkpoint's own code, if the code may not run now."""
    is_other = plan.fingerprint != checkpoint.fingerprint
    if is_other and plan.request.trust_remote_code and not checkpoint.trust_remote_code:
        raise ModelError(
            f"the plan was made with the model code of {plan.source}, and that code isn't allowed "
            "to run",
            hint="allow it with --trust-remote-code (trust_remote_code=True)",
        )


def tokenizer(
    source: str | os.PathLike[str] | Checkpoint | Plan, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint without downloading weights.

    Parameters
    ----------
    source : path, Checkpoint or Plan
        A directory, a model on the Hub, or a plan, for its checkpoint.
    trust_remote_code : bool
        Run the tokenizer's own code, if it has some; ignored for a Checkpoint.

    Returns
    -------
    transformers.PreTrainedTokenizerBase
        A tokenizer that pads on the left. For ChatGLM2, ChatGLM3 and GLM-4 it is duoka's own class,
        which reads the published file; `apply_chat_template` uses the models' training format.

    Raises
    ------
    CheckpointError
        If there is no tokenizer, or it is damaged.
    """
    if isinstance(source, Plan):
        source = source.source
    if not isinstance(source, Checkpoint):
        source = Checkpoint.open(source, trust_remote_code=trust_remote_code)
    source.fetch_tokenizer()
    return tokenizer_of(source, ChatGLMTokenizer)


def dispatch(
    model: Model, placement: Placement | Plan | Mapping[str, str], *, outputs: Outputs = "return"
) -> Model:
    """Move the modules of a model to devices, and return the same object.

    Parameters
    ----------
    model : torch.nn.Module
        The model to distribute; its modules are moved in place.
    placement : Placement, Plan or mapping
        A mapping has torch's device names by module names.
    outputs : {"return", "stay"}
        "return" moves outputs to the device of the inputs, as accelerate's dispatch does; "stay"
        leaves them on the device that computed them. Caches stay in any case.

    Raises
    ------
    PlacementError
        If a parameter or buffer has no device, or a name is unknown. Nothing has been moved then.
    """
    outputs_stay = choose("outputs", outputs, _OUTPUTS) == "stay"
    if isinstance(placement, Plan):
        if placement.workload.training is not None:
            chunk_loss(model)
        devices.materialise(placement.fleet)
        refuse_more(placement.forecast.host_bytes)
        return _spread(model, placement, outputs_stay)
    if isinstance(placement, Mapping):
        placement = Placement(entries=tuple(placement.items()))
    return spread(model, placement, outputs_stay=outputs_stay)


def lora_targets(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Translate the names of modules with adapters, for peft's `target_modules`.

    Parameters
    ----------
    model : torch.nn.Module
        A model returned by `load`, or any other one.
    names : sequence of str
        Suffixes of module names, in the model's published code or its class: "query_key_value" of
        a ChatGLM is "q_proj", "k_proj" and "v_proj" in the class that `load` returns.

    Returns
    -------
    list of str
        The suffixes in the model's class.

    Raises
    ------
    UsageError
        If no module with such a name can have an adapter.
    """
    if isinstance(model, ChatGLMPreTrainedModel):
        has_tower = bool(getattr(model.config, "vision_config", None))
        names = chatglm_targets(names, has_tower=has_tower)
    return known_targets(model, names)


def _spread(model: Model, plan: Plan, outputs_stay: bool) -> Model:
    """Move a model to the devices of a plan, with its offloaded modules and movers."""
    return spread(
        model,
        plan.placement,
        offloaded=plan.offloaded,
        has_movers=plan.needs_movers,
        outputs_stay=outputs_stay,
    )
