"""Checkpoint: what a published model says about itself, without its weights.

Read are ``config.json``, ``generation_config.json``, the headers of safetensors files and the
indices of sharded ones. A 2023-style ``pytorch_model.bin`` is a pickle: it isn't opened here, so
the names in it are known only when an index lists them. Everything is parsed as if an attacker
wrote it (`headers`), wherever it lies (`folders`, `hub`). Nothing here knows torch, or what a model
does with its tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from duoka.base.files import Stamp, read_bytes
from duoka.errors import CheckpointError, UsageError

from . import config as configs
from .architecture import CHATGLM
from .directory import CHAT_TEMPLATES, Folder, LocalFolder, Progress
from .headers import UNREADABLE, TensorInfo, read_json
from .index import NO_WEIGHTS, Weights, find_weights, stamps_of

_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_IMAGES_CONFIG, _PROCESSOR_CONFIG = "preprocessor_config.json", "processor_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_MAX_CODE_BYTES = 4 * 2**20
_MAX_SMALL_BYTES = 256 * 2**20  # the largest published tokenizers have some 40 MB
# What a tokenizer may consist of, besides the configs: everything small that isn't code.
_TOKENIZER = re.compile(
    rf"[^/]+\.(json|model|txt|jinja|tiktoken|vocab)|{CHAT_TEMPLATES}/[^/]+\.jinja"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFile:
    """One file of the model code that comes with a checkpoint, as it is hashed and as it runs."""

    name: str
    sha256: str
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A published model; made by `open`.

    Parameters
    ----------
    path : Path
        The directory, or the config alone. For a model from the Hub the directory in
        huggingface_hub's cache; not all of its files need be there yet.
    source : str
        What `open` finds this very checkpoint by: the path, or "org/name@commit".
    config : dict
        What ``config.json`` holds.
    generation_config : dict or None
        What ``generation_config.json`` holds.
    images_config : dict
        What ``preprocessor_config.json``, or the part for images of ``processor_config.json``,
        says of how images are processed; empty where nothing does.
    tensors : mapping of str to TensorInfo, or None
        By name. None when nothing says what there is: a config alone, or one ``.bin`` file.
    files : tuple of Path
        The files with weights, in the order of their names.
    format : {"safetensors", "bin", "none"}
        Of those files; "none" without any.
    fingerprint : str
        Equal for equal configs, tensors and trusted code, wherever they lie; `differences` tells
        two apart. The tensors' values don't count.
    trust_remote_code : bool
        Whether code that comes with the checkpoint may run: that of its model and tokenizer.
    code : tuple of CodeFile
        That code; empty if it may not run.
    untrusted_code : tuple of str
        The names of its files with models, if it may not run.
    stamps : mapping of Path to Stamp
        Of the files with weights that are on this machine: whoever reads them can see that they
        are still the same.
    """

    path: Path
    source: str
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tensors: Mapping[str, TensorInfo] | None
    files: tuple[Path, ...]
    format: Literal["safetensors", "bin", "none"]
    fingerprint: str
    images_config: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    code: tuple[CodeFile, ...] = ()
    untrusted_code: tuple[str, ...] = ()
    stamps: Mapping[Path, Stamp] = field(default_factory=dict, repr=False)
    folder: Folder | None = field(default=None, repr=False, compare=False)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Checkpoint:
        """Read what a checkpoint says about itself; no weight is read or downloaded.

        Parameters
        ----------
        path : path or str
            A directory with ``config.json``; weights and indices are optional. Or a config
            alone, under any name that ends in ``.json``; nothing beside it is looked at. Or, if
            there is no such path, a model on the Hub: "org/name" or "org/name@revision".
        revision : str, optional
            Which branch, tag or commit of a model on the Hub; by default "main".
        trust_remote_code : bool
            Let model code that comes with the checkpoint run when the model is built.

        Raises
        ------
        CheckpointError
            If there is no such checkpoint, it is incomplete or damaged, or can't be asked for.
        """
        root = _local(path)
        if root is not None and revision is not None:
            raise UsageError(
                f"{root} is on this machine, and has no revision {revision!r}",
                hint="a revision is for a model on the Hub",
            )
        if root is not None and root.is_file():
            return cls._of_config(root, trust_remote_code=trust_remote_code)
        folder = LocalFolder(root) if root is not None else _remote(str(path), revision)
        return cls._of(folder, trust_remote_code=trust_remote_code)

    @classmethod
    def _of_config(cls, path: Path, *, trust_remote_code: bool) -> Checkpoint:
        config = read_json(path, most_bytes=configs.MAX_CONFIG_BYTES)
        configs.check_config(config, num_tensors=None, source=str(path))
        return cls(
            path=path,
            source=str(path),
            config=config,
            generation_config=None,
            tensors=None,
            files=(),
            format="none",
            fingerprint=_fingerprint(config, (), NO_WEIGHTS),
            trust_remote_code=trust_remote_code,
        )

    @classmethod
    def _of(cls, folder: Folder, *, trust_remote_code: bool) -> Checkpoint:
        names = folder.names()
        if _CONFIG not in names:
            raise CheckpointError(
                f"{folder.source} holds no {_CONFIG}",
                hint="give the directory that holds config.json",
            )
        config = _read_config(folder, _CONFIG)
        weights = find_weights(folder)
        num_tensors = None if weights.tensors is None else len(weights.tensors)
        where = str(folder.path / _CONFIG)
        configs.check_config(config, num_tensors=num_tensors, source=where)
        model_code = _model_code(config)
        is_run = trust_remote_code and (model_code or _tokenizer_class(folder, config))
        code = _read_code(folder) if is_run else ()
        generation = _GENERATION_CONFIG in names
        images_config = _images_config(folder, names)
        return cls(
            path=folder.path,
            source=folder.source,
            config=config,
            generation_config=_read_config(folder, _GENERATION_CONFIG) if generation else None,
            tensors=weights.tensors,
            files=tuple(folder.path / name for name in weights.sizes),
            format=weights.format,
            fingerprint=_fingerprint(config, code, weights, images_config),
            images_config=images_config,
            trust_remote_code=trust_remote_code,
            code=code,
            untrusted_code=() if trust_remote_code else _brought_code(names, model_code),
            stamps=stamps_of(folder, weights),
            folder=folder,
        )

    @property
    def name(self) -> str:
        """How people call it: the directory's name, or "org/name"."""
        remote = self.source != str(self.path)
        return self.source.partition("@")[0] if remote else self.path.name

    @property
    def has_weights(self) -> bool:
        """True if the checkpoint has weights, here or still on the Hub."""
        return self.format != "none"

    @property
    def missing(self) -> tuple[str, ...]:
        """The files that `fetch` has yet to download, before the checkpoint can be loaded."""
        return () if self.folder is None else self.folder.missing(self._needed())

    def fetch(self, progress: Progress | None = None) -> Checkpoint:
        """Download what loading needs, and see to it that it is whole.

        Parameters
        ----------
        progress : callable, optional
            Called with the bytes done so far and the bytes there are.

        Returns
        -------
        Checkpoint
            The same one, with all its files on this machine.

        Raises
        ------
        CheckpointError
            If a file can't be had, or isn't what it should be; nothing half is left in its place.
        MachineError
            If there is no room for them.
        """
        if self.folder is None:
            return self
        missing = self.missing
        self.folder.download(self._needed(), progress)
        if not missing:
            return self
        return Checkpoint.open(self.source, trust_remote_code=self.trust_remote_code)

    def fetch_tokenizer(self) -> None:
        """Download the files of the tokenizer alone."""
        if self.folder is not None:
            for name in self._tokenizer_files():
                self.folder.fetch(name)

    def _needed(self) -> list[str]:
        assert self.folder is not None
        return [*self._tokenizer_files(), *(file.name for file in self.files)]

    def _tokenizer_files(self) -> list[str]:
        assert self.folder is not None
        names = sorted(filter(_TOKENIZER.fullmatch, self.folder.names()))
        return [name for name in names if self.folder.size(name) <= _MAX_SMALL_BYTES]

    @property
    def remote_code(self) -> tuple[tuple[str, str], ...]:
        """Name and sha256 of each file of the checkpoint's own code that may run."""
        return tuple((file.name, file.sha256) for file in self.code)

    @property
    def builds_own_model(self) -> bool:
        """Whether the model that is built is that of the code which came with the checkpoint."""
        return bool(self.code and _model_code(self.config))

    @property
    def tokenizer_class(self) -> str | None:
        """The class of the checkpoint's own code, as "file.Class", that reads its tokenizer.

        None where the tokenizer is known by its files.
        """
        return None if self.folder is None else _tokenizer_class(self.folder, self.config)

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of all tensors as stored; None when a tensor's size isn't known."""
        if self.tensors is None:
            return None
        sizes = [tensor.nbytes for tensor in self.tensors.values()]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def default_dtype(self) -> str | None:
        """The type that the weights are published in, by torch's name; None when unknown.

        The config's word counts; without one, the type that most of the stored bytes have.
        """
        sizes: dict[str, int] = {}
        for tensor in (self.tensors or {}).values():
            if tensor.dtype is not None:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + (tensor.nbytes or 0)
        return configs.default_dtype(self.config) or configs.commonest_dtype(sizes)

    @property
    def max_context_tokens(self) -> int | None:
        """The longest context that the config names; None when it names none."""
        return configs.max_context_tokens(self.config)


# ── where it is ──


def _local(path: str | os.PathLike[str]) -> Path | None:
    """The directory or config on this machine; None if there is none."""
    root = Path(path).expanduser()
    try:
        mode = root.stat().st_mode
    except PermissionError as error:
        raise CheckpointError(
            f"{str(path)!r} can't be read with your permissions", hint=UNREADABLE
        ) from error
    except (OSError, ValueError):
        return None
    if stat.S_ISDIR(mode):
        return root
    if not stat.S_ISREG(mode) or root.suffix != ".json":
        raise CheckpointError(
            f"{root} is neither a directory nor a config",
            hint="give the directory that holds config.json and the weights; a saved plan is given "
            "with --plan",
        )
    return root


def _remote(text: str, revision: str | None) -> Folder:
    # Here, because whoever reads a local directory doesn't need the network's libraries.
    from .hub import open_snapshot, parse_name

    name, path = parse_name(text, revision), Path(text)
    if name is None:
        raise CheckpointError(
            f"no such directory: {text[:300]!r}, and no name of a model on the Hub either",
            hint=_did_you_mean(path)
            or 'give the directory that holds config.json, or a name such as "org/model"',
        )
    if path.parent.is_dir() and revision is None and "@" not in text:
        raise CheckpointError(
            f"no such directory: {text!r}, and {str(path.parent)!r} is one",
            hint=f"{_did_you_mean(path) or f'ls {path.parent} lists what there is'}; "
            f"a model on the Hub would be {name.repo}@{name.revision}",
        )
    return open_snapshot(name)


def _did_you_mean(path: Path) -> str:
    """Ask for the directory whose name comes nearest to a path that isn't there."""
    names = [item.name for item in path.parent.glob("*") if item.is_dir()]
    near = get_close_matches(path.name, names, n=1)
    return f"did you mean {str(path.with_name(near[0]))!r}?" if near else ""


