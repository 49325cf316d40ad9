"""Checks of faulty models and their repairs: `structure.txt`, `texts.txt` and `patches.txt`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import seeded

import duoka
from duoka.report.terminal import render_plain, render_report

from . import records

WIDTH = 96
NAMES = (
    "clean_attention_backends",
    "clean_copies_across",
    "clean_factories_with_device",
    "clean_numpy_round_trip",
    "clean_sparse_gradients",
    "fault_accumulate",
    "fault_add_method",
    "fault_alibi_baddbmm",
    "fault_alibi_in_subclass",
    "fault_both_directions",
    "fault_checkpoint_closure",
    "fault_checkpoint_reentrant",
    "fault_compiled_block",
    "fault_comprehension",
    "fault_context_manager",
    "fault_decorated_residual",
    "fault_distribution",
    "fault_eye_graph",
    "fault_full_additive_mask",
    "fault_function_backward",
    "fault_function_forward",
    "fault_function_gradient_device",
    "fault_hard_cuda_method",
    "fault_hard_device_string",
    "fault_helper_in_another_file",
    "fault_index_copy_cache",
    "fault_loss_auxiliary_sum",
    "fault_loss_class_weights",
    "fault_loss_labels",
    "fault_loss_module",
    "fault_map_mul",
    "fault_multiline_cat",
    "fault_only_on_cuda",
    "fault_parameter_of_another_stage",
    "fault_partial_loss",
    "fault_reduce_add",
    "fault_scripted_rotary",
    "fault_splice_boolean_setitem",
    "fault_stack_layer_outputs",
    "fault_table_cached_on_first_use",
    "fault_table_list",
    "fault_table_lru_cache",
    "fault_tensor_hook",
    "fault_tied_linear",
    "fault_tril_mask",
    "fault_two_on_one_line",
    "fault_unet_skip_add",
    "warning_cuda_call_right_here",
    "warning_explicit_pipeline",
    "warning_hard_device_right_here",
    "warning_hard_spellings",
)


def write(made: Path) -> None:
    """Check and repair."""
    structures, texts, patches = {}, {}, {}
    for name in filter(records.is_wanted, NAMES):
        structures[name], texts[name], patches[name] = checked(seeded.path(name))
    records.write(made / "structure.txt", structures)
    records.write(made / "texts.txt", texts)
    records.write(made / "patches.txt", patches)


def checked(path: Path) -> tuple[str, str, str]:
    """A report's numbers and its text, and the repair."""
    case = seeded.load(path)
    os.chdir(path.parent)
    report = duoka.check(case.build(), case.placement, inputs=case.inputs(), train=case.train)
    content = json.loads(records.normalised(report.to_json(), cases=path.parent))
    del content["seconds"]
    shown = records.normalised(render_plain(render_report(report), WIDTH), cases=path.parent)
    repairs = duoka.repair(report)
    lines = []
    for patch in repairs:
        lines.append(f"proved {patch.proved} {patch.reason}\n{patch.diff}")
        lines += [f"cure {cure.source} {cure.step_bytes}" for cure in patch.cures]
    lines += [
        f"uncured {Path(at.file).name}:{at.line} {at.op}: {why}" for at, why in repairs.uncured
    ]
    return described(content), shown, records.normalised("\n".join(lines), cases=path.parent)


def described(content: dict[str, Any]) -> str:
    """A report in lines."""
    lines = []
    for key, value in content.items():
        if key in ("faults", "warnings"):
            lines += [f"{key} {_fault(fault)}" for fault in value]
        elif isinstance(value, list | dict):
            lines.append(f"{key}: {len(value)} {records.digest(value)}")
        else:
            lines.append(f"{key}: {value}")
    return "\n".join([*lines, f"report {records.digest(content)}"])


def _fault(fault: dict[str, Any]) -> str:
    rest = {name: value for name, value in fault.items() if not isinstance(value, list | dict)}
    place = fault["place"]
    met = [f"{name}={len(value)}" for name, value in fault.items() if isinstance(value, list)]
    said = [f"{name}={value}" for name, value in rest.items() if name not in ("message", "text")]
    return f"{Path(place['file']).name}:{place['line']} {' '.join([*said, *met])}"
