"""A model whose layers keep keys and values in pages, called with the packed tokens of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from duoka.errors import ModelError
from duoka.forecast.serving import Capacity, StepSize, WarmUp
from duoka.planner.placement import Placement
from duoka.runtime.lost_gpu import find_lost_gpu
from duoka.runtime.paged_steps import PagedStep, PagedStepper
from duoka.stages.route import Routes, find_route

from .request import SamplingParams
from .sampler import SamplingRow
from .step import Chunk

_GREEDY_ROW = SamplingRow(params=SamplingParams(), seed=0, place=0)
# The steps of which routes are found: tokens, and rows of logits. Each of the two is larger once,
# and none of them is padded.
_SIZES = (10, 2), (14, 2), (10, 4)
_CAPACITY = Capacity(sequences=4, context_tokens=16, pages=4, page_tokens=16, step_tokens=16)


class PagedModel:
    """Computes the logits of steps; a step can be computed again.

    Parameters
    ----------
    model : PreTrainedModel
        One that `reads_pages`, on one device, dispatched over several, or a part of one.
    capacity : Capacity
    """

    def __init__(self, model: PreTrainedModel, capacity: Capacity) -> None:
        self._model = model
        self._before = model.config._attn_implementation
        self._stepper = PagedStepper(model, capacity, model.device)

    def step(self, chunks: Sequence[Chunk], size: StepSize | None = None) -> PagedStep:
        """Chunks as `call` takes them; with a size nobody's tokens."""
        if size is not None:
            return PagedStep.of_size(size, self._stepper.cache)
        return PagedStep(chunks, self._stepper.cache)

    def call(self, step: PagedStep, device: torch.device) -> Callable[[], Tensor]:
        """What calls the model with inputs on a device.

        It returns the logits of `step.last_rows`, [rows, vocabulary]: of the chunks that have a
        row, in their order, and of what pads them.
        """
        return self._stepper.call(step, device)

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute a step where all of the model is in this process."""
        return self._stepper.run(self.step(chunks))

    def try_out(self, warm_up: WarmUp = "first") -> None:
        """Compute a token, for which all pages are made; and steps of other sizes where asked to.

        Raises
        ------
        ModelError
            If the model's code does more than causal attention, once in each layer.
        """
        try:
            self._stepper.warm_up(warm_up)
        except Exception as error:  # whatever code raises that reads the mask, which is none
            self.close()
            if isinstance(error, (ModelError, torch.OutOfMemoryError)) or find_lost_gpu(error):
                raise
            raise ModelError(f"{type(self._model).__name__} can't read from pages") from error

    def close(self) -> None:
        """Give the model back as it was; the cache is gone."""
        self._model.set_attn_implementation(self._before)
        del self._stepper


def find_routes(model: PreTrainedModel, placement: Placement) -> Routes:
    """What crosses between the stages of a placement in steps of (tokens, rows), as padded.

    Nothing is computed, and the model needs no data.

    Raises
    ------
    ModelError
        If the model can't read from pages, or can't run in stages.
    """

    def run(tokens: int, rows: int, copied: Any, device: torch.device) -> None:
        sizes = [tokens - rows + 1, *[1] * (rows - 1)]
        chunks = [Chunk(i, [0] * size, 0, [i], _GREEDY_ROW) for i, size in enumerate(sizes)]
        stepper = PagedStepper(copied, _CAPACITY, device)
        step = PagedStep(chunks, stepper.cache)
        stepper.run(step)
        stepper.refuse_other_windows(step)

    try:
        return Routes(
            {sizes: find_route(model, placement, partial(run, *sizes)) for sizes in _SIZES}
        )
    except ModelError:
        raise
    except Exception as error:  # as above
        raise ModelError(f"{type(model).__name__} can't read from pages") from error
