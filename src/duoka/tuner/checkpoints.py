"""Training checkpoints: what a run saves now and then, and is resumed from.

Every process gives what it has of the model: the parameters that learn, and their optimizer's
states. They are stored by the parameters' names, so that a run goes on with another number of
GPUs, stages or replicas. Tensors are written by `torch.distributed.checkpoint` as safetensors,
its own metadata would be a pickle; everything else is in a file of JSON, with a digest of each file
of tensors. A directory gets its name when all of it is on the disk.

What isn't known here: where a process has its tensors, and what else belongs to a run's state.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from duoka.base.files import open_regular, whole_directory, write_whole
from duoka.checkpoint.headers import TensorInfo, is_plain_name, read_header, read_json, reading
from duoka.errors import CheckpointError, MachineError

from .optimizer_states import drop_states, make_states, optimizer_tensors, set_numbers
from .write_errors import first_failure, name_write_errors

T = TypeVar("T")
_ROOM = (
    "free disk space, get the permission, or use another directory; earlier checkpoints are intact"
)
_MANIFEST = "checkpoint.json"
_VERSION = 1
_NAME = re.compile(r"step-(\d{6,12})")
_PARTIAL = ".step-*.partial"
# Of a file of tensors: as much as this is in the host's memory twice while it is written.
_FILE_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """State to resume from: a checkpoint, its step, and the `state` of `save`.

    `refused` lists why newer checkpoints were skipped, newest first.
    """

    path: Path
    step: int
    state: dict[str, Any]
    refused: tuple[str, ...] = ()


# Processes never decide alone. What one of them does with files runs in `_agree`: each process
# calls its action, the results are exchanged, and an error in one is raised in all, so that nobody
# waits for a process that has left. Saving goes through three steps:
#
#   1. write tensors and optimizer states to a hidden directory; a replicated tensor is written once
#   2. hash each file in the process that wrote it
#   3. the first process writes the manifest, flushes all to the disk and renames the directory
#
# A kill before the rename leaves a hidden directory, removed at the next save, and a kill after it
# a whole checkpoint. Older ones are removed only then.
class TrainingCheckpoints:
    """The training checkpoints of one run, in a directory on a disk that all processes share.

    Every process of the run makes one and calls its methods at the same time; without
    `torch.distributed` there is one process. What fails in one of them is raised in all. `identity`
    has what must be the same when the run is resumed, by what it is called: the fingerprint of the
    model, that of the data, the method. The `keep` newest checkpoints are kept.
    """

    def __init__(self, directory: Path, identity: Mapping[str, str], *, keep: int = 2) -> None:
        self._directory = directory.resolve()
        self._identity = dict(identity)
        self._keep = keep
        self._several = dist.is_initialized()
        self._rank = dist.get_rank() if self._several else 0
        self._size = dist.get_world_size() if self._several else 1
        self._newest: int | None = None

    @property
    def steps(self) -> list[int]:
        """Steps with a checkpoint, oldest first, complete or not."""
        if not self._directory.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self._directory.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def path(self, step: int) -> Path:
        """Return the directory of a step's checkpoint."""
        return self._directory / f"step-{step:06d}"

    # ── saving ──

    def save(
        self,
        step: int,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer | None,
        state: Mapping[str, Any],
    ) -> Path:
        """Save a run after so many steps; return the directory of the checkpoint.

        Each process gives what learns in it by the names in the model, with its optimizer's states;
        replicas have the same. `state`, of the first process, is everything else, as JSON. A crash
        at any moment leaves the checkpoint before as it is. Older ones than are kept are removed,
        and those of later steps: the run has left them.
        """
        path = self.path(step)
        if step == self._newest:
            return path
        with name_write_errors(f"the training checkpoint {path}", _ROOM), ExitStack() as directory:
            partial = self._agree(lambda: self._begin(path, directory))[0]
            assert partial is not None
            self._write(partial, {**parameters, **optimizer_tensors(parameters, optimizer)})
            # The hash of each tensor file that this process wrote, and those of the others.
            paths = partial.glob(f"shard-{self._rank + 1:05}-*")
            files = self._join(lambda: {path.name: _digest_of(path) for path in paths})
            manifest = {"version": _VERSION, "step": step, "identity": self._identity}
            manifest |= {"files": files, "state": state}
            self._agree(lambda: self._finish(manifest, partial, directory))
        self._newest = step
        return path

    def _begin(self, path: Path, directory: ExitStack) -> Path | None:
        """Create the temporary directory in the first process."""
        if self._rank != 0:
            return None
        for leftover in self._directory.glob(_PARTIAL):
            shutil.rmtree(leftover, ignore_errors=True)
        return directory.enter_context(whole_directory(path))

    def _write(self, partial: Path, tensors: Mapping[str, Tensor]) -> None:
        # Every process computes the same file of each tensor, from the sizes of all: three tensors
        # of 0.6 GiB end at 0.6, 1.2 and 1.8 GiB, so they go to the files 1, 2 and 2.
        sizes = self._join(lambda: {name: value.nbytes for name, value in tensors.items()})
        ends = accumulate(sizes.values())
        file_of = {name: 1 + end // _FILE_BYTES for name, end in zip(sizes, ends, strict=True)}
        writer = HuggingFaceStorageWriter(
            str(partial), fqn_to_index_mapping=file_of, save_distributed=True
        )
        # Copies ahead need streams, which virtual GPUs don't have.
        writer.per_thread_copy_ahead = 0
        with warnings.catch_warnings(action="ignore"):  # that there is one process only
            save(dict(tensors), storage_writer=writer, no_dist=not self._several)

    def _finish(self, manifest: Mapping[str, Any], partial: Path, directory: ExitStack) -> None:
        """Write the manifest and rename the directory in the first process."""
        if self._rank != 0:
            return
        absent = [name for name in manifest["files"] if not (partial / name).is_file()]
        if absent:
            raise MachineError(
                f"{self._directory} isn't shared by all processes of the run: {absent[0]} is "
                "missing",
                hint="use a directory on a disk that all machines share",
            )
        write_whole(partial / _MANIFEST, json.dumps(manifest, allow_nan=False, indent=1))
        step = manifest["step"]
        # One that was refused at the start may be there.
        shutil.rmtree(self.path(step), ignore_errors=True)
        directory.close()
        current = [saved_step for saved_step in self.steps if saved_step <= step][-self._keep :]
        for saved_step in {*self.steps} - {*current}:
            shutil.rmtree(self.path(saved_step), ignore_errors=True)

    # ── resuming ──

    def resume(
        self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None
    ) -> Resumed | None:
        """Load the newest complete checkpoint; None if there are no checkpoints.

        The processes together must have the saved parameters, in any distribution; the optimizer
        must be new. CheckpointError is raised, and nothing has changed, if all checkpoints are
        damaged or of another run.
        """
        refused: list[str] = []
        for step in reversed(self._agree(lambda: self.steps)[0]):
            try:
                state, names = self._accepted(step, parameters)
            except CheckpointError as error:
                refused.append(str(error))
                continue
            self._read(step, names, parameters, optimizer)
            self._newest = step
            return Resumed(path=self.path(step), step=step, state=state, refused=tuple(refused))
        if refused:
            raise CheckpointError(
                f"no training checkpoint in {self._directory} can be resumed from: "
                f"{'; '.join(refused)}",
                hint="start a new run in another directory, or use the original model, data and "
                "method",
            )
        return None

    def _accepted(
        self, step: int, parameters: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], list[str]]:
        """Return state and tensors' names of a checkpoint that is complete and of this run."""
        path = self.path(step)
        manifest = self._agree(lambda: _read_manifest(path))[0]
        if manifest["step"] != step:
            raise CheckpointError(f"{path} declares step {manifest['step']}")
        identity = manifest["identity"]
        differences = [
            f"its {name} is {identity.get(name)}, not {self._identity.get(name)}"
            for name in sorted(identity.keys() | self._identity.keys())
            if identity.get(name) != self._identity.get(name)
        ]
        if differences:
            raise CheckpointError(f"{path} belongs to another run: {', '.join(differences)}")
        stored = self._join(lambda: self._verified(path, manifest["files"]))
        forms = self._join(lambda: {name: _form(value) for name, value in parameters.items()})
        _refuse_others(path, {n: _form(t) for n, t in stored.items() if "/" not in n}, forms)
        return manifest["state"], list(stored)

    def _verified(self, path: Path, digests: Mapping[str, str]) -> dict[str, TensorInfo]:
        """Return the tensors of this process's share of the files after verifying hashes."""
        stored: dict[str, TensorInfo] = {}
        for name in sorted(digests)[self._rank :: self._size]:
            file = path / name
            with reading(file):
                if _digest_of(file) != digests[name]:
                    raise CheckpointError(f"{file} has changed since it was written")
            stored |= read_header(file)
        return stored

    def _read(
        self,
        step: int,
        names: Iterable[str],
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer | None,
    ) -> None:
        # `load` fills existing tensors in place. So the new optimizer first makes the states of all
        # parameters. States that the checkpoint lacks are dropped: `load` would report them. Python
        # numbers among the states are loaded into tensors, and set from these at the end.
        make_states(optimizer)
        drop_states(parameters, optimizer, names)
        tensors = {**parameters, **optimizer_tensors(parameters, optimizer)}
        reader = HuggingFaceStorageReader(str(self.path(step)))
        try:
            with warnings.catch_warnings(action="ignore"):
                load(tensors, storage_reader=reader, no_dist=not self._several)
        except CheckpointException as error:
            reason = first_failure(error)
            raise CheckpointError(f"{self.path(step)} can't be read: {reason}") from error
        set_numbers(parameters, optimizer, tensors)

    # ── what processes do together ──

    def _agree(self, action: Callable[[], T]) -> list[T]:
        """Run an action in each process; an error in one is raised in all."""
        outcome: T | Exception
        try:
            outcome = action()
        except Exception as error:  # whatever it is: the others wait for this process
            outcome = error
        outcomes: list[Any] = [outcome] * self._size
        if self._several:
            dist.all_gather_object(outcomes, outcome)
        for value in outcomes:
            if isinstance(value, Exception):
                raise value
        return outcomes

    def _join(self, action: Callable[[], dict[str, T]]) -> dict[str, T]:
        """Merge the results of an action from all processes."""
        return {key: value for part in self._agree(action) for key, value in part.items()}


