"""All samples of the data files as arrays, and all unusable rows."""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL.Image import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import from_numpy

from duoka.base.files import set_new_mode, why
from duoka.base.progress import say
from duoka.errors import FormatError, UsageError
from duoka.models.text.image_prompts import ImagePrompt, images_of
from duoka.models.text.prompts import ChatFormat, TrainingSample

from ..settings import TuneSettings
from .files import DataRow, data_files, read_rows, split_weight
from .images import References, image_digests, pack_images, read_data_image, unpack_images
from .pairs import pair_samples
from .rows import Chat, Document, RowError, read_row, rename_columns, with_answer
from .samples import chat_samples, prompt_sample, row_samples, truncate_chat

_MOST_SHOWN = 10
_MOST_WHY_CHARACTERS = 500
_NOTHING = "without trained tokens", "it has no tokens to train on"
_TOO_LONG = "too long"
_DEFAULTS = TuneSettings()
_LEAST_TOKENS = 2
_SKIP = "fix them, or skip them with --skip-bad (skip_bad=True)"
_MOST_LENGTHS = 32  # number of padded row lengths; the model is traced once for each of them
_ABOUT = ("files", "weights", "seq_length", "group_size", "prompts")
_ARRAYS = ("ids", "is_trained", "ends", "file_numbers", "lines")


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """An unusable row and the reason; bad rows are counted by `kind`."""

    file: str
    line: int
    reason: str
    kind: str = "invalid"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Samples of at most `seq_length` tokens, concatenated.

    `ids` [tokens] are the token ids of all samples, and `is_trained` [tokens] is the mask of
    trained tokens; the first token of a sample is never trained, because no token precedes it.
    `ends` [samples] has the offset after each sample, `file_numbers` and `lines` [samples] the
    index of its file in `files` and its line (or row) there. `weights` [files] are the weights of
    the files in an epoch; without them all are 1. `bad_rows` were skipped. `num_dropped` are the
    numbers of messages that were dropped from conversations. `group_size` samples in a row belong
    together: 2 for pairs of a chosen and a rejected answer. `images` has the references of the
    images of each sample, or nothing if there are none; see `images.open_image`. `prompts` are the
    texts of samples that are prompts to answer, with tokens in the place of each answer.
    """

    ids: npt.NDArray[np.int32]
    is_trained: npt.NDArray[np.bool_]
    ends: npt.NDArray[np.int64]
    file_numbers: npt.NDArray[np.int32]
    lines: npt.NDArray[np.int64]
    files: tuple[str, ...]
    seq_length: int
    group_size: int = 1
    weights: tuple[float, ...] = ()
    bad_rows: tuple[BadRow, ...] = ()
    num_dropped: tuple[int, ...] = ()
    images: References = ()
    prompts: tuple[str, ...] = ()

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
        """Sorted lengths to which rows of one sample are padded.

        The fewest lengths, at most 32, with which padding adds 5 % of tokens or less. Found as an
        optimal partition of the sorted lengths into groups, each padded to its longest, by dynamic
        programming over the number of groups: `minima[j]` is the minimum of padded tokens for the
        first j lengths, and `starts[n][j]` the index at which the last of n + 2 groups begins. For
        the lengths [10, 11, 50, 90] one group has 360 padded tokens, two groups have 202, and three
        have 162; 161 of these are no padding.
        """
        # Lengths are rounded up first. Tensor cores and masks favour multiples of 8; for rows below
        # 128 tokens that would be much padding. Above 512, 64 multiples from one power of two to
        # the next leave few enough lengths to choose from.
        power = np.log2(np.maximum(self.lengths, 512) / 64).astype(int)
        multiple = np.where(self.lengths < 128, 1, 2**power)
        rounded = np.minimum(-(-self.lengths // multiple) * multiple, self.seq_length)
        tops, counts = np.unique(rounded, return_counts=True)
        rows = np.append(0, counts.cumsum())
        # costs[i, j]: padded tokens of a group from the i-th length up to, but without, the j-th.
        costs = (rows - rows[:, None]) * np.append(0, tops)
        costs[np.tril_indices(len(rows))] = 2**57  # impossible; a sum of 32 still fits in int64
        # Each round allows one more group: minima'[j] = min over i of minima[i] + costs[i, j], in
        # O(L²) for L different lengths; up to 8,192 tokens L is at most about 430.
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
        """Hash of the samples; a run is resumed only with equal samples."""
        digest = hashlib.sha256()
        for name in ("ids", "is_trained", "ends"):
            digest.update(np.ascontiguousarray(getattr(self, name)).data)
        digest.update(json.dumps(self.weights).encode() if self.weights else b"")
        digest.update(image_digests(self.images))
        return digest.hexdigest()

    def draw(self, epoch: int, seed: int | None) -> npt.NDArray[np.int64]:
        """Return the samples (or pairs) of an epoch by number, in the order of the files.

        Of n samples of a file, m = n · weight are drawn, rounded, at least one. Over the epochs all
        are drawn equally often: with a weight of 1.5 every second epoch twice. `seed` decides which
        are drawn first.
        """
        # The sample of rank r, from 0 to n - 1, is drawn as often as e·m + r passes a multiple of n
        # in epoch e. With n = 4 and m = 3 the ranks 1, 2, 3 are drawn first, then 0, 2, 3.
        copies = np.ones(len(self) // self.group_size, np.int64)
        for file, weight in enumerate(self.weights):
            start, stop = np.searchsorted(self.file_numbers[:: self.group_size], (file, file + 1))
            number = max(1, stop - start)
            drawn = max(1, round(number * weight))
            ranks = np.random.default_rng([seed or 0, file, 0]).permutation(stop - start)
            passed = (epoch * drawn + ranks) // number
            copies[start:stop] = ((epoch + 1) * drawn + ranks) // number - passed
        return np.repeat(np.arange(len(copies)), copies)

    def tokens(self, sample: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Return a sample's token ids, and the mask of its trained tokens."""
        span = slice(int(self.ends[sample] - self.lengths[sample]), int(self.ends[sample]))
        return self.ids[span], self.is_trained[span]

    def split(self, share: float, seed: int) -> tuple[Dataset, Dataset]:
        """Split into the samples to train on and a random share of the rows to evaluate on.

        The samples of a row stay together, because they may have the beginning of a conversation in
        common; if there is only one row, such as a text file, its samples are split. Evaluation
        takes each sample once, whatever the weights.

        Raises
        ------
        UsageError
            If there is only one sample.
        """
        places = np.stack([self.file_numbers, self.lines])
        units = np.unique(places, axis=1, return_inverse=True)[1].ravel()
        if not units.any():
            units = np.arange(len(self)) // self.group_size
        number = int(units.max()) + 1
        if number == 1:
            raise UsageError(
                f"the data has one sample, and {share:.3g} of it can't be set aside",
                hint="give more data, or a file to --eval",
            )
        chosen = np.random.default_rng(seed).permutation(number)
        chosen = chosen[: min(max(1, round(share * number)), number - 1)]
        is_evaluated = np.isin(units, chosen)
        evaluated = self._select(is_evaluated)
        evaluated = replace(evaluated, weights=(), bad_rows=(), num_dropped=())
        return self._select(~is_evaluated), evaluated

    def _select(self, is_wanted: npt.NDArray[np.bool_]) -> Dataset:
        """Return a dataset of some of the samples."""
        tokens = np.repeat(is_wanted, self.lengths)
        return replace(
            self,
            ids=self.ids[tokens],
            is_trained=self.is_trained[tokens],
            ends=self.lengths[is_wanted].cumsum(),
            file_numbers=self.file_numbers[is_wanted],
            lines=self.lines[is_wanted],
            images=tuple(compress(self.images, is_wanted)),
        )

    def place(self, sample: int) -> str:
        """Return the place of a sample in the data, as "file:line"."""
        return f"{self.files[self.file_numbers[sample]]}:{self.lines[sample]}"

    def save(self, path: Path) -> None:
        """Write the samples, without bad rows, to a file for all processes to map into memory."""
        values = {name: getattr(self, name) for name in _ARRAYS}
        values |= pack_images(self.images) if any(self.images) else {}
        arrays = {name: from_numpy(value) for name, value in values.items()}
        about = json.dumps({name: getattr(self, name) for name in _ABOUT})
        save_file(arrays, path, {"about": about})
        set_new_mode(path)

    @classmethod
    def load(cls, path: Path) -> Dataset:
        """Map a file written by `save` into memory, shared by all processes.

        Raises
        ------
        FormatError
            If the file is missing, damaged, or of another kind.
        """
        try:
            with safe_open(path, "pt") as file:
                values = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
                about = json.loads((file.metadata() or {})["about"])
            arrays: dict[str, Any] = {name: values.pop(name) for name in _ARRAYS}
            arrays |= {name: tuple(about[name]) for name in ("files", "weights")}
            arrays["prompts"] = tuple(about.get("prompts", ()))
            images = unpack_images(**values) if values else ()
            arrays |= {name: about[name] for name in ("seq_length", "group_size")}
            return cls(**arrays, images=images)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"{path} can't be read, or has no samples: {error}",
                hint="start a new run in another directory",
            ) from error


