"""Direct preference optimization (DPO): the loss of pairs of answers, and its reference model.

With y⁺ the chosen and y⁻ the rejected answer to a prompt x, π the model and π₀ the reference model,
which is the model without adapters::

    reward(y) = β (log π(y | x) − log π₀(y | x))
    loss      = −log σ(reward(y⁺) − reward(y⁻))

Source: Rafailov et al., "Direct Preference Optimization", 2023; the sigmoid loss of TRL. This
module knows nothing of stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from duoka.models.trainable import adapted_layers

# The means of rewards that a step reports, as TRL calls them.
REWARDS = ("chosen", "rejected", "accuracies", "margins")


def preference_loss(log_probs: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the mean DPO loss of pairs, and the means of `REWARDS`.

    Parameters
    ----------
    log_probs, reference : Tensor
        Log probabilities of the answers under the model and the reference model: [2 · pairs], each
        chosen answer before the rejected one.
    beta : float
        Scale of the rewards.
    """
    chosen, rejected = (beta * (log_probs - reference)).view(-1, 2).unbind(dim=1)
    margins = chosen - rejected
    rewards = torch.stack([chosen, rejected, (margins > 0).float(), margins])
    return -logsigmoid(margins).mean(), rewards.mean(dim=1).detach()


@contextmanager
def as_reference(model: nn.Module) -> Iterator[None]:
    """Run a model without its adapters, dropout and gradients within the scope."""
    layers = [layer for _, layer in adapted_layers(model)]
    is_training = model.training
    model.eval()
    for layer in layers:
        layer.enable_adapters(enabled=False)
    try:
        with torch.no_grad():
            yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)
        model.train(is_training)
