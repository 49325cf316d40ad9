"""The part of a model in a process: its own weights, and all others on the meta device."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from duoka.base.text import longest_prefix
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.forecast.workload import Training
from duoka.hardware.fleet import Fleet
from duoka.models import initialize_adapters
from duoka.models.from_checkpoint import build_model, chat_format_of, tokenizer_of
from duoka.models.lora import LoraAdapter, fill_adapter
from duoka.models.text.chatglm_tokenizer import ChatGLMTokenizer
from duoka.models.text.image_prompts import TOKEN_TYPES, ImageFormat
from duoka.models.text.prompts import ChatFormat
from duoka.planner.plan import Plan
from duoka.runtime import devices
from duoka.runtime import load as loader
from duoka.runtime.call.learner import autocast_for
from duoka.runtime.dispatch.arguments import to_device
from duoka.runtime.dispatch.dispatch import without_data
from duoka.runtime.image_inputs import image_token_id
from duoka.runtime.prepare_training import find_unreached, prepare_for_training
from duoka.stages.interceptor import BlockInterceptor
from duoka.stages.placeholder import Placeholder
from duoka.stages.route import Route, find_route

from .data import IGNORED, TrainingMicroBatch, open_image
from .dropout import seed_by_module

Batch = Mapping[str, Tensor]
_NO_TOKEN = -1


class ModelPart:
    """The part of a model that a plan places on one device, in this process.

    Parameters
    ----------
    checkpoint : Checkpoint
        Its weight files must be on this machine.
    plan : Plan
        A plan for training.
    device : str
        The device of this process, one of the plan's.
    seed : int
        Seed for the initial values of new adapters.
    adapter : LoraAdapter, optional
        Initial values of the adapters, in native form.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        device: str,
        seed: int,
        adapter: LoraAdapter | None = None,
    ) -> None:
        assert plan.workload.training is not None, "the plan is for training"
        self.plan = plan
        self.training: Training = plan.workload.training
        devices.materialise(Fleet(devices=(plan.fleet.device(device),)))
        self.device = torch.device(device)
        devices.make_current(device)
        self.model: Any = self._load(checkpoint, seed, adapter)
        self._accepted = frozenset(inspect.signature(self.model.forward).parameters)
        self._images = _image_format(checkpoint) if plan.workload.images else None
        # `route` runs this copy without data.
        self._blueprint = without_data(self.model)
        self._pixel_device = self._find_pixel_device()
        seed_by_module(self.model)
        self.interceptor = BlockInterceptor(self.model, plan.placement)
        self._routes: dict[Any, Route] = {}
        self.trained = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and not parameter.is_meta
        }

    def _load(self, checkpoint: Checkpoint, seed: int, adapter: LoraAdapter | None) -> nn.Module:
        """Build the model, prepare training, and load the weights of this process's device."""
        model = build_model(checkpoint, self.plan.workload)
        # Full training changes dtypes, so it is prepared before loading. Adapters aren't in the
        # checkpoint, so they are added after loading.
        if self.training.method == "full":
            prepare_for_training(model, self.plan.workload)
        loader.load_weights(model, checkpoint, self.plan.placement, only=self.device)
        if self.training.method == "lora":
            prepare_for_training(model, self.plan.workload)
            initialize_adapters(model, seed)
            if adapter is not None:
                fill_adapter(model, adapter)
        model.train()
        return model

    @property
    def all_trained(self) -> list[str]:
        """Names of the trained parameters of all processes, in model order."""
        return [name for name, p in self.model.named_parameters() if p.requires_grad]

    def inputs(self, micro_batch: TrainingMicroBatch) -> Batch:
        """Return the arguments of `forward` for a micro-batch, with its images, on the CPU."""
        inputs = micro_batch.tensors()
        if self._images is None:
            return inputs
        is_image = inputs["input_ids"].eq(image_token_id(self.model.config) or _NO_TOKEN).long()
        more = dict.fromkeys(TOKEN_TYPES, is_image)
        if references := micro_batch.images:
            pictures = self._images.pictures([open_image(it) for it in references])
            dtype = getattr(torch, self.plan.workload.dtype)
            more |= {n: v.to(dtype) if v.is_floating_point() else v for n, v in pictures.items()}
        return inputs | {name: value for name, value in more.items() if name in self._accepted}

    def _find_pixel_device(self) -> str:
        """Return the device of the first module that text doesn't reach, which reads the pixels."""
        tower = [] if self._images is None else find_unreached(self._blueprint)
        entries = self.plan.placement.entries
        return next((device for name, device in entries if longest_prefix(name, tower)), "")

    def send(self, batch: Batch, device: torch.device) -> Batch:
        """Copy a batch to this process's device; pixels only if the vision tower begins there."""
        is_needed = self._pixel_device == str(device)
        return {
            name: devices.send(value, device)
            if is_needed or not value.is_floating_point()
            else Placeholder.of(value.to("meta"), device)
            for name, value in batch.items()
        }

    def loss(self, batch: Batch, device: torch.device) -> Tensor:
        """Call the model on a batch and return its loss; only this process's stages compute."""
        loss: Tensor = self._call(self.model, batch, device).loss
        return loss

    def log_probs(self, batch: Batch, device: torch.device) -> Tensor:
        """Call the model on a batch; return the log probability of each row's trained tokens."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = self._call(self.model, inputs, device).logits.float()
        # The logits of each token predict the next one; those of the last token predict none.
        labels = pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
        logits = logits.reshape(-1, logits.shape[-1])
        losses = cross_entropy(logits, labels.flatten(), reduction="none")
        return -losses.view(labels.shape).sum(dim=1)

    def next_token(self, batch: Batch, device: torch.device) -> Tensor:
        """Call the model on a row; return the most probable token in place of the first label."""
        at = int(batch["labels"].ge(0).int().argmax())
        logits: Tensor = self._call(self.model, batch, device).logits[:, at - 1 : at].clone()
        image = image_token_id(self.model.config)
        if image is not None:
            logits[..., image] = -torch.inf  # there are no features for another image token
        return logits.argmax()

    def route(self, batch: Batch) -> Route:
        """Return the route of batches of this form: the tensors sent between stages; cached."""
        form = tuple((name, tuple(value.shape)) for name, value in sorted(batch.items()))
        if form not in self._routes:
            # Without labels, because only the last stage computes the loss; but some models that
            # take images pass labels on to the decoder.
            omitted = "labels" if self._images is None else ""
            inputs = {name: value for name, value in batch.items() if name != omitted}
            # With gradients even in an evaluation: the route is cached for training, too.
            with torch.enable_grad():
                self._routes[form] = find_route(
                    self._blueprint,
                    self.plan.placement,
                    lambda model, device: self._call(model, inputs, device),
                )
        return self._routes[form]

    def _call(self, model: Any, batch: Batch, device: torch.device) -> Any:
        """Call a model on a batch, moved to a device, under the workload's autocast."""
        with autocast_for(self.plan.workload, device):
            return model(**to_device(dict(batch), device), use_cache=False)


def chat_of(checkpoint: Checkpoint) -> ChatFormat:
    """Return the chat format of a checkpoint's model."""
    return chat_format_of(checkpoint, tokenizer_of(checkpoint, ChatGLMTokenizer))


def _image_format(checkpoint: Checkpoint) -> ImageFormat | None:
    """Return the image format of a checkpoint's model."""
    return chat_of(checkpoint).images
