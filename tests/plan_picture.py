"""Draw docs/plan.svg from a plan: `python tests/plan_picture.py GLM_4_9B_CHAT`.

The directory holds the config of GLM-4-9B-chat. The rows are the model's blocks in order, coloured
by GPU, and the memory of each GPU by kind.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import duoka
from duoka.forecast.stage_bytes import StageBytes

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "plan.svg"
WORKLOAD = duoka.Workload(prompt_tokens=7680, new_tokens=512)
LEFT, WIDTH, GAP = 90, 600, 1.6
WIDE, NARROW = 28.4, 11.6
STAGES, KINDS = ("#2f6fab", "#b5561f"), ("#7a4fa3", "#2d8a4e", "#afb8c1")
BLACK, GREY = "#1f2328", "#59636e"


def draw(plan: duoka.Plan) -> str:
    """Return the picture of a plan of GLM-4-9B over two GPUs, as SVG."""
    devices = first, second = plan.forecast.devices
    num_layers = 1 + max(_layers(plan, first) + _layers(plan, second))
    cut = min(_layers(plan, second))
    names = f"layers 0–{cut - 1}", f"layers {cut}–{num_layers - 1}"
    sizes = [f"{_gib(each.reserved_bytes)} of {each.budget_bytes >> 30}" for each in devices]
    spoken = " to ".join(names[0].split("–")), " to ".join(names[1].split("–"))
    label = (
        f"GLM-4-9B over two GPUs: the embedding and {spoken[0]} on {first.device}, {spoken[1]}, "
        f"norm and head on {second.device}; {' and '.join(sizes)} GiB are reserved."
    )
    budgets = " and ".join(f"{each.budget_bytes >> 30} GiB" for each in devices)
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 262" width="760" height="262" '
        'font-family="ui-sans-serif, system-ui, sans-serif" font-size="13" role="img" '
        f'aria-label="{label}">',
        '<rect width="760" height="262" rx="8" fill="#ffffff"/>',
        _text(20, 28, f"GLM-4-9B, 8192 tokens, over {budgets}", 'font-size="15" font-weight="600"'),
        *_blocks(num_layers, cut, names),
        *_memory(0, first, first.budget_bytes),
        *_memory(1, second, first.budget_bytes),
        *_legend(),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _layers(plan: duoka.Plan, stage: StageBytes) -> list[int]:
    """Return the numbers of the layers on a GPU."""
    names = [name for name, device in plan.placement.entries if device == stage.device]
    return [int(found[1]) for name in names if (found := re.search(r"\blayers\.(\d+)$", name))]


def _blocks(num_layers: int, cut: int, names: tuple[str, str]) -> Iterator[str]:
    """Draw the embedding, the layers and the head in a row, and a line at the cut."""
    yield _text(20, 67, "blocks", fill=GREY)
    left, border = float(LEFT), 0.0
    for number in range(-1, num_layers + 1):
        if number == cut:
            border = left - GAP / 2
            line = f'x1="{border:.1f}" y1="44" x2="{border:.1f}" y2="82"'
            yield f'<line {line} stroke="{BLACK}" stroke-width="1.5" stroke-dasharray="3 2"/>'
        width = NARROW if 0 <= number < num_layers else WIDE
        yield _rect(left, 50, width, 26, STAGES[number >= cut], 'rx="2"')
        left += width + GAP
    middle = 'text-anchor="middle"'
    yield _text((LEFT + border) / 2, 96, f"embedding, {names[0]}", middle, GREY)
    yield _text((border + left) / 2, 96, f"{names[1]}, norm, head", middle, GREY)


def _memory(row: int, stage: StageBytes, widest_bytes: int) -> Iterator[str]:
    """Draw the reserved memory of a GPU by kind, in a frame as wide as its budget."""
    top, scale = 118 + 64 * row, WIDTH / widest_bytes
    held = stage.weight_bytes, stage.kv_cache_bytes, stage.activation_bytes
    unused = stage.reserved_bytes - sum(held)
    yield _text(20, top + 21, stage.device, 'font-weight="600"')
    left = float(LEFT)
    for num_bytes, colour in zip((*held, unused), (STAGES[row], *KINDS), strict=True):
        yield _rect(left, top, num_bytes * scale, 32, colour)
        left += num_bytes * scale
    frame = f'rx="2" stroke="{BLACK}"'
    yield _rect(LEFT, top, stage.budget_bytes * scale, 32, "none", frame)
    yield _text(100, top + 21, f"{_gib(stage.weight_bytes)} GiB of weights", fill="#ffffff")
    size = f"{_gib(stage.reserved_bytes)} of {stage.budget_bytes >> 30} GiB"
    end = LEFT + stage.budget_bytes * scale
    yield _text(end, top + 48, size, 'text-anchor="end"')


def _legend() -> Iterator[str]:
    names = "KV cache", "activations at the peak", "reserved by the allocator, unused"
    for left, name, colour in zip((90, 178, 358), names, KINDS, strict=True):
        yield _rect(left, 226 + 14, 11, 11, colour) + _text(left + 16, 236 + 14, name, fill=GREY)


def _rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"'
    return f'<rect {place} fill="{fill}"{" " * bool(more)}{more}/>'


def _text(x: float, y: float, text: str, more: str = "", fill: str = BLACK) -> str:
    return f'<text x="{x:.1f}" y="{y}" fill="{fill}"{" " * bool(more)}{more}>{text}</text>'


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"


if __name__ == "__main__":
    PICTURE.write_text(draw(duoka.plan(sys.argv[1], "12GiB,8GiB", WORKLOAD)), encoding="utf-8")