class SavedParameters(Mapping[str, Tensor]):
    """Parameters of a training checkpoint, read on access."""

    def __init__(self, path: Path) -> None:
        self._files = {
            name: file
            for file in sorted(path.glob("*.safetensors"))
            for name in read_header(file)
            if "/" not in name
        }

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint, with the state of its run."""
    content = read_json(path / _MANIFEST)
    kinds = {"step": int, "identity": dict, "files": dict, "state": dict}
    has_form = all(isinstance(content.get(name), kind) for name, kind in kinds.items())
    is_current = content.get("version") == _VERSION and has_form
    if is_current and all(map(is_plain_name, content["files"])):
        return content
    raise CheckpointError(
        f"{path / _MANIFEST} is damaged, or was written by another version of duoka"
    )


def _refuse_others(path: Path, stored: Mapping[str, str], forms: Mapping[str, str]) -> None:
    """Refuse a checkpoint whose parameters differ from those of all processes together."""
    problems = [
        f"{name} is {stored[name]}, not {form}"
        for name, form in forms.items()
        if stored.get(name, form) != form
    ]
    problems += [f"{name} is missing" for name in forms if name not in stored]
    problems += [f"{name} doesn't belong to the run" for name in stored if name not in forms]
    if problems:
        raise CheckpointError(
            f"{path} doesn't match the tensors of the run: {'; '.join(problems[:4])}"
            + (f" and {len(problems) - 4} more" if len(problems) > 4 else "")
        )


def _digest_of(file: Path) -> str:
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _form(tensor: Tensor | TensorInfo) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape or ())}"