def read_dataset(
    paths: Sequence[str | Path],
    chat: ChatFormat,
    settings: TuneSettings = _DEFAULTS,
    *,
    seq_length: int,
    is_training: bool = True,
    has_prompts: bool = False,
) -> Dataset:
    """Read files, or all files of directories, as samples in a model's chat format.

    Documents are cut to the sequence length, and turns of longer conversations dropped. A row of
    which nothing fits is skipped, because a cut answer has no end. Files for training may have
    weights and a maximum of samples. Raises UsageError for other unusable rows, and with the
    setting `long` "refuse" for all long ones, unless the settings skip bad rows; and for named
    columns that are in none of the rows. With `has_prompts` the samples are prompts.
    """
    if seq_length < _LEAST_TOKENS:
        raise UsageError(f"seq_length is {seq_length}; it must be at least {_LEAST_TOKENS}")
    weighted = [split_weight(path) if is_training else (Path(path), 1.0) for path in paths]
    files = [(file, weight) for path, weight in weighted for file in data_files([path])]
    collector = _Collector(chat, seq_length, settings)
    if has_prompts:
        collector.prompts, collector.group_size = [], 1
        settings = replace(settings, long="refuse", skip_bad=False)
    size = collector.group_size
    most = settings.max_samples * size if is_training and settings.max_samples else sys.maxsize
    for number, (file, _) in enumerate(files):
        say(f"reading {file}")
        rows = read_rows(file, by_line=has_prompts)
        share = (most - len(collector.ends)) // (len(files) - number) // size * size
        stop = len(collector.ends) + share
        while (remaining := stop - len(collector.ends)) and (row := next(rows, None)):
            collector.take(row, number, str(file), remaining)
    bad = collector.bad_rows
    if is_training and collector.absent:
        hint = f"columns of the last row: {', '.join(collector.last_keys) or 'none'}"
        absent = min(collector.absent, key=str)
        raise UsageError(f"no row has the column {absent!r}", hint=hint)
    refused = [row for row in bad if row.kind != _TOO_LONG or settings.long == "refuse"]
    if refused and not settings.skip_bad:
        hint = "fix or shorten them" if has_prompts else _SKIP
        raise UsageError(_refusal(refused, collector.num_rows), hint=hint)
    if not len(collector.ends):
        why_none = f": {_refusal(bad, collector.num_rows)}" if bad else ""
        raise UsageError(f"no samples in {', '.join(map(str, paths))}{why_none}")
    return collector.dataset(files)


