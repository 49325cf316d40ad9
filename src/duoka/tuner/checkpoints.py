"""Training checkpoints, from which a run is resumed, also on other GPUs.

Every process passes its trained parameters and their optimizer states. They are stored by the
parameters' names, so a run can be resumed with another number of GPUs, stages or replicas. Tensors
are written by `torch.distributed.checkpoint` as safetensors, because its own metadata would be a
pickle. Everything else is in a JSON manifest, with a hash of each tensor file. A directory gets its
final name once all of its content is on the disk.

This module doesn't know the devices of tensors, nor the meaning of the run's other `state`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
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
_HINT = (
    "free disk space, get the permission, or use another directory; earlier checkpoints are intact"
)
_MANIFEST = "checkpoint.json"
_VERSION = 1
_NAME = re.compile(r"step-(\d{6,12})")
_PARTIAL = ".step-*.partial"
_BEST = "best"
# Size of a tensor file; up to twice as much host memory is needed while a file is written.
_FILE_BYTES = 2**30


def checkpoint_steps(directory: Path) -> list[int]:
    """Return the steps with a checkpoint in a directory, oldest first; they may be damaged."""
    if not directory.is_dir():
        return []
    names = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(name[1]) for name in names if name)


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the path of a step's checkpoint in a directory."""
    return directory / f"step-{step:06d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The checkpoint from which a run was resumed: its step, and the `state` given to `save`.

    `refused` has the reasons why newer checkpoints were skipped, newest first.
    """

    path: Path
    step: int
    state: dict[str, Any]
    refused: tuple[str, ...] = ()


# No process decides alone. File operations run in `_agree`: each process runs its action, the
# results are exchanged, and an error in one process is raised in all of them, so that no process
# waits for another that has failed. Saving has three steps:
#
#   1. write tensors and optimizer states to a hidden directory; a replicated tensor is written once
#   2. hash each file in the process that wrote it
#   3. the first process writes the manifest, flushes all to the disk and renames the directory
#
# A kill before the rename leaves a hidden directory, which the next save removes; a kill after the
# rename leaves a complete checkpoint. Older checkpoints are removed only after the rename.
class TrainingCheckpoints:
    """The training checkpoints of one run, in a directory on a disk that all processes share.

    Every process of the run creates an instance and calls its methods in step with the others;
    without `torch.distributed` there is one process. An error in one process is raised in all.
    `identity` has values, by name, that must be equal when the run is resumed: the fingerprints of
    model and data, and the method. The `keep` newest checkpoints are kept, and the best one.
    """

    def __init__(self, directory: Path, identity: Mapping[str, str], *, keep: int = 2) -> None:
        self._directory = directory.resolve()
        self._identity = dict(identity)
        self._keep = keep
        self._several = dist.is_initialized()
        self._rank = dist.get_rank() if self._several else 0
        self._size = dist.get_world_size() if self._several else 1
        self._newest: int | None = None
        self._best: int | None = None

    # ── saving ──

    def save(
        self,
        step: int,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer | None,
        state: Mapping[str, Any],
    ) -> Path:
        """Save the run after `step` steps; return the directory of the checkpoint.

        Each process passes its trained parameters, by their names in the model, and its optimizer;
        replicas pass equal values. `state` is everything else, as JSON; the first process's is
        saved. A crash at any time leaves the previous checkpoint intact. Checkpoints older than the
        `keep` newest are removed, but not the best one, and those of later steps, which belong to
        an abandoned course of the run.
        """
        path = checkpoint_path(self._directory, step)
        if step == self._newest:
            return path
        with name_write_errors(f"the training checkpoint {path}", _HINT), ExitStack() as directory:
            partial = self._agree(lambda: self._begin(path, directory))[0]
            assert partial is not None
            self._write(partial, {**parameters, **optimizer_tensors(parameters, optimizer)})
            # Each process hashes the tensor files that it wrote; all get the hashes of all files.
            paths = partial.glob(f"shard-{self._rank + 1:05}-*")
            files = self._merge(lambda: {path.name: _digest_of(path) for path in paths})
            manifest = {"version": _VERSION, "step": step, "identity": self._identity}
            manifest |= {"files": files, "state": state}
            self._agree(lambda: self._finish(manifest, partial, directory))
        self._newest = step
        return path

    def _begin(self, path: Path, directory: ExitStack) -> Path | None:
        """Create the hidden directory in the first process; return None in the others."""
        if self._rank != 0:
            return None
        for leftover in self._directory.glob(_PARTIAL):
            shutil.rmtree(leftover, ignore_errors=True)
        return directory.enter_context(whole_directory(path))

    def _write(self, partial: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors of all processes into safetensors files of about `_FILE_BYTES`."""
        # Every process assigns tensors to files in the same way, from the sizes of all tensors:
        # three tensors of 0.6 GiB end at 0.6, 1.2 and 1.8 GiB, so they go to the files 1, 2 and 2.
        sizes = self._merge(lambda: {name: value.nbytes for name, value in tensors.items()})
        ends = accumulate(sizes.values())
        file_of = {name: 1 + end // _FILE_BYTES for name, end in zip(sizes, ends, strict=True)}
        writer = HuggingFaceStorageWriter(
            str(partial), fqn_to_index_mapping=file_of, save_distributed=True
        )
        # Copying ahead needs CUDA streams, which virtual GPUs don't have.
        writer.per_thread_copy_ahead = 0
        with warnings.catch_warnings(action="ignore"):  # a warning that there is only one process
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
        # A checkpoint of this step that was refused on resuming may still exist.
        shutil.rmtree(checkpoint_path(self._directory, step), ignore_errors=True)
        directory.close()
        self._remove_all_but(step)

    def _remove_all_but(self, newest: int) -> None:
        """Remove all checkpoints but the best one and the newest up to that of step `newest`."""
        steps = checkpoint_steps(self._directory)
        current = [step for step in steps if step <= newest][-self._keep :]
        for step in {*steps} - {*current, self._best}:
            shutil.rmtree(checkpoint_path(self._directory, step), ignore_errors=True)

    def keep_best(self, step: int | None) -> None:
        """Keep the checkpoint of a step as the best one, and name it ``best``; None is none.

        Called in the first process, for the newest checkpoint or an earlier one.
        """
        if step != self._best and self._newest is not None:
            self._best = step
            self._remove_all_but(self._newest)
        link = self._directory / _BEST
        with suppress(OSError):  # some file systems have no links; the run says its step, too
            link.unlink(missing_ok=True)
            if step is not None:
                link.symlink_to(checkpoint_path(self._directory, step).name)

    # ── resuming ──

    def resume(
        self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None
    ) -> Resumed | None:
        """Load the newest valid checkpoint; return None if there are no checkpoints.

        All processes together must have the saved parameters, in any distribution; the optimizer
        must be new. Raises CheckpointError, with nothing changed, if all checkpoints are damaged or
        belong to another run.
        """
        refused: list[str] = []
        for step in reversed(self._agree(lambda: checkpoint_steps(self._directory))[0]):
            try:
                state, names = self._verify(step, parameters)
            except CheckpointError as error:
                refused.append(str(error))
                continue
            self._read(step, names, parameters, optimizer)
            self._newest = step
            path = checkpoint_path(self._directory, step)
            return Resumed(path=path, step=step, state=state, refused=tuple(refused))
        if refused:
            raise CheckpointError(
                f"no training checkpoint in {self._directory} can be resumed from: "
                f"{'; '.join(refused)}",
                hint="start a new run in another directory, or use the original model, data and "
                "method",
            )
        return None

    def _verify(
        self, step: int, parameters: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], list[str]]:
        """Verify a checkpoint; return the run's state and the names of the stored tensors.

        Raises CheckpointError if the checkpoint is damaged, or belongs to another run.
        """
        path = checkpoint_path(self._directory, step)
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
        stored = self._merge(lambda: self._verify_share(path, manifest["files"]))
        forms = self._merge(lambda: {name: _form_of(value) for name, value in parameters.items()})
        _refuse_mismatch(path, {n: _form_of(t) for n, t in stored.items() if "/" not in n}, forms)
        return manifest["state"], list(stored)

    def _verify_share(self, path: Path, digests: Mapping[str, str]) -> dict[str, TensorInfo]:
        """Verify the hashes of this process's share of the files; return their tensors' headers."""
        names = sorted(digests)[self._rank :: self._size]
        _verify_files(path, {name: digests[name] for name in names})
        return {tensor: it for name in names for tensor, it in read_header(path / name).items()}

    def _read(
        self,
        step: int,
        names: Iterable[str],
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer | None,
    ) -> None:
        """Load parameters and optimizer states of a verified checkpoint in place."""
        # `load` fills existing tensors in place. So the new optimizer first creates the states of
        # all parameters. States that the checkpoint lacks are dropped: `load` would fail for them.
        # States that are Python numbers are loaded into tensors, and set from these at the end.
        make_states(optimizer)
        drop_states(parameters, optimizer, names)
        tensors = {**parameters, **optimizer_tensors(parameters, optimizer)}
        path = checkpoint_path(self._directory, step)
        reader = HuggingFaceStorageReader(str(path))
        try:
            with warnings.catch_warnings(action="ignore"):
                load(tensors, storage_reader=reader, no_dist=not self._several)
        except CheckpointException as error:
            reason = first_failure(error)
            raise CheckpointError(f"{path} can't be read: {reason}") from error
        set_numbers(parameters, optimizer, tensors)

    # ── collective operations ──

    def _agree(self, action: Callable[[], T]) -> list[T]:
        """Run an action in each process; return the results of all, by rank.

        An error in one process is raised in all of them.
        """
        outcome: T | Exception
        try:
            outcome = action()
        except Exception as error:  # any error: the other processes wait for this one
            outcome = error
        outcomes: list[Any] = [outcome] * self._size
        if self._several:
            dist.all_gather_object(outcomes, outcome)
        for value in outcomes:
            if isinstance(value, Exception):
                raise value
        return outcomes

    def _merge(self, action: Callable[[], dict[str, T]]) -> dict[str, T]:
        """Run an action in each process; return the union of the dicts of all."""
        return {key: value for part in self._agree(action) for key, value in part.items()}


