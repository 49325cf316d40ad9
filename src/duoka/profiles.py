"""Profiles on disk: a model is traced once for each of its versions and settings.

A cached profile answers without torch: the versions it was made with are read from the installed
packages' metadata, not from the packages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast

from . import ways
from .checkpoint import Checkpoint
from .errors import FormatError, UsageError
from .files import cache_directory, read_text, write_whole
from .given import attempt
from .planner import Question, check_context
from .plans import Plan
from .prequantized import method_of
from .profile import Profile
from .serial import from_dict, parse_json_object, to_dict
from .workload import Dtype, Workload, with_quantization

_VERSION = 6
_MOST_BYTES = 2**30
_PACKAGES = ("torch", "transformers", "duoka")


def plan_from_cache(checkpoint: Checkpoint, question: Question) -> Plan | None:
    """Plan a checkpoint with its cached profile; None when it has to be traced first.

    Raises
    ------
    InfeasibleError
        If nothing fits.
    """
    find = partial(find_profile, checkpoint.fingerprint)
    return answer_with(checkpoint, question, find, only_all=True)


def answer_with(
    checkpoint: Checkpoint,
    question: Question,
    find: Callable[[Workload], Profile | None],
    *,
    only_all: bool = False,
) -> Plan | None:
    """The plan for a checkpoint with the first quantization of its question that fits.

    Parameters
    ----------
    checkpoint : Checkpoint
    question : Question
    find : callable
        The profile for a workload; None where there is none.
    only_all : bool
        Look for no ways out where the profile for one of them is missing.

    Returns
    -------
    Plan or None
        None when a profile is missing.

    Raises
    ------
    InfeasibleError
        If nothing fits.
    """
    _refuse_offload(checkpoint, question)
    tried: list[str] = []
    workloads = with_quantization(workload_for(checkpoint, question.workload))
    for workload in workloads:
        profile = find(workload)
        if profile is None:
            return None
        resolved = replace(question, workload=workload)
        if len(workloads) > 1 and workload.quantize != "none":
            # Weights are quantized or offloaded: "auto" quantizes where offload won't do.
            resolved = replace(resolved, constraints=replace(question.constraints, offload=False))
        if workload is workloads[-1] or attempt(profile, resolved) is not None:
            plan = answer_for(checkpoint, profile, resolved, find=find, only_all=only_all)
            request = replace(
                plan.request, workload=question.workload, constraints=question.constraints
            )
            return replace(plan, request=request, why=(*_resolved(workload, tried), *plan.why))
        tried.append(workload.quantize)
    raise AssertionError("the last one is answered, or refused")


def _resolved(workload: Workload, tried: Sequence[str]) -> tuple[str, ...]:
    """Why the weights are quantized, where that was left open."""
    if not tried:
        return ()
    didnt = "unquantized" if len(tried) == 1 else "unquantized or in int8"
    return (f"The weights become {workload.quantize}: {didnt} they don't fit.",)


def answer_for(
    checkpoint: Checkpoint,
    profile: Profile,
    question: Question,
    *,
    find: Callable[[Workload], Profile | None] | None = None,
    only_all: bool = False,
) -> Plan:
    """The plan for a checkpoint; it keeps what was asked, besides what the checkpoint decided.

    Parameters
    ----------
    checkpoint : Checkpoint
    profile : Profile
    question : Question
    find : callable, optional
        The profile for another workload, for the ways out; None where there is none. By default
        the cached ones.
    only_all : bool
        As for `answer_with`.

    Raises
    ------
    PlacementError, InfeasibleError, UsageError
        As `answer` does.
    """
    workload = workload_for(checkpoint, question.workload)
    find = find or partial(find_profile, checkpoint.fingerprint)
    plan = ways.answer(
        profile,
        replace(question, workload=workload),
        source=checkpoint.source,
        profile_for=lambda other: find(workload_for(checkpoint, other)),
        only_all=only_all,
    )
    return replace(plan, request=replace(plan.request, workload=question.workload))


def workload_for(checkpoint: Checkpoint, workload: Workload) -> Workload:
    """The workload with what the checkpoint decides: its dtype, and whether it reads in chunks.

    Raises
    ------
    UsageError
        If the model wasn't made for such a context: said before anything is traced.
    """
    check_context(workload, checkpoint.max_context_tokens, checkpoint.name)
    workload = _unquantized(checkpoint, workload)
    workload = whole_prompt(
        workload, is_encoder=bool(checkpoint.config.get("is_encoder_decoder", False))
    )
    return workload.resolved(dtype=cast(Dtype, checkpoint.default_dtype or "float32"))


def _unquantized(checkpoint: Checkpoint, workload: Workload) -> Workload:
    """The workload of a checkpoint that is quantized already: nothing is left to quantize."""
    method = method_of(checkpoint.config)
    if method is None:
        return workload
    if workload.quantize not in ("none", "auto"):
        raise UsageError(
            f"{checkpoint.name} is quantized already ({method.name}); it can't become "
            f"{workload.quantize}",
            hint="leave quantize out, or take the 16-bit checkpoint",
        )
    own = checkpoint.default_dtype or "float32"
    if workload.dtype not in ("auto", own):
        raise UsageError(
            f"{checkpoint.name} is quantized already ({method.name}) for {own}; it can't compute "
            f"in {workload.dtype}",
            hint="leave the dtype out, or take the 16-bit checkpoint",
        )
    return replace(workload, quantize="none")


def _refuse_offload(checkpoint: Checkpoint, question: Question) -> None:
    """Refuse to keep weights on the host that packages load where they compute."""
    method = method_of(checkpoint.config)
    if method is not None and question.constraints.offload:
        raise UsageError(
            f"{checkpoint.name} is quantized already ({method.name}); such weights can't lie in "
            "the host's memory",
            hint="leave out the offload, or take the 16-bit checkpoint",
        )


def whole_prompt(workload: Workload, *, is_encoder: bool) -> Workload:
    """The workload without chunks for an encoder, which can't read its prompt in such.

    Nor can a prompt with images: transformers refuses to cut it.

    Raises
    ------
    UsageError
        If a chunk was asked for.
    """
    if not is_encoder and not workload.images:
        return workload
    if isinstance(workload.prefill_chunk_tokens, int):
        what = (
            "an encoder can't read its prompt" if is_encoder else "a prompt with images can't run"
        )
        raise UsageError(
            f"{what} in chunks of {workload.prefill_chunk_tokens}",
            hint="leave the chunk out",
        )
    return replace(workload, prefill_chunk_tokens=None)


def find_profile(fingerprint: str, workload: Workload) -> Profile | None:
    """The cached profile of a checkpoint; None when there is none that can be read.

    Parameters
    ----------
    fingerprint : str
        Of the checkpoint.
    workload : Workload
        With its dtype resolved. A profile for all workloads is looked for first, then one that
        was traced for this one alone.
    """
    for key in (_key(fingerprint, workload), _key(fingerprint, workload, alone=True)):
        try:
            text = read_text(_path(key), most_bytes=_MOST_BYTES)
            digest, _, told = text.partition("\n")
            # A number that a bad disk changed is as good a number as any other.
            if digest != _digest(told):
                continue
            found = from_dict(Profile, parse_json_object(told, "the profile"))
            if found.answers(workload.batch):
                return found
        except (OSError, ValueError, FormatError):
            continue
    return None


def keep_profile(profile: Profile, workload: Workload, *, alone: bool = False) -> None:
    """Keep a profile: for all workloads under the same conditions, or for this one alone.

    That it can't be kept is no reason to fail.
    """
    path = _path(_key(profile.fingerprint, workload, alone=alone))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        told = json.dumps(to_dict(profile))
        write_whole(path, f"{_digest(told)}\n{told}")
    except OSError:
        return


def _key(fingerprint: str, workload: Workload, *, alone: bool = False) -> str:
    """What a profile depends on, as the name of a file."""
    parts = {
        "format": _VERSION,
        "fingerprint": fingerprint,
        "dtype": workload.dtype,
        "conditions": to_dict(workload.conditions),
        "workload": to_dict(workload) if alone else None,
        **{name: _version(name) for name in _PACKAGES},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _path(key: str) -> Path:
    return cache_directory() / "profiles" / f"{key}.json"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