def _refusal(bad: Sequence[BadRow], num_rows: int) -> str:
    """Build the error message: the number of unusable rows, and the first few."""
    listed = "".join(f"\n  {row}" for row in bad[:_MOST_SHOWN])
    remainder = f"\n  … and {len(bad) - _MOST_SHOWN} more" if len(bad) > _MOST_SHOWN else ""
    return f"{len(bad)} of {num_rows} rows are invalid{listed}{remainder}"


class _Collector:
    """Collects the samples of rows in growing arrays."""

    def __init__(self, chat: ChatFormat, seq_length: int, settings: TuneSettings) -> None:
        self.num_rows = 0
        self.bad_rows: list[BadRow] = []
        self.ends = array("q")
        self.absent = set(settings.columns.values())
        self.last_keys: list[str] = []
        self._columns = settings.columns
        self._num_dropped: list[int] = []
        self.prompts: list[str] | None = None
        self._format = chat, seq_length, settings.train_on
        self._images: list[tuple[bytes, ...]] = []
        self._directory = Path()
        # Of the current row: the reference of each image by its id, and the images of its samples.
        self._references: dict[int, bytes] = {}
        self._row_images: list[Image] = []
        self._seq_length = seq_length
        self._truncates = settings.long == "truncate"
        self.group_size = 2 if settings.dpo else 1
        self._ids, self._is_trained = array("i"), array("b")
        self._file_numbers, self._lines = array("i"), array("q")

    def take(self, row: DataRow, file_number: int, file: str, most: int) -> None:
        """Add the first `most` samples of a row, or a bad row if one of them is unusable."""
        self.num_rows += 1
        self._directory = Path(file).parent
        self._references, self._row_images = {}, []
        num_samples, num_tokens = len(self.ends), len(self._ids)
        try:
            if row.problem:
                raise RowError("unreadable", row.problem)
            for sample in islice(self._samples(row), most):
                self._add(sample)
                self._file_numbers.append(file_number)
                self._lines.append(row.line)
            if len(self.ends) == num_samples:
                raise RowError(*_NOTHING)
            return
        except RowError as error:
            kind, reason = error.kind, str(error)
        except (UsageError, RecursionError) as error:
            kind, reason = "invalid", str(error)
        except (OSError, UnicodeDecodeError) as error:  # text files are read lazily
            kind, reason = "unreadable", why(error)
        reason = reason[:_MOST_WHY_CHARACTERS]
        self.bad_rows.append(BadRow(file=file, line=row.line, reason=reason, kind=kind))
        for of_samples in (self.ends, self._file_numbers, self._lines, self._images):
            del of_samples[num_samples:]
        del self._ids[num_tokens:], self._is_trained[num_tokens:]

    def _samples(self, row: DataRow) -> Iterator[TrainingSample]:
        """Interpret and encode a row; truncate a long conversation."""
        if isinstance(row.value, Document):
            return row_samples(row.value, *self._format)
        self.absent -= row.value.keys()
        self.last_keys = list(row.value)[:_MOST_SHOWN]
        takes_images = self._format[0].images is not None
        row_value = rename_columns(row.value, self._columns)
        if self.group_size > 1:
            return iter(pair_samples(row_value, *self._format))
        row_value = row_value if self.prompts is None else with_answer(row_value)
        content = read_row(row_value, self._read_image if takes_images else None)
        if isinstance(content, Chat):
            self._row_images = images_of(content.messages)
        if self.prompts is not None:
            sample, prompt = prompt_sample(content, self._format[0], self._seq_length)
            self.prompts.append(prompt)
            return iter([sample])
        if self._truncates and isinstance(content, Chat):
            samples = chat_samples(content, *self._format)
            if not samples or len(samples[-1].ids) <= self._seq_length:
                return iter(samples)
            whole, content = content, truncate_chat(content, *self._format)
            if num_dropped := len(whole.messages) - len(content.messages):
                self._num_dropped.append(num_dropped)
                self._row_images = images_of(content.messages)
        return row_samples(content, *self._format)

    def _read_image(self, value: Any) -> Image:
        """Read an image of the current row, and note its reference."""
        reference, image = read_data_image(value, self._directory)
        self._references[id(image)] = reference
        return image

    def _add(self, sample: TrainingSample) -> None:
        """Append a sample; raise RowError for too long samples, or without a trained token."""
        ids, is_trained = sample
        if len(ids) > self._seq_length:
            raise RowError(
                _TOO_LONG,
                f"it has at least {len(ids)} tokens; the sequence length is {self._seq_length}",
            )
        if not any(is_trained[1:]):
            raise RowError(*_NOTHING)
        self._ids.extend(ids)
        self._is_trained.extend([False, *is_trained[1:]])
        self.ends.append(len(self._ids))
        num_images = ids.num_images if isinstance(ids, ImagePrompt) else 0
        images = self._row_images[:num_images]
        self._images.append(tuple(self._references[id(image)] for image in images))

    def dataset(self, files: Sequence[tuple[Path, float]]) -> Dataset:
        """Return the dataset; the arrays are moved, not copied."""
        weights = tuple(weight for _, weight in files)
        return Dataset(
            ids=np.frombuffer(self._ids, np.int32),
            is_trained=np.frombuffer(self._is_trained, np.bool_),
            ends=np.frombuffer(self.ends, np.int64),
            file_numbers=np.frombuffer(self._file_numbers, np.int32),
            lines=np.frombuffer(self._lines, np.int64),
            files=tuple(str(file) for file, _ in files),
            seq_length=self._seq_length,
            group_size=self.group_size,
            weights=weights if set(weights) != {1.0} else (),
            bad_rows=tuple(self.bad_rows),
            num_dropped=tuple(self._num_dropped),
            images=tuple(self._images) if any(self._images) else (),
            prompts=tuple(self.prompts or ()),
        )