class SavedParameters(Mapping[str, Tensor]):
    """The parameters of a training checkpoint, without optimizer states; read on access.

    Raises CheckpointError if a file of the checkpoint has changed since it was written.
    """

    def __init__(self, path: Path) -> None:
        _verify_files(path, _read_manifest(path)["files"])
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
    """Read and check the manifest of a checkpoint."""
    content = read_json(path / _MANIFEST)
    kinds = {"step": int, "identity": dict, "files": dict, "state": dict}
    has_form = all(isinstance(content.get(name), kind) for name, kind in kinds.items())
    is_current = content.get("version") == _VERSION and has_form
    if is_current and all(map(is_plain_name, content["files"])):
        return content
    raise CheckpointError(
        f"{path / _MANIFEST} is damaged, or was written by another version of duoka"
    )


def _verify_files(path: Path, digests: Mapping[str, str]) -> None:
    """Raise CheckpointError if the files of a checkpoint don't have these hashes."""
    for name, digest in digests.items():
        with reading(path / name):
            if _digest_of(path / name) != digest:
                raise CheckpointError(f"{path / name} has changed since it was written")


def _refuse_mismatch(path: Path, stored: Mapping[str, str], forms: Mapping[str, str]) -> None:
    """Raise CheckpointError if stored parameters differ from the run's in name, dtype or shape."""
    problems = [
        f"{name} is {stored.get(name, 'missing')}, not {forms.get(name, 'in the run')}"
        for name in {**forms, **stored}
        if stored.get(name) != forms.get(name)
    ]
    if problems:
        text = f"{path} doesn't match the tensors of the run: {'; '.join(problems[:4])}"
        raise CheckpointError(text + (f" and {len(problems) - 4} more" if problems[4:] else ""))


def _digest_of(file: Path) -> str:
    """Return the SHA-256 hash of a file."""
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _form_of(tensor: Tensor | TensorInfo) -> str:
    """Describe dtype and shape, such as "float32 [8, 64]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape or ())}"
