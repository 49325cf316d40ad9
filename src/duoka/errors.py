"""Every error that duoka raises for a user's mistake or a machine's limit.

The tree, with the exit code that the command line returns for each::

    DuokaError                  1   anything below, or an error without a better class
    ├── UsageError              2   an option, size or combination that can't be understood
    ├── FleetError              3   a device that doesn't exist, or none at all
    ├── CheckpointError         4   a checkpoint that is missing, incomplete or damaged
    ├── ModelError              5   a model that can't be built or traced
    ├── PlacementError          6   a placement or device map with names missing, unknown, …
    ├── InfeasibleError         7   nothing fits: carries the shortfall and the ways out
    ├── ProofError              8   the plan failed on virtual GPUs, before a weight was read
    ├── LoadError               9   what was loaded isn't what was expected
    ├── FormatError            10   a plan or profile file of another version, or damaged
    ├── VirtualDeviceError     11   what a virtual GPU can't do
    ├── MachineError           12   what this machine refuses: disk, memory, libraries
    │   └── GpuLostError       16   a GPU has failed, and what runs on it has to be started again
    └── TrainingError          14   training that can't go on: a loss that is no number, …

A message says what went wrong, what was given, and the limit with its unit. `hint` says what to
do next; the command line prints it on a line of its own. A library never exits: only `cli/`
turns `exit_code` into the process's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


class DuokaError(Exception):
    """Base of all errors that duoka raises on purpose.

    Parameters
    ----------
    message : str
        What went wrong, what was given, and the limit with its unit.
    hint : str, optional
        What the reader can do about it, in one sentence.
    """

    exit_code = 1
    param: str | None = None
    """The field of a server's request that is wrong, where that is known."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # in tracebacks


class UsageError(DuokaError):
    """Invalid option, size or combination of options."""

    exit_code = 2


class FleetError(DuokaError):
    """Device that does not exist, is named twice, or none at all."""

    exit_code = 3


class CheckpointError(DuokaError):
    """Missing, incomplete or damaged checkpoint."""

    exit_code = 4


class ModelError(DuokaError):
    """Model that cannot be built or traced."""

    exit_code = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Errors of a placement or a device map; every list is complete.

    Parameters
    ----------
    missing : tuple of str
        Parameters and buffers without a device.
    unknown : tuple of str
        Entries that name nothing in the model.
    doubled : tuple of str
        Entries or tensors with two devices.
    split : tuple of str
        Modules that must stay whole and don't.
    misplaced : tuple of str
        Entries whose device isn't one, or isn't in the fleet.
    nearest : mapping of str to tuple of str
        For an unknown name the real names that are like it, best first.
    completed : mapping of str to (int or str), optional
        A complete device map that keeps what could be kept, where one could be made.
    """

    missing: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    misplaced: tuple[str, ...] = ()
    nearest: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    completed: Mapping[str, int | str] | None = None

    def __bool__(self) -> bool:
        return any((self.missing, self.unknown, self.doubled, self.split, self.misplaced))


class PlacementError(DuokaError):
    """Placement without exactly one device for every parameter and buffer.

    Parameters
    ----------
    message : str
        The summary.
    faults : Faults
        All names at fault, which are attributes of the error as well: `missing`, `unknown`,
        `doubled`, `split`, `misplaced`, `nearest`, `completed`.
    """

    exit_code = 6

    def __init__(
        self, message: str, *, hint: str | None = None, faults: Faults | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.faults = faults = faults or Faults()
        self.missing, self.unknown = faults.missing, faults.unknown
        self.doubled, self.split = faults.doubled, faults.split
        self.misplaced, self.nearest = faults.misplaced, faults.nearest
        self.completed = faults.completed


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """A suggestion: a changed request that fits, planned already.

    Parameters
    ----------
    kind : str
        What changes: "context", "chunk", "batch", "cache", "int8", "int4", "offload", "gpu",
        "checkpointing", "optimizer", "rank", "lora", "nf4", or "map" (leave the device map out).
    text : str
        The same for people.
    loses : str
        What is lost by it, for people; empty where nothing is.
    options : tuple of str
        Arguments of the command line: to add, or to put in the place of those that are there.
    without : tuple of str
        Options to leave out.
    context_tokens, batch, prefill_chunk_tokens : int
        What is then run; no chunk where the prompt runs whole.
    num_gpus, free_bytes : int
        GPUs that are used, and the least bytes of a budget that one of them does not reserve.
    """

    kind: str
    text: str
    loses: str = ""
    options: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    context_tokens: int
    batch: int
    prefill_chunk_tokens: int | None = None
    num_gpus: int
    free_bytes: int

    @property
    def sentence(self) -> str:
        """Return the text with the command that asks for it."""
        said = [" ".join(self.options)] if self.options else []
        said += [f"without {' '.join(self.without)}"] if self.without else []
        return f"{self.text} ({', '.join(said)})" if said else self.text


class InfeasibleError(DuokaError):
    """No placement fits the workload on the fleet.

    Parameters
    ----------
    message : str
        What was asked for and what is missing.
    shortfall_bytes : int
        How many bytes are missing on the whole fleet, as a lower bound.
    ways_out : sequence of WayOut
        What would fit, cheapest for quality first.
    """

    exit_code = 7

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        shortfall_bytes: int = 0,
        ways_out: Sequence[WayOut] = (),
    ) -> None:
        ways = "; or ".join(way.sentence for way in ways_out)
        super().__init__(message, hint=ways or hint)
        self.shortfall_bytes = shortfall_bytes
        self.ways_out = tuple(ways_out)

    def with_ways_out(self, ways: Iterable[WayOut], because: str = "") -> InfeasibleError:
        """Return the same error with suggestions and the size of the model."""
        return InfeasibleError(
            f"{self}{because}",
            hint=self.hint,
            shortfall_bytes=self.shortfall_bytes,
            ways_out=tuple(ways),
        )


class ProofError(DuokaError):
    """Plan that failed on virtual GPUs, before a weight was read."""

    exit_code = 8


class LoadError(DuokaError):
    """Loaded model differs from the expected one; nothing stays half-loaded."""

    exit_code = 9


class FormatError(DuokaError):
    """Plan or profile file of another version, or damaged."""

    exit_code = 10


class VirtualDeviceError(DuokaError):
    """Operation that a virtual GPU does not support, or another backend in its place."""

    exit_code = 11


class MachineError(DuokaError):
    """Limit of this machine: full disk, missing permission, memory or library."""

    exit_code = 12


class GpuLostError(MachineError):
    """GPU that failed while a process used it; only another process can use it again."""

    exit_code = 16


class TrainingError(DuokaError):
    """Training that cannot continue: a loss that is not finite, weights without a gradient."""

    exit_code = 14
