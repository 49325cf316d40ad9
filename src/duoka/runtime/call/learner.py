"""Training steps as in an ordinary PyTorch training loop, for tracing and checking.

A micro-batch is one forward call with labels, in which the model's own code computes the loss, and
one backward pass. A step is some micro-batches, the optimizer's step, and gradients set to None, as
by `zero_grad`.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from duoka.errors import ModelError
from duoka.forecast.alloc_events import refuse_short
from duoka.forecast.workload import Training, Workload

from ..image_inputs import ImagePrompts
from ..optimizers import make_optimizer, update

# The optimizer makes its states in the first step; only later steps begin with them.
_STEPS = 2


def autocast_for(workload: Workload, device: torch.device) -> AbstractContextManager[Any]:
    """Return the autocast scope for forward passes with float32 master weights, else no scope.

    Casts aren't cached: with the cache CUDA would keep a copy of all trained parameters.
    """
    dtype = getattr(torch, workload.dtype)
    if workload.training is None or not workload.training.master_weights or dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


class Learner:
    """Runs training steps on a model prepared by `models.make_trainable`.

    Parameters
    ----------
    model : nn.Module
    workload : Workload
        With training, and with its dtype resolved.
    device : torch.device
        The device on which inputs are made: that of the first module.
    prompts : ImagePrompts, optional
        The images of the sequences, made before the model was placed on devices.
    """

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        device: torch.device,
        prompts: ImagePrompts | None = None,
    ) -> None:
        assert workload.training is not None, "the workload is to train"
        if prompts is not None:
            refuse_short(workload, prompts.least_tokens)
        self.prompts = prompts
        self.model: Any = model
        self.workload = workload
        self.training: Training = workload.training
        self.device = device
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        config = getattr(model, "config", None)
        self._is_pair = bool(getattr(config, "is_encoder_decoder", False))
        self._optimizer: torch.optim.Optimizer | None = None

    def look(self) -> None:
        """Run the model without labels, which its own code moves to the device of the logits."""
        inputs = self._inputs()
        labels = inputs.pop("labels")
        if self._is_pair:
            inputs["decoder_input_ids"] = labels
        with torch.no_grad(), self._autocast():
            self.model(**inputs)

    def forward(self) -> torch.Tensor:
        """Run the model over a micro-batch, and return the loss."""
        with torch.enable_grad(), self._autocast():
            loss: torch.Tensor | None = self.model(**self._inputs()).loss
        if loss is None:
            raise ModelError(
                f"{type(self.model).__name__} computes no loss from labels",
                hint="use a model whose forward accepts labels and returns a loss",
            )
        return loss

    def update(self) -> None:
        """Take a step of the optimizer, made at the first step, and set gradients to None."""
        if self._optimizer is None:
            self._optimizer = make_optimizer(self.model, self.training.optimizer)
        update(self._optimizer)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Set all gradients to None."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def run(self, *, in_flight: int = 1, steps: int = _STEPS) -> None:
        """Run steps, with at most `in_flight` micro-batches between forward and backward."""
        # At most 2 in flight, 4 micro-batches (F forward, B backward, U optimizer):
        #     F0 F1 B0 F2 B1 F3 B2 B3 U
        for _ in range(steps):
            losses: list[torch.Tensor] = []
            for _ in range(self.training.micro_batches):
                if len(losses) == in_flight:
                    losses.pop(0).backward()
                losses.append(self.forward())
            while losses:
                losses.pop(0).backward()
            self.update()

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast_for(self.workload, self.device)

    def _inputs(self) -> dict[str, Any]:
        """Make the inputs and labels of a micro-batch, with a mask or positions as planned."""
        shape = (self.workload.batch, self.workload.prompt_tokens)
        if self.prompts is None:
            ids = torch.ones(shape, dtype=torch.long, device=self.device)
            inputs: dict[str, Any] = {"input_ids": ids}
        else:
            inputs = dict(self.prompts.inputs(*shape, self.device))
            inputs.pop("attention_mask", None)
        ids = inputs["input_ids"]
        inputs["labels"] = ids.clone()
        takes_mask = "attention_mask" in self._accepted and not self._is_pair
        if self.training.rows == "packed":
            positions = torch.arange(shape[1], device=self.device)
            # Each row has two samples: positions begin again at its middle.
            inputs["position_ids"] = (positions % -(-shape[1] // 2)).expand(shape).contiguous()
        elif self.training.rows == "padded" and takes_mask:
            mask = torch.ones_like(ids)
            if self.workload.batch > 1:
                mask[:-1, :1] = 0
            inputs["attention_mask"] = mask
        if "use_cache" in self._accepted:
            inputs["use_cache"] = False
        return inputs
