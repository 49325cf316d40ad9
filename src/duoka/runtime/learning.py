"""Learning: steps of training as people run them, for tracing, proving and measuring.

A micro-batch is one forward call with labels, in which the model's own code computes the loss, and
one backward from it. A step is some micro-batches, the optimizer, and gradients set to None, as
`zero_grad` does.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from duoka.errors import ModelError
from duoka.forecast.workload import Training, Workload

_STEPS = 2
"""Optimizer's states are made in the first step, and are there from the second one on."""


class Learner:
    """Training steps on a model that `models.make_trainable` has made ready.

    Parameters
    ----------
    model : torch.nn.Module
        On whatever devices it lies.
    workload : Workload
        With training, and its dtype resolved. More than one sequence come with padding.
    device : torch.device
        Where inputs are made: the device of the first module.
    """

    def __init__(self, model: nn.Module, workload: Workload, device: torch.device) -> None:
        assert workload.training is not None, "the workload is to train"
        self.model: Any = model
        self.workload = workload
        self.training: Training = workload.training
        self.device = device
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        self._optimizer: torch.optim.Optimizer | None = None

    def look(self) -> None:
        """Run the model without labels: they go where its own code brings them."""
        inputs = self._inputs()
        del inputs["labels"]
        with torch.no_grad(), self._autocast():
            self.model(**inputs)

    def forward(self) -> torch.Tensor:
        """Run the model over one micro-batch; its loss."""
        with torch.enable_grad(), self._autocast():
            loss: torch.Tensor | None = self.model(**self._inputs()).loss
        if loss is None:
            raise ModelError(
                f"{type(self.model).__name__} computes no loss from labels",
                hint="duoka forecasts the training of models that do",
            )
        return loss

    def update(self) -> None:
        """Let the optimizer make its step, and drop the gradients."""
        if self._optimizer is None:
            learning = [p for p in self.model.parameters() if p.requires_grad]
            kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
            self._optimizer = kinds[self.training.optimizer](learning)
        self._optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Set gradients to None."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def run(self, *, in_flight: int = 1, steps: int = _STEPS) -> None:
        """Run whole steps."""
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
        if not self.training.master_weights:
            return nullcontext()
        dtype = getattr(torch, self.workload.dtype)
        if dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def _inputs(self) -> dict[str, Any]:
        shape = (self.workload.batch, self.workload.prompt_tokens)
        ids = torch.ones(shape, dtype=torch.long, device=self.device)
        mask = torch.ones_like(ids)
        if self.workload.batch > 1:
            mask[:-1, :1] = 0
        inputs: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
        config = getattr(self.model, "config", None)
        if "attention_mask" in self._accepted and not getattr(config, "is_encoder_decoder", False):
            inputs["attention_mask"] = mask
        if "use_cache" in self._accepted:
            inputs["use_cache"] = False
        return inputs
