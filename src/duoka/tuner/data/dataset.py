"""All samples of some files as arrays, and all unusable rows."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import from_numpy

from duoka.base.files import set_new_mode, why
from duoka.base.progress import say
from duoka.errors import FormatError, UsageError
from duoka.models.text.prompts import ChatFormat, TrainingSample

from ..settings import TrainOn
from .files import DataRow, data_files, read_rows
from .rows import Document, read_row
from .samples import row_samples

_MOST_SHOWN = 10
_MOST_WHY_CHARACTERS = 500
_NOTHING = "it has no tokens to train on"
_LEAST_TOKENS = 2
_SKIP = "fix them, or skip them with --skip-bad (skip_bad=True)"
_MOST_LENGTHS = 32  # that rows are padded to: each is traced before it runs
_ARRAYS = ("ids", "is_trained", "ends", "file_numbers", "lines")


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """An unusable row and the reason."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Samples of at most `seq_length` tokens, one behind the other.

    Of all tokens, `ids` [tokens], those are to be learnt that `is_trained` [tokens] says; the first
    of a sample never is, as nothing is before it. `ends` [samples] says where each sample ends, and
    `file_numbers` and `lines` [samples] from which of the `files`, and which line (or row) of it,
    it is. `bad_rows` were left out.
    """

    ids: npt.NDArray[np.int32]
    is_trained: npt.NDArray[np.bool_]
    ends: npt.NDArray[np.int64]
    file_numbers: npt.NDArray[np.int32]
    lines: npt.NDArray[np.int64]
    files: tuple[str, ...]
    seq_length: int
    bad_rows: tuple[BadRow, ...] = ()

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each sample."""
        return np.diff(self.ends, prepend=0)

    @cached_property
    def trained_tokens(self) -> npt.NDArray[np.int64]:
        """Number of trained tokens of each sample."""
        starts = self.ends - self.lengths
        return np.add.reduceat(self.is_trained, starts, dtype=np.int64)

    @cached_property
    def row_lengths(self) -> list[int]:
        """Lengths to pad rows of one sample to: the fewest, 32 at most, that add 5 % or less.

        An optimal partition of the sorted lengths into groups, each padded to its longest, by
        dynamic programming over the number of groups: `minima[j]` is the fewest tokens of all rows
        of the first j lengths, and `starts[n][j]` where the last of their n + 2 groups begins. Of
        [10, 11, 50, 90] one group has 360 tokens, two have 202 and three 162, 161 of which are no
        padding.
        """
        # Matrix units and masks like multiples of 8, which are too much of a short row. Those of
        # larger powers of two, 64 from one power to the next, are few enough to choose from.
        power = np.log2(np.maximum(self.lengths, 512) / 64).astype(int)
        multiple = np.where(self.lengths < 128, 1, 2**power)
        rounded = np.minimum(-(-self.lengths // multiple) * multiple, self.seq_length)
        tops, counts = np.unique(rounded, return_counts=True)
        rows = np.append(0, counts.cumsum())
        # costs[i, j]: all tokens of a group from the i-th length up to, not with, the j-th.
        costs = (rows - rows[:, None]) * np.append(0, tops)
        costs[np.tril_indices(len(rows))] = 2**57  # no group; 32 of them are still a number
        # Each round allows one group more: minima'[j] = min over i of minima[i] + costs[i, j], in
        # O(L²) for L different lengths, of which there are at most about 430 up to 8,192 tokens.
        minima = costs[0]
        starts: list[npt.NDArray[np.int64]] = []
        while minima[-1] > 1.05 * len(self.ids) and len(starts) < min(_MOST_LENGTHS, len(tops)) - 1:
            starts.append((minima[:, None] + costs).argmin(axis=0))
            minima = (minima[:, None] + costs).min(axis=0)
        stops = [len(tops)]
        for start in reversed(starts):
            stops.insert(0, int(start[stops[0]]))
        return [int(tops[stop - 1]) for stop in stops]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the samples, which must be equal when a run is resumed."""
        digest = hashlib.sha256()
        for name in ("ids", "is_trained", "ends"):
            digest.update(np.ascontiguousarray(getattr(self, name)).data)
        return digest.hexdigest()

    def tokens(self, sample: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Return a sample's token ids and which of them are trained."""
        span = slice(int(self.ends[sample] - self.lengths[sample]), int(self.ends[sample]))
        return self.ids[span], self.is_trained[span]

    def place(self, sample: int) -> str:
        """Return file and line of a sample."""
        return f"{self.files[self.file_numbers[sample]]}:{self.lines[sample]}"

    def save(self, path: Path) -> None:
        """Write the samples to a file for processes that share them; bad rows are omitted."""
        arrays = {name: from_numpy(getattr(self, name)) for name in _ARRAYS}
        about = json.dumps({"files": self.files, "seq_length": self.seq_length})
        save_file(arrays, path, {"about": about})
        set_new_mode(path)

    @classmethod
    def load(cls, path: Path) -> Dataset:
        """Map a file of `save` into memory, shared by all processes.

        Raises
        ------
        FormatError
            If the file is missing, damaged, or of another kind.
        """
        try:
            with safe_open(path, "pt") as file:
                arrays: dict[str, Any] = {name: file.get_tensor(name).numpy() for name in _ARRAYS}
                about = json.loads((file.metadata() or {})["about"])
            return cls(**arrays, files=tuple(about["files"]), seq_length=about["seq_length"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"{path} can't be read, or has no samples: {error}",
                hint="start a new run in another directory",
            ) from error


def read_dataset(
    paths: Sequence[str | Path],
    chat: ChatFormat,
    *,
    seq_length: int,
    train_on: TrainOn = "all",
    skip_bad: bool = False,
) -> Dataset:
    """Read files, or all files of directories, as samples in a model's format.

    Documents are cut to the sequence length; conversations and completions are not, because the
    model would learn answers without an end. Trained are all answers of a conversation, or the last
    one. With `skip_bad` unusable rows are skipped instead of refused.
    """
    if seq_length < _LEAST_TOKENS:
        raise UsageError(f"seq_length is {seq_length}; it must be at least {_LEAST_TOKENS}")
    files = data_files(paths)
    collector = _Collector(chat, seq_length, train_on)
    for number, file in enumerate(files):
        say(f"reading {file}")
        for row in read_rows(file):
            collector.take(row, number, str(file))
    bad = collector.bad_rows
    if bad and not skip_bad:
        raise UsageError(_refusal(bad, collector.num_rows), hint=_SKIP)
    if not len(collector.ends):
        why_none = f": {_refusal(bad, collector.num_rows)}" if bad else ""
        raise UsageError(f"no samples in {', '.join(map(str, paths))}{why_none}")
    return collector.dataset(tuple(map(str, files)))


def _refusal(bad: Sequence[BadRow], num_rows: int) -> str:
    """Build the error with the number of unusable rows and the first of them."""
    listed = "".join(f"\n  {row}" for row in bad[:_MOST_SHOWN])
    remainder = f"\n  … and {len(bad) - _MOST_SHOWN} more" if len(bad) > _MOST_SHOWN else ""
    return f"{len(bad)} of {num_rows} rows are invalid{listed}{remainder}"


class _Collector:
    """Collects rows as a few numbers and their tokens."""

    def __init__(self, chat: ChatFormat, seq_length: int, train_on: TrainOn) -> None:
        self.num_rows = 0
        self.bad_rows: list[BadRow] = []
        self.ends = array("q")
        self._chat = chat
        self._seq_length = seq_length
        self._train_on = train_on
        self._ids, self._is_trained = array("i"), array("b")
        self._file_numbers, self._lines = array("i"), array("q")

    def take(self, row: DataRow, file_number: int, file: str) -> None:
        """Add all samples of a row, or none."""
        self.num_rows += 1
        num_samples, num_tokens = len(self.ends), len(self._ids)
        reason = row.problem
        try:
            for sample in () if reason else self._samples(row):
                self._add(sample)
                self._file_numbers.append(file_number)
                self._lines.append(row.line)
            if not reason and len(self.ends) == num_samples:
                reason = _NOTHING
        except (UsageError, RecursionError) as error:
            reason = str(error)
        except (OSError, UnicodeDecodeError) as error:  # a text is read only now
            reason = why(error)
        if reason:
            self.bad_rows.append(
                BadRow(file=file, line=row.line, reason=reason[:_MOST_WHY_CHARACTERS])
            )
            for of_samples in (self.ends, self._file_numbers, self._lines):
                del of_samples[num_samples:]
            del self._ids[num_tokens:], self._is_trained[num_tokens:]

    def _samples(self, row: DataRow) -> Iterator[TrainingSample]:
        content = row.value if isinstance(row.value, Document) else read_row(row.value)
        return row_samples(content, self._chat, self._seq_length, self._train_on)

    def _add(self, sample: TrainingSample) -> None:
        ids, is_trained = sample
        if len(ids) > self._seq_length:
            raise UsageError(
                f"it has at least {len(ids)} tokens; the sequence length is {self._seq_length}"
            )
        if not any(is_trained[1:]):
            raise UsageError(_NOTHING)
        self._ids.extend(ids)
        self._is_trained.extend([False, *is_trained[1:]])
        self.ends.append(len(self._ids))

    def dataset(self, files: tuple[str, ...]) -> Dataset:
        """Return the dataset; the arrays are moved, not copied."""
        return Dataset(
            ids=np.frombuffer(self._ids, np.int32),
            is_trained=np.frombuffer(self._is_trained, np.bool_),
            ends=np.frombuffer(self.ends, np.int64),
            file_numbers=np.frombuffer(self._file_numbers, np.int32),
            lines=np.frombuffer(self._lines, np.int64),
            files=files,
            seq_length=self._seq_length,
            bad_rows=tuple(self.bad_rows),
        )
