"""Tokenizer files: presence of a tokenizer, its own code, and special tokens.

Determined from the published files, without importing torch, which takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from duoka.base.units import format_bytes
from duoka.errors import CheckpointError

from .checkpoint import Checkpoint
from .headers import read_json
from .vocabulary import SentencePieceModel

_CHATGLM2_SPECIAL = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM4_SPECIAL = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", *_ROLES),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
)

HINT = "add its tokenizer.json or tokenizer.model to the directory"
_NAMED = re.compile(r"token|vocab|sentencepiece|spiece|merges|tekken")
_MOST_BYTES = ((re.compile(r"\.jinja$|^chat_template"), 2**20), (_NAMED, 2**29))
_MOST_JSON_BYTES = 2**26


def refuse_unreadable(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint without a tokenizer, or with tokenizer code that can't run."""
    checkpoint.fetch_tokenizer()
    check_files(checkpoint.path)
    own_class(checkpoint)


# pip's names of packages that model code imports. Only these are named in an install command: a
# package of any other name may have been published by a stranger.
_NAMED_ALIKE = (
    *("bitsandbytes", "causal-conv1d", "einops", "flash-attn", "librosa", "mamba-ssm", "peft"),
    *("scipy", "sentencepiece", "tiktoken", "timm", "torchaudio", "torchvision", "xformers"),
)
_PUBLISHED = {"PIL": "pillow", "cv2": "opencv-python", "sklearn": "scikit-learn"}
_PUBLISHED |= {name.replace("-", "_"): name for name in _NAMED_ALIKE}


def own_class(checkpoint: Checkpoint) -> str | None:
    """Return the tokenizer class of the checkpoint's own code; raise an error if it can't run.

    None if the tokenizer needs no code: there is none, or it may not run and tokenizer.json exists.
    """
    name = checkpoint.tokenizer_class
    if name is None or (not checkpoint.code and (checkpoint.path / "tokenizer.json").is_file()):
        return None
    file = f"{name.partition('.')[0]}.py"
    if not checkpoint.code:
        raise CheckpointError(
            f"the tokenizer of {checkpoint.source} needs the checkpoint's own code, {file}, which "
            "isn't allowed to run",
            hint="allow it with --trust-remote-code (trust_remote_code=True)",
        )
    return name


def missing_module(name: str, files: Collection[str] = ()) -> str:
    """Return the hint for an import of a module that isn't installed.

    `files` are the code files of the checkpoint. An install command names known packages only.
    """
    package = name.partition(".")[0]
    if f"{package}.py" in files:
        return f"{package}.py is beside the code: the code must use `from .{package} import …`"
    if package in _PUBLISHED:
        return f"install the missing package: pip install {_PUBLISHED[package]}"
    return f"the code needs {package}, which isn't installed; see the model's page"


def check_files(directory: Path) -> None:
    """Refuse a directory without tokenizer files, or with files far larger than published ones."""
    files = directory.iterdir() if directory.is_dir() else ()
    sizes = {file.name: file.stat().st_size for file in files if file.is_file()}
    if not any(_NAMED.search(name) for name in sizes):
        raise CheckpointError(f"{directory} has no tokenizer", hint=HINT)
    for name, size in sizes.items():
        most = next((limit for pattern, limit in _MOST_BYTES if pattern.search(name)), size)
        if size > most:
            got, limit = format_bytes(size), format_bytes(most)
            raise CheckpointError(f"{directory / name} has {got}; at most {limit} are read")


# ChatGLM's vocabularies lack the special tokens, whose ids follow the vocabulary's, by generation:
#
#   ChatGLM2  [MASK] [gMASK] [sMASK] sop eop
#   ChatGLM3  the same, then <|system|> <|user|> <|assistant|> <|observation|>
#   GLM-4     as listed in tokenizer_config.json, or else _GLM4_SPECIAL
def special_tokens(
    directory: Path, config: Mapping[str, Any], model: SentencePieceModel | Mapping[bytes, int]
) -> list[str]:
    """List a ChatGLM's special tokens in the order of their ids; `model` is its vocabulary."""
    path = directory / "tokenizer_config.json"
    settings = read_json(path, most_bytes=_MOST_JSON_BYTES) if path.is_file() else {}
    if not isinstance(model, SentencePieceModel):
        return _glm4_special(settings, len(model))
    return [*_CHATGLM2_SPECIAL, *(_ROLES if _is_chatglm3(directory, config, settings) else ())]


def _is_chatglm3(directory: Path, config: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Distinguish ChatGLM3 from ChatGLM2, which has the same vocabulary without role tokens.

    The most reliable sign is the text of the tokenizer's code, if present; then the model's
    published name; then the context length in its config, 32768 for ChatGLM2-6B.
    """
    code = directory / "tokenization_chatglm.py"
    if code.is_file():
        return b"<|user|>" in code.read_bytes()
    for place, key in ((settings, "name_or_path"), (config, "_name_or_path")):
        if match := re.search("chatglm[23]", str(place.get(key)).lower()):
            return match[0] == "chatglm3"
    return config.get("seq_length") != 32768 or config.get("rope_ratio", 1) not in (1, 16)


def _glm4_special(settings: Mapping[str, Any], first_id: int) -> list[str]:
    """Return GLM-4's special tokens in the order of their ids, which must follow the ranks."""
    listed = settings.get("added_tokens_decoder")
    if listed is None:
        return list(_GLM4_SPECIAL)
    try:
        contents = {int(number): str(token["content"]) for number, token in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError("tokenizer_config.json: added_tokens_decoder is damaged") from error
    if sorted(contents) != list(range(first_id, first_id + len(contents))):
        raise CheckpointError(
            f"tokenizer_config.json: the ids of added tokens are not consecutive from {first_id}"
        )
    return [contents[number] for number in sorted(contents)]
