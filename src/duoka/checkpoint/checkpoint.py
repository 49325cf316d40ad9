"""Checkpoint: config, tensors, tokenizer files and code of a published model.

``config.json``, ``generation_config.json``, headers of safetensors files and indices of sharded
checkpoints are read as untrusted input (`headers`), from a directory or the Hub (`directory`,
`hub`). A ``pytorch_model.bin`` is a pickle and isn't opened: its tensors are known only if an index
lists them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from duoka.base.files import Stamp, read_bytes
from duoka.errors import CheckpointError, UsageError

from . import config as configs
from .architecture import CHATGLM
from .directory import CHAT_TEMPLATES, Folder, LocalFolder, Progress
from .headers import UNREADABLE, TensorInfo, read_json, reading
from .index import NO_WEIGHTS, Weights, find_weights, stamps_of

_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_IMAGES_CONFIG, _PROCESSOR_CONFIG = "preprocessor_config.json", "processor_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_MAX_CODE_BYTES = 4 * 2**20
_MAX_SMALL_BYTES = 256 * 2**20  # the largest published tokenizers have some 40 MB
# Files that may belong to a tokenizer, by their endings; larger ones than above are not downloaded.
_TOKENIZER = re.compile(
    rf"[^/]+\.(json|model|txt|jinja|tiktoken|vocab)|{CHAT_TEMPLATES}/[^/]+\.jinja"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFile:
    """A file of the checkpoint's own code; the hashed `content` is run, not the file again."""

    name: str
    sha256: str
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A published model, opened by `open`.

    Parameters
    ----------
    path : Path
        The directory, or the config alone. For a model from the Hub or ModelScope, its directory in
        the client's cache, where files may still be missing.
    source : str
        Argument of `open` that opens this checkpoint again: the path, "org/name@commit", or
        "modelscope:org/name@revision".
    config : dict
        Content of ``config.json``.
    generation_config : dict or None
        Content of ``generation_config.json``.
    images_config : dict
        Content of ``preprocessor_config.json``, or else of the section "image_processor" of
        ``processor_config.json``; empty if there is neither.
    tensors : mapping of str to TensorInfo, or None
        The tensors by name. None if no file lists them: a config alone, or a single ``.bin`` file.
    files : tuple of Path
        The files with weights, sorted by name.
    format : {"none", "safetensors", "bin"}
        Format of the files with weights; "none" if there are none.
    fingerprint : str
        Hash of config, tensor names, shapes and dtypes, files, and trusted code. It depends neither
        on the location nor on the tensors' values. `differences` compares two fingerprints.
    trust_remote_code : bool
        True if the checkpoint's own code may run: that of its model and tokenizer.
    code : tuple of CodeFile
        The checkpoint's own code; empty if it may not run, or if the model and tokenizer need none.
    untrusted_code : tuple of str
        Names of the files with model code, if the code may not run.
    stamps : mapping of Path to Stamp
        Stamps (size, time, inode) of the files with weights that are on this machine; a reader
        compares them to detect a change.
    folder : Folder, optional
        The directory or repository with the files; `fetch` downloads from it.
    """

    path: Path
    source: str
    config: dict[str, Any]
    generation_config: dict[str, Any] | None = None
    tensors: Mapping[str, TensorInfo] | None = None
    files: tuple[Path, ...] = ()
    format: Literal["safetensors", "bin", "none"] = "none"
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
        """Open a checkpoint; no weight is read or downloaded.

        Parameters
        ----------
        path : path or str
            A directory with ``config.json``; weights and indices are optional. Or a config
            alone, a file with any name that ends in ``.json``; files beside it are ignored. Or,
            if the path does not exist, a model on the Hub: "org/name" or "org/name@revision"; or
            on ModelScope: "modelscope:org/name" or "modelscope:org/name@revision".
        revision : str, optional
            Branch, tag or commit of a model on the Hub (by default "main") or on ModelScope
            (by default "master").
        trust_remote_code : bool
            Let model code that comes with the checkpoint run when the model is built.

        Raises
        ------
        CheckpointError
            If the checkpoint does not exist, is incomplete or damaged, or can't be downloaded.
        """
        root = _local(path)
        if root is not None and revision is not None:
            raise UsageError(
                f"{root} is a local directory, which has no revision {revision!r}",
                hint="--revision applies to models on the Hub and on ModelScope",
            )
        if root is not None and root.is_file():
            return cls._of_config(root, trust_remote_code=trust_remote_code)
        folder = LocalFolder(root) if root is not None else _remote(str(path), revision)
        return cls._of(folder, trust_remote_code=trust_remote_code)

    @classmethod
    def _of_config(cls, path: Path, *, trust_remote_code: bool) -> Checkpoint:
        """Open a config alone, without tensors, tokenizer and code."""
        config = read_json(path, most_bytes=configs.MAX_CONFIG_BYTES)
        configs.check_config(config, num_tensors=None, source=str(path))
        return cls(
            path=path,
            source=str(path),
            config=config,
            fingerprint=_fingerprint(config, (), NO_WEIGHTS),
            trust_remote_code=trust_remote_code,
        )

    @classmethod
    def _of(cls, folder: Folder, *, trust_remote_code: bool) -> Checkpoint:
        """Open the checkpoint in a folder, on this machine or on the Hub."""
        names = folder.names()
        if _CONFIG not in names:
            hint = "give the directory that contains config.json"
            raise CheckpointError(f"{folder.source} has no {_CONFIG}", hint=hint)
        config = _read_config(folder, _CONFIG) or {}
        weights = find_weights(folder)
        num_tensors = None if weights.tensors is None else len(weights.tensors)
        where = str(folder.path / _CONFIG)
        configs.check_config(config, num_tensors=num_tensors, source=where)
        model_code = _model_code(config)
        is_run = trust_remote_code and (model_code or _tokenizer_class(folder, config))
        code = _read_code(folder) if is_run else ()
        images_config = _images_config(folder)
        return cls(
            path=folder.path,
            source=folder.source,
            config=config,
            generation_config=_read_config(folder, _GENERATION_CONFIG),
            tensors=weights.tensors,
            files=tuple(folder.path / name for name in weights.sizes),
            format=weights.format,
            fingerprint=_fingerprint(config, code, weights, images_config),
            images_config=images_config,
            trust_remote_code=trust_remote_code,
            code=code,
            untrusted_code=() if trust_remote_code else _untrusted_code(names, model_code),
            stamps=stamps_of(folder, weights),
            folder=folder,
        )

    @property
    def name(self) -> str:
        """Short name for messages: the directory's or file's name, or "org/name"."""
        remote = self.source != str(self.path)
        repository = self.source.partition("@")[0].rpartition(":")[2]
        return repository if remote else self.path.name

    @property
    def has_weights(self) -> bool:
        """True if the checkpoint has files with weights, downloaded or not."""
        return self.format != "none"

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the files that `fetch` has still to download."""
        return () if self.folder is None else self.folder.missing(self._needed())

    def fetch(self, progress: Progress | None = None) -> Checkpoint:
        """Download and verify the files needed for loading.

        Parameters
        ----------
        progress : callable, optional
            Called with the bytes done so far and the total bytes.

        Returns
        -------
        Checkpoint
            The same checkpoint, with all files needed for loading on this machine.

        Raises
        ------
        CheckpointError
            If a file can't be downloaded, or is damaged; no partial file is left in its place.
        MachineError
            If the disk has too little free space.
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
        """Return the names of the files needed for loading: tokenizer files and weights."""
        assert self.folder is not None
        return [*self._tokenizer_files(), *(file.name for file in self.files)]

    def _tokenizer_files(self) -> list[str]:
        assert self.folder is not None
        names = sorted(filter(_TOKENIZER.fullmatch, self.folder.names()))
        return [name for name in names if self.folder.size(name) <= _MAX_SMALL_BYTES]

    @property
    def remote_code(self) -> tuple[tuple[str, str], ...]:
        """Name and sha256 of each file in `code`."""
        return tuple((file.name, file.sha256) for file in self.code)

    @property
    def builds_own_model(self) -> bool:
        """True if the checkpoint's own code builds the model."""
        return bool(self.code and _model_code(self.config))

    @property
    def tokenizer_class(self) -> str | None:
        """Tokenizer class of the checkpoint's own code, as "file.Class".

        None if the tokenizer is built from its files, without code of the checkpoint.
        """
        return None if self.folder is None else _tokenizer_class(self.folder, self.config)

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of all tensors as stored; None if a size is unknown."""
        if self.tensors is None:
            return None
        sizes = [tensor.nbytes for tensor in self.tensors.values()]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def default_dtype(self) -> str | None:
        """The weights' dtype, as torch names it; None if unknown.

        Taken from the config, or else the floating-point dtype of most stored bytes.
        """
        sizes: Counter[str] = Counter()
        for tensor in (self.tensors or {}).values():
            sizes[str(tensor.dtype)] += tensor.nbytes or 0
        return configs.default_dtype(self.config) or configs.commonest_dtype(sizes)

    @property
    def max_context_tokens(self) -> int | None:
        """Longest context in tokens, as stated in the config; None if not stated."""
        return configs.max_context_tokens(self.config)


# ── location ──


def _local(path: str | os.PathLike[str]) -> Path | None:
    """Return the local directory or config file; None if the path does not exist."""
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
            f"{root} is neither a directory nor a config.json",
            hint="give the directory that contains config.json and the weights; use --plan for a "
            "saved plan",
        )
    return root


def _remote(text: str, revision: str | None) -> Folder:
    """Return the folder of a model on the Hub; raise CheckpointError for a mistyped path."""
    # Imported here: a local directory doesn't need huggingface_hub.
    from .hub import open_snapshot, parse_name

    name, path = parse_name(text, revision), Path(text)
    if name is None:
        raise CheckpointError(
            f"no such directory: {text[:300]!r}, and not the name of a model on the Hub",
            hint=_did_you_mean(path)
            or 'give the directory that contains config.json, or a name such as "org/model" or '
            '"modelscope:org/model"',
        )
    if path.parent.is_dir() and revision is None and "@" not in text:
        raise CheckpointError(
            f"no such directory: {text!r}, and {str(path.parent)!r} is one",
            hint=f"{_did_you_mean(path) or f'ls {path.parent} shows its content'}; for a model on "
            f"the Hub write {name.repo}@{name.revision}",
        )
    return open_snapshot(name)


def _did_you_mean(path: Path) -> str:
    """Suggest the sibling directory nearest in name to a missing path; "" if there is none."""
    names = [item.name for item in path.parent.glob("*") if item.is_dir()]
    near = get_close_matches(path.name, names, n=1)
    return f"did you mean {str(path.with_name(near[0]))!r}?" if near else ""


def _read_config(folder: Folder, name: str) -> dict[str, Any] | None:
    """Read a JSON config of a checkpoint; None if the file does not exist."""
    if name not in folder.names():
        return None
    return read_json(folder.fetch(name), most_bytes=configs.MAX_CONFIG_BYTES)


def _images_config(folder: Folder) -> dict[str, Any]:
    """Read `Checkpoint.images_config`."""
    config = _read_config(folder, _IMAGES_CONFIG)
    if config is None:
        config = (_read_config(folder, _PROCESSOR_CONFIG) or {}).get("image_processor")
    return config if isinstance(config, dict) else {}


def _auto_map(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config's map of transformers' Auto classes to own code; empty without any."""
    auto_map = config.get("auto_map")
    return auto_map if isinstance(auto_map, dict) else {}


