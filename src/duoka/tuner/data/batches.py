"""Divide samples into optimizer steps and micro-batches, independent of the number of GPUs."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .dataset import Dataset
from .images import Reference
from .packing import pack

IGNORED = -100
"""The label of a token that isn't trained: the `ignore_index` of transformers' losses."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingMicroBatch:
    """Rows of one forward pass; each row has one sample or, with packing, several."""

    dataset: Dataset
    rows: tuple[tuple[int, ...], ...]
    packing: bool

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens."""
        return sum(int(self.dataset.trained_tokens[list(row)].sum()) for row in self.rows)

    @property
    def num_losses(self) -> int:
        """Number of trained tokens, or of pairs, whose mean loss is that of the micro-batch."""
        size = self.dataset.group_size
        return self.trained_tokens if size == 1 else len(self.rows) // size

    @property
    def tokens(self) -> int:
        """Number of tokens of the samples, without padding."""
        return sum(int(self.dataset.lengths[list(row)].sum()) for row in self.rows)

    @property
    def places(self) -> list[str]:
        """File and line of each sample."""
        return [self.dataset.place(sample) for row in self.rows for sample in row]

    @property
    def length(self) -> int:
        """Padded length of the rows.

        The smallest of the dataset's `row_lengths` that holds the longest row; with packing always
        the dataset's ``seq_length`` plus one.
        """
        if self.packing:
            # At least one token of padding, whose position is 0 again. So every row looks packed,
            # also a row with one sample, and models always build a mask.
            return self.dataset.seq_length + 1
        longest = max(self.dataset.lengths[row[0]] for row in self.rows)
        lengths = self.dataset.row_lengths
        return lengths[bisect_left(lengths, longest)]

    @property
    def images(self) -> list[Reference]:
        """References of the images of all rows, in order."""
        of_samples = self.dataset.images
        return [
            it for row in self.rows for sample in row if of_samples for it in of_samples[sample]
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Return the arguments of a model's ``forward``, on the CPU.

        ``input_ids`` and ``labels`` are [rows, tokens], int64: labels are the ids of trained tokens
        and -100 elsewhere, not shifted. Rows are padded on the right to `length`. There is no
        ``attention_mask``: in a causal model no token attends to padding after it. With packing
        there are ``position_ids``, which restart at 0 with each sample and with the padding; the
        model must then run with ``use_cache=False``. The tensors of `images` aren't included.
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
        """Number of trained tokens of all micro-batches."""
        return sum(micro_batch.trained_tokens for micro_batch in self.micro_batches)

    def of_replica(self, replica: int, replicas: int) -> tuple[TrainingMicroBatch, ...]:
        """Return the micro-batches of a replica: every `replicas`-th, from `replica` on.

        In the last step of an epoch a replica may have none.
        """
        return self.micro_batches[replica::replicas]


# A step depends on its number only, so a run can be resumed at any step. With 5 samples and batches
# of 2 an epoch has 3 steps. Step 4 is the second step of epoch 1: it takes the third and fourth
# sample of that epoch's permutation, which is drawn from the seed and the epoch:
#
#   step   0      1      2    │ 3      4      5
#   epoch 0: 3 1 │ 0 4 │ 2    │ epoch 1: 2 0 │ 1 3 │ 4
class Batches:
    """The endless sequence of steps over all epochs, indexed by step number.

    Order and packs depend on the dataset and the seed only, not on the number of replicas. An
    epoch has the samples of `Dataset.draw`; packs are those of the first epoch. With pairs of
    samples each sample has a row, and the numbers below are those of pairs. A step has `batch`
    rows, the last step of an epoch the remaining rows. A row is a sample or, with packing, up to
    ``dataset.seq_length`` tokens of several samples (see `refuse_packing`). A micro-batch has
    `micro_batch` rows; if these are several, the rows of a step are sorted by length to reduce
    padding. Without `shuffle` samples keep the order of the files.
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
            order = self._shuffled(dataset.draw(0, self._seed), -1).tolist()
            self._packs = pack(dataset.lengths, order, dataset.seq_length)
        self._cached = 0, self._order(0)

    @property
    def num_rows(self) -> int:
        """Number of samples, pairs or packed rows in an epoch."""
        return len(self._cached[1])

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps per epoch."""
        return math.ceil(self.num_rows / self.batch)

    def __getitem__(self, number: int) -> OptimizerStep:
        """Return a step by number, from 0."""
        epoch, place = divmod(number, self.steps_per_epoch)
        if self._cached[0] != epoch:
            self._cached = epoch, self._order(epoch)
        numbers = self._cached[1][place * self.batch : (place + 1) * self.batch].tolist()
        packs = self._packs
        size = self.dataset.group_size
        if self.micro_batch > 1 and packs is None:
            numbers.sort(key=lambda at: self.dataset.lengths[at * size : (at + 1) * size].max())
        singles = [(at * size + part,) for at in numbers for part in range(size)]
        rows = singles if packs is None else [tuple(packs[at]) for at in numbers]
        num_rows = self.micro_batch * size
        groups = (rows[at : at + num_rows] for at in range(0, len(rows), num_rows))
        micro_batches = (TrainingMicroBatch(self.dataset, tuple(g), self.packing) for g in groups)
        return OptimizerStep(epoch=epoch, micro_batches=tuple(micro_batches))

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the samples, or the indices of packed rows, of an epoch in their order."""
        if self._packs is not None:
            return self._shuffled(np.arange(len(self._packs)), epoch)
        return self._shuffled(self.dataset.draw(epoch, self._seed), epoch)

    def _shuffled(self, rows: npt.NDArray[np.int64], epoch: int) -> npt.NDArray[np.int64]:
        """Return a permutation of an epoch's rows; the rows themselves without shuffling."""
        if self._seed is None:
            return rows
        # The generator is seeded with two numbers: with their sum, epoch 1 of seed 0 would have the
        # order of epoch 0 of seed 1. Epoch -1 is the order in which samples are packed.
        return np.random.default_rng([self._seed, epoch + 1]).permutation(rows)
