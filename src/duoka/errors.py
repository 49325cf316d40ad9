"""Errors that duoka raises for mistakes of the user and limits of the machine.

The tree, with the exit code that the command line returns for each:

    DuokaError                  1   base class, also for errors without a class of their own
    ├── UsageError              2   an invalid option, size or combination of options
    ├── FleetError              3   a device that doesn't exist, or none at all
    ├── CheckpointError         4   a checkpoint that is missing, incomplete or damaged
    ├── ModelError              5   a model that can't be built or traced
    ├── PlacementError          6   a placement or device map with names missing, unknown, …
    ├── InfeasibleError         7   nothing fits: with the missing bytes and suggestions that fit
    ├── ProofError              8   the plan failed on virtual GPUs, before a weight was read
    ├── LoadError               9   the loaded model differs from the expected one
    ├── FormatError            10   a plan or profile file of another version, or damaged
    ├── VirtualDeviceError     11   an operation that a virtual GPU does not support
    ├── MachineError           12   a limit of this machine: disk, memory, libraries
    │   └── GpuLostError       16   a GPU has failed; its processes must be started again
    └── TrainingError          14   training that can't continue: a loss that is not finite, …

A message names the problem, the given value, and the limit with its unit. `hint` says what to do
next; the command line prints it on its own line. Only `cli/` ends the process, with `exit_code`;
the library just raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


class DuokaError(Exception):
    """Base of all errors that duoka raises on purpose.

    Parameters
    ----------
    message : str
        The problem, the given value, and the limit with its unit.
    hint : str, optional
        What the user can do about the problem, in one sentence.
    """

    exit_code = 1
    param: str | None = None
    """Invalid field of an API request to the server; None if unknown or outside of the server."""

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
    """Errors of a placement or a device map; every list names all errors of its kind.

    Parameters
    ----------
    missing : tuple of str
        Parameters and buffers without a device.
    unknown : tuple of str
        Entries that name nothing in the model.
    doubled : tuple of str
        Entries or tensors with two devices.
    split : tuple of str
        Modules on several devices that must stay whole.
    misplaced : tuple of str
        Entries whose device is invalid or not in the fleet.
    nearest : mapping of str to tuple of str
        For each unknown name the most similar names of the model, best first.
    completed : mapping of str to (int or str), optional
        A complete device map that keeps the valid entries; None if none could be made.
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
        Summary of the errors.
    hint : str, optional
        As for `DuokaError`.
    faults : Faults, optional
        All invalid names. Its fields are also attributes of the error: `missing`, `unknown`,
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
    """A suggestion: a changed request that has been planned and fits.

    Parameters
    ----------
    kind : str
        Changed quantity: "context", "chunk", "batch", "cache", "int8", "int4", "offload", "gpu",
        "checkpointing", "optimizer", "rank", "lora", "nf4", or "map" (leave the device map out).
    text : str
        The change as a phrase.
    loses : str
        The cost of the change as a phrase, such as a loss of quality; "" without a cost.
    options : tuple of str
        Command-line arguments to add, or to replace the options of the same name.
    without : tuple of str
        Options to remove from the command line.
    context_tokens : int
        Context of the changed request.
    batch : int
        Batch of the changed request.
    prefill_chunk_tokens : int, optional
        Prefill chunk of the changed request; None if prefill is a single pass.
    num_gpus : int
        Number of GPUs in use.
    free_bytes : int
        The smallest unreserved part of a budget among the GPUs in use.
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
        """The text with the command-line options that make the change."""
        said = [" ".join(self.options)] if self.options else []
        said += [f"without {' '.join(self.without)}"] if self.without else []
        return f"{self.text} ({', '.join(said)})" if said else self.text


class InfeasibleError(DuokaError):
    """No placement fits the workload on the fleet.

    Parameters
    ----------
    message : str
        The request and the missing memory.
    hint : str, optional
        As for `DuokaError`; suggestions replace it.
    shortfall_bytes : int
        Lower bound of the bytes missing on the whole fleet.
    ways_out : sequence of WayOut
        Suggestions that fit, the smallest loss of quality first.
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
        """Return the same error with suggestions; `because` is appended to the message."""
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