def _model_code(config: Mapping[str, Any]) -> set[str]:
    """Return the files of model code named by a config."""
    auto_map = _auto_map(config).items()
    return {f"{str(value).partition('.')[0]}.py" for key, value in auto_map if "Model" in key}


def _tokenizer_class(folder: Folder, config: Mapping[str, Any]) -> str | None:
    """Find `Checkpoint.tokenizer_class`; of a (slow, fast) pair the slow class comes first."""
    names = folder.names()
    if config.get("model_type") == CHATGLM and "tokenizer.model" in names:
        return None
    for place in (_read_config(folder, _TOKENIZER_CONFIG) or {}, config):
        stated = _auto_map(place).get("AutoTokenizer")
        for name in stated if isinstance(stated, list) else [stated]:
            if isinstance(name, str) and f"{name.partition('.')[0]}.py" in names:
                return name
    return None


def _untrusted_code(names: frozenset[str], model_code: set[str]) -> tuple[str, ...]:
    """Return the files with model code: named by the config, or called ``modeling*.py``."""
    by_name = {name for name in names if name.startswith("modeling") and name.endswith(".py")}
    return tuple(sorted(by_name | (names & model_code)))


def _read_code(folder: Folder) -> tuple[CodeFile, ...]:
    """Read the content of every Python file, and hash it."""
    files = []
    for name in sorted(name for name in folder.names() if name.endswith(".py")):
        path = folder.fetch(name)
        with reading(path):
            content = read_bytes(path, most_bytes=_MAX_CODE_BYTES)
        digest = hashlib.sha256(content).hexdigest()
        files.append(CodeFile(name=name, sha256=digest, content=content))
    return tuple(files)


