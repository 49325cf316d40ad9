"""Tokenizer files: whether a checkpoint has a tokenizer, and which special tokens it adds.

That is told here from the published files, because nothing here imports torch, which takes seconds.
How a text or a prompt is encoded isn't known here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from duoka.base.units import format_bytes
from duoka.errors import CheckpointError

from .checkpoint import Checkpoint
from .headers import read_json
from .vocabulary import SentencePieceModel

Generation = Literal["chatglm2", "chatglm3", "glm4"]

_CHATGLM2_SPECIAL = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM4_SPECIAL = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", *_ROLES),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
)

HINT = "its tokenizer.json or tokenizer.model belongs into the same directory"
_NAMED = re.compile(r"token|vocab|sentencepiece|spiece|merges|tekken")
_MOST_BYTES = (
    (re.compile(r"\.jinja$|^chat_template"), 2**20),
    (re.compile(r"^(tokenizer_config|special_tokens_map|added_tokens)\.json$"), 2**26),
    (_NAMED, 2**29),
)
_MOST_JSON_BYTES = 2**26


def refuse_unreadable(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint without a tokenizer, and one whose tokenizer's code can't run."""
    checkpoint.fetch_tokenizer()
    look_at_files(checkpoint.path)
    own_class(checkpoint)


# What pip calls the packages that models' code imports; any other name may be a stranger's package.
_NAMED_ALIKE = (
    *("bitsandbytes", "causal-conv1d", "einops", "flash-attn", "librosa", "mamba-ssm", "peft"),
    *("scipy", "sentencepiece", "tiktoken", "timm", "torchaudio", "torchvision", "xformers"),
)
_PUBLISHED = {"PIL": "pillow", "cv2": "opencv-python", "sklearn": "scikit-learn"}
_PUBLISHED |= {name.replace("-", "_"): name for name in _NAMED_ALIKE}


def own_class(checkpoint: Checkpoint) -> str | None:
    """The class of the checkpoint's own code that reads its tokenizer; an error if it can't."""
    name = checkpoint.tokenizer_class
    if name is None or (not checkpoint.code and (checkpoint.path / "tokenizer.json").is_file()):
        return None
    file = f"{name.partition('.')[0]}.py"
    if not checkpoint.code:
        raise CheckpointError(
            f"the tokenizer of {checkpoint.source} is code that comes with it, {file}, and that "
            "code may not run",
            hint="it runs only with --trust-remote-code (trust_remote_code=True)",
        )
    [content] = (code.content for code in checkpoint.code if code.name == file)
    files = [code.name for code in checkpoint.code]
    for package in _packages(content):
        if package not in sys.modules and find_spec(package) is None:
            raise CheckpointError(
                f"{file} of {checkpoint.source} can't run", hint=missing_module(package, files)
            )
    return name


def _packages(content: bytes) -> Iterator[str]:
    """What a module can't do without; that its text is no Python is told when it is imported."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.parse(content).body:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]
            elif isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)


def missing_module(name: str, files: Collection[str] = ()) -> str:
    """Return what to do about code that imports a module which isn't there, beside its files.

    Anybody may publish a package under the name of a module that belongs to a model.
    """
    package = name.partition(".")[0]
    if f"{package}.py" in files:
        return f"{package}.py lies beside the code: it has to say `from .{package} import …`"
    if package in _PUBLISHED:
        return f"the code needs a package that isn't there: pip install {_PUBLISHED[package]}"
    return f"the code needs {package}, which isn't installed; the model's page says what that is"


def look_at_files(directory: Path) -> None:
    """Refuse a directory without a tokenizer, and files that are far larger than any published."""
    files = directory.iterdir() if directory.is_dir() else ()
    sizes = {file.name: file.stat().st_size for file in files if file.is_file()}
    if not any(_NAMED.search(name) for name in sizes):
        raise CheckpointError(f"{directory} holds no tokenizer", hint=HINT)
    for name, size in sizes.items():
        most = next((most for pattern, most in _MOST_BYTES if pattern.search(name)), size)
        if size > most:
            got, limit = format_bytes(size), format_bytes(most)
            raise CheckpointError(f"{directory / name} has {got}; at most {limit} are read")


def special_tokens(
    directory: Path, config: Mapping[str, Any], model: SentencePieceModel | Mapping[bytes, int]
) -> list[str]:
    """The special tokens that a model of the ChatGLM family adds, in the order of their ids."""
    settings = _settings(directory / "tokenizer_config.json")
    if not isinstance(model, SentencePieceModel):
        return _glm4_special(settings, len(model))
    is_third = _sentencepiece_generation(directory, config, settings) == "chatglm3"
    return [*_CHATGLM2_SPECIAL, *(_ROLES if is_third else ())]


def _sentencepiece_generation(
    directory: Path, config: Mapping[str, Any], settings: Mapping[str, Any]
) -> Generation:
    """Tell ChatGLM2 from ChatGLM3, which adds tokens for roles to the same vocabulary.

    Surest is the tokenizer's code beside it, looked into as text; then the name under which the
    model was published; then the length in its configuration, 32K for ChatGLM2-6B.
    """
    code = directory / "tokenization_chatglm.py"
    if code.is_file():
        return "chatglm3" if b"<|user|>" in code.read_bytes() else "chatglm2"
    for name in (settings.get("name_or_path"), config.get("_name_or_path")):
        for generation in ("chatglm2", "chatglm3"):
            if isinstance(name, str) and generation in name.lower():
                return generation
    long = config.get("seq_length") == 32768 and config.get("rope_ratio", 1) in (1, 16)
    return "chatglm2" if long else "chatglm3"


def _glm4_special(settings: Mapping[str, Any], first: int) -> list[str]:
    """Return special tokens in the order of their ids, which follow the ranks without a gap."""
    listed = settings.get("added_tokens_decoder")
    if listed is None:
        return list(_GLM4_SPECIAL)
    try:
        contents = {int(number): str(token["content"]) for number, token in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError("tokenizer_config.json: added_tokens_decoder is damaged") from error
    if sorted(contents) != list(range(first, first + len(contents))):
        raise CheckpointError(
            f"tokenizer_config.json: the ids of added tokens don't count on from {first}"
        )
    return [contents[number] for number in sorted(contents)]


def _settings(path: Path) -> Mapping[str, Any]:
    """What a JSON file of a tokenizer says; nothing where there is none."""
    return read_json(path, most_bytes=_MOST_JSON_BYTES) if path.is_file() else {}