def _read_config(folder: Folder, name: str) -> dict[str, Any]:
    return read_json(folder.fetch(name), most_bytes=configs.MAX_CONFIG_BYTES)


def _images_config(folder: Folder, names: Container[str]) -> dict[str, Any]:
    if _IMAGES_CONFIG in names:
        return _read_config(folder, _IMAGES_CONFIG)
    if _PROCESSOR_CONFIG in names:
        part = _read_config(folder, _PROCESSOR_CONFIG).get("image_processor")
        return part if isinstance(part, dict) else {}
    return {}


def _auto_map(config: Mapping[str, Any]) -> Mapping[str, Any]:
    auto_map = config.get("auto_map")
    return auto_map if isinstance(auto_map, dict) else {}


def _model_code(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The files of the models that a configuration says came with it."""
    stated = _auto_map(config).items()
    files = {f"{str(value).partition('.')[0]}.py" for key, value in stated if "Model" in key}
    return tuple(sorted(files))


def _tokenizer_class(folder: Folder, config: Mapping[str, Any]) -> str | None:
    """See `Checkpoint.tokenizer_class`: of two that are named the first is plain Python."""
    names = folder.names()
    if config.get("model_type") == CHATGLM and "tokenizer.model" in names:
        return None
    settings = _read_config(folder, _TOKENIZER_CONFIG) if _TOKENIZER_CONFIG in names else {}
    for place in (settings, config):
        stated = _auto_map(place).get("AutoTokenizer")
        for name in stated if isinstance(stated, list) else [stated]:
            if isinstance(name, str) and f"{name.partition('.')[0]}.py" in names:
                return name
    return None


def _brought_code(names: frozenset[str], model_code: Iterable[str]) -> tuple[str, ...]:
    """Of the files that there are those with models: by the configuration, or by their name."""
    by_name = {name for name in names if name.startswith("modeling") and name.endswith(".py")}
    return tuple(sorted(by_name | (names & set(model_code))))


def _read_code(folder: Folder) -> tuple[CodeFile, ...]:
    """The code, read once: what is hashed is what will run."""
    files = []
    for name in sorted(name for name in folder.names() if name.endswith(".py")):
        path = folder.fetch(name)
        try:
            content = read_bytes(path, most_bytes=_MAX_CODE_BYTES)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} can't be read: {error}", hint=UNREADABLE) from error
        digest = hashlib.sha256(content).hexdigest()
        files.append(CodeFile(name=name, sha256=digest, content=content))
    return tuple(files)


# ── fingerprints ──

_PARTS = ("config.json", "the names, shapes, types or files of its tensors", "its code")


def differences(one: str, other: str) -> tuple[str, ...]:
    """Return the parts in which two fingerprints differ; all parts if one isn't a checkpoint's."""
    pairs = list(zip(one.split("-"), other.split("-"), strict=False))
    if len(pairs) != len(_PARTS):
        return _PARTS
    return tuple(part for part, (a, b) in zip(_PARTS, pairs, strict=True) if a != b)


def _fingerprint(
    config: dict[str, Any],
    code: tuple[CodeFile, ...],
    weights: Weights,
    images_config: dict[str, Any] | None = None,
) -> str:
    """One hash for each of `_PARTS`."""
    configured = [config, images_config] if images_config else config
    tensors = [
        (name, tensor.dtype, tensor.shape, tensor.file and tensor.file.name)
        for name, tensor in sorted((weights.tensors or {}).items())
    ]
    # A pickle's contents aren't read; its size is all that is known.
    sizes = sorted(weights.sizes.items())
    parts = (
        configured,
        (weights.format, tensors, sizes),
        [(file.name, file.sha256) for file in code],
    )
    return "-".join(
        hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:32] for part in parts
    )
