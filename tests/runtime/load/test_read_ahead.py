"""Stretches of files: each byte once, in order, in few buffers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from duoka.base.files import Stamp
from duoka.checkpoint.headers import read_header
from duoka.errors import LoadError
from duoka.models.boxes import as_slices
from duoka.runtime.load import read_ahead as reading
from duoka.runtime.load.read_ahead import read_ahead, stretches
from duoka.runtime.load.sources import Source

DTYPES = {"u": torch.uint8, "h": torch.bfloat16, "f": torch.float32, "b": torch.bool}


def sources_of(path: Path) -> list[Source]:
    stamp = Stamp.of(path.stat())
    return [
        Source(
            name=info.name,
            dtype=getattr(torch, str(info.dtype)),
            shape=info.shape or (),
            file=path,
            stamp=stamp,
            offset=info.offset,
        )
        for info in read_header(path).values()
    ]


def write(path: Path, shapes: dict[str, tuple[int, ...]], kinds: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {
        name: torch.randint(0, 2, shape).to(DTYPES[kind])
        for (name, shape), kind in zip(shapes.items(), kinds, strict=True)
    }
    save_file(tensors, path)
    return tensors


@settings(max_examples=examples(40), deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=4).map(tuple), min_size=1, max_size=6),
    kinds=st.text("uhfb", min_size=6, max_size=6),
    most=st.sampled_from([4, 16, 60, 10_000]),
)
def test_all_parts_together_are_the_tensors(
    shapes: list[tuple[int, ...]],
    kinds: str,
    most: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("parts") / "model.safetensors"
    named = {f"t{index}": shape for index, shape in enumerate(shapes)}
    tensors = write(path, named, kinds[: len(named)])
    found = {name: torch.full_like(tensor, 3) for name, tensor in tensors.items()}
    order = stretches(sources_of(path), most)
    assert all(stretch.num_bytes <= max(most, 4) for stretch in order)
    assert sum(stretch.num_bytes for stretch in order) == sum(t.nbytes for t in tensors.values())
    for stretch, buffer in zip(order, read_ahead(order, pinned=False), strict=True):
        found[stretch.source.name][as_slices(stretch.box)] = buffer.tensor()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


def test_no_more_buffers_than_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = torch.empty

    def counted(*arguments: int, **options: object) -> torch.Tensor:
        made.append(arguments[0])
        return real(*arguments, **options)  # type: ignore[call-overload, no-any-return]

    path = tmp_path / "model.safetensors"
    write(path, {"a": (64, 64)}, "f")
    monkeypatch.setattr(reading.torch, "empty", counted)
    assert sum(1 for _ in read_ahead(stretches(sources_of(path), 512), pinned=False)) == 32
    assert made == [512] * 6


def test_what_is_cut_off_is_told(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, {"a": (64, 64)}, "f")
    order = stretches([*sources_of(path)], 512)
    with path.open("r+b") as opened:
        opened.truncate(4096)
    with pytest.raises(LoadError, match=r"has changed .* has 4096"):
        list(read_ahead(order, pinned=False))
    unstamped = [replace(stretch, source=replace(stretch.source, stamp=None)) for stretch in order]
    with pytest.raises(LoadError, match="is truncated"):
        list(read_ahead(unstamped, pinned=False))