# ── fingerprints ──

# A fingerprint is three hashes, "CONFIG-TENSORS-CODE". They cover only data that changes a plan:
# not the values of weights, not the directory, not code that may not run. Separate hashes tell in
# which part a checkpoint differs from the checkpoint of a plan.
_PARTS = ("config.json", "the names, shapes, types or files of its tensors", "its code")


def differences(first_fingerprint: str, second_fingerprint: str) -> tuple[str, ...]:
    """Name the differing parts of two fingerprints; all parts for an invalid fingerprint."""
    pairs = list(zip(first_fingerprint.split("-"), second_fingerprint.split("-"), strict=False))
    if len(pairs) != len(_PARTS):
        return _PARTS
    return tuple(part for part, (a, b) in zip(_PARTS, pairs, strict=True) if a != b)


def _fingerprint(
    config: dict[str, Any],
    code: tuple[CodeFile, ...],
    weights: Weights,
    images_config: dict[str, Any] | None = None,
) -> str:
    """Join one hash for each of `_PARTS`."""
    configured = [config, images_config] if images_config else config
    tensors = [
        (name, tensor.dtype, tensor.shape, tensor.file and tensor.file.name)
        for name, tensor in sorted((weights.tensors or {}).items())
    ]
    # Sizes distinguish pickles, whose tensors are unknown.
    stored = (weights.format, tensors, sorted(weights.sizes.items()))
    parts = (configured, stored, [(file.name, file.sha256) for file in code])
    texts = (json.dumps(part, sort_keys=True) for part in parts)
    return "-".join(hashlib.sha256(text.encode()).hexdigest()[:32] for text in texts)
