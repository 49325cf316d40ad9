"""Samples → optimizer steps and micro-batches, independent of the number of GPUs."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .dataset import Dataset
from .packing import pack

IGNORED = -100
"""The label of a token that isn't trained, as transformers' losses have it."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingMicroBatch:
    """Rows that run at a time: one sample each, or several packed ones."""

    dataset: Dataset
    rows: tuple[tuple[int, ...], ...]
    packing: bool

    @property
    def trained_tokens(self) -> int:
        """Weight of the micro-batch's mean loss."""
        return sum(int(self.dataset.trained_tokens[list(row)].sum()) for row in self.rows)

    @property
    def tokens(self) -> int:
        """Number of tokens of its samples."""
        return sum(int(self.dataset.lengths[list(row)].sum()) for row in self.rows)

    @property
    def places(self) -> list[str]:
        """File and line of each sample."""
        return [self.dataset.place(sample) for row in self.rows for sample in row]

    @property
    def length(self) -> int:
        """Padded length of its rows.

        The smallest of the dataset's `row_lengths` that holds the longest row; with packing always
        the dataset's ``seq_length`` plus one.
        """
        if self.packing:
            # One more, which is padding: where positions begin again in every row, models always
            # take the same way, through a mask.
            return self.dataset.seq_length + 1
        longest = max(self.dataset.lengths[row[0]] for row in self.rows)
        lengths = self.dataset.row_lengths
        return lengths[bisect_left(lengths, longest)]

    def tensors(self) -> dict[str, Tensor]:
        """Arguments of a model's ``forward``, on the CPU.

        ``input_ids`` and ``labels`` are [rows, tokens], int64: labels are the ids where they are
        trained and -100 elsewhere, not shifted. Rows are padded on the right to the same `length`.
        There is no ``attention_mask``: a causal model sees no padding from what is before it. With
        packing there are ``position_ids``, which begin again with each sample, and with the
        padding; the model must then run with ``use_cache=False``.
        """
        dataset = self.dataset
        shape = (len(self.rows), self.length)
        ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        labels = np.full(shape, IGNORED)
        for number, row in enumerate(self.rows):
            start = 0
            for sample in row:
                tokens, is_trained = dataset.tokens(sample)
                span = slice(start, start := start + len(tokens))
                ids[number, span] = tokens
                labels[number, span] = np.where(is_trained, tokens, IGNORED)
                positions[number, span] = np.arange(len(tokens))
            positions[number, start:] = np.arange(self.length - start)
        arrays = {"input_ids": ids, "labels": labels}
        if self.packing:
            arrays["position_ids"] = positions
        return {name: torch.from_numpy(values) for name, values in arrays.items()}


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerStep:
    """Micro-batches of one optimizer step."""

    epoch: int
    micro_batches: tuple[TrainingMicroBatch, ...]

    @property
    def trained_tokens(self) -> int:
        """Divisor of the sum of weighted gradients over all micro-batches."""
        return sum(micro_batch.trained_tokens for micro_batch in self.micro_batches)

    def of_replica(self, replica: int, replicas: int) -> tuple[TrainingMicroBatch, ...]:
        """Return the micro-batches of a replica; in the last step of an epoch there may be none."""
        return self.micro_batches[replica::replicas]


# A step is a function of its number alone, which is why a run can be resumed at any step. Of 5
# samples with batches of 2 an epoch has 3 steps; step 4 is the second of epoch 1, and takes the
# third and the fourth sample of that epoch's permutation, which is drawn from the seed and the
# epoch:
#
#   step   0      1      2    │ 3      4      5
#   epoch 0: 3 1 │ 0 4 │ 2    │ epoch 1: 2 0 │ 1 3 │ 4
class Batches:
    """The steps of one epoch after another, without end; each can be had by its number.

    Order and packs follow from the dataset and the seed alone. A step has `batch` rows (samples, or
    with packing rows of up to ``dataset.seq_length`` tokens, see `refuse_packing`), the last one of
    an epoch what is left; `micro_batch` of them run at once. How many replicas share a step changes
    nothing of it. Without `shuffle` samples come in the order of the files. Rows of a step are
    sorted by length where several run at once, so that less of a micro-batch is padding.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch: int,
        micro_batch: int = 1,
        packing: bool = False,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.dataset = dataset
        self.batch = batch
        self.micro_batch = micro_batch
        self.packing = packing
        self._seed = seed if shuffle else None
        self._packs: list[list[int]] | None = None
        if packing:
            order = self._order(len(dataset), -1).tolist()
            self._packs = pack(dataset.lengths, order, dataset.seq_length)
        self._cached = -1, self._order(0, -1)

    @property
    def num_rows(self) -> int:
        """Number of samples, or of packed rows."""
        return len(self.dataset) if self._packs is None else len(self._packs)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps per epoch."""
        return math.ceil(self.num_rows / self.batch)

    def __getitem__(self, number: int) -> OptimizerStep:
        """Return a step by number, from 0."""
        epoch, place = divmod(number, self.steps_per_epoch)
        if self._cached[0] != epoch:
            self._cached = epoch, self._order(self.num_rows, epoch)
        numbers = self._cached[1][place * self.batch : (place + 1) * self.batch].tolist()
        packs = self._packs
        if self.micro_batch > 1 and packs is None:
            numbers.sort(key=lambda sample: self.dataset.lengths[sample])
        rows = [(at,) if packs is None else tuple(packs[at]) for at in numbers]
        groups = (rows[at : at + self.micro_batch] for at in range(0, len(rows), self.micro_batch))
        micro_batches = (TrainingMicroBatch(self.dataset, tuple(g), self.packing) for g in groups)
        return OptimizerStep(epoch=epoch, micro_batches=tuple(micro_batches))

    def _order(self, number: int, epoch: int) -> npt.NDArray[np.int64]:
        """Return a permutation for an epoch."""
        if self._seed is None:
            return np.arange(number)
        # The seed is a sequence of two numbers: with their sum, epoch 1 of seed 0 would have the
        # order of epoch 0 of seed 1. Epoch -1 is the order from which packs are made.
        return np.random.default_rng([self._seed, epoch + 1]).permutation(number)
