"""Outlines to judge maps by: a small one with everything that is difficult, and ChatGLM's."""

from __future__ import annotations

from collections.abc import Sequence

from duoka.forecast.tensor_names import NamedTensor, Outline, OutlineBlock


def tensor(name: str, *published: str, num_bytes: int = 10, tied_to: str = "") -> NamedTensor:
    return NamedTensor(name=name, num_bytes=num_bytes, published=published, tied_to=tied_to)


def block(
    modules: Sequence[str], *tensors: NamedTensor, tied_to: int | None = None
) -> OutlineBlock:
    return OutlineBlock(modules=tuple(modules), tensors=tensors, tied_to=tied_to)


def layer(number: int) -> OutlineBlock:
    """A fused tensor that is split, one of the same name, and one that is stacked of two."""
    own, theirs = f"m.layers.{number}", f"p.enc.{number}"
    return block(
        [own],
        tensor(f"{own}.attn.q.weight", f"{theirs}.qkv.weight", num_bytes=40),
        tensor(f"{own}.attn.k.weight", f"{theirs}.qkv.weight", num_bytes=8),
        tensor(f"{own}.norm.weight", f"{theirs}.n.weight", num_bytes=1),
        tensor(f"{own}.experts", f"{theirs}.x.0.weight", f"{theirs}.x.1.weight", num_bytes=30),
    )


SMALL = Outline(
    model="Small",
    fingerprint="small",
    blocks=(
        block(
            ["m.emb", "m.rot"],
            tensor("m.emb.weight", "p.e.weight", num_bytes=100),
            tensor("m.rot.freq", "p.r.freq", num_bytes=2),
            tensor("m.rot.kept", "p.r.freq", num_bytes=2),
        ),
        layer(0),
        layer(1),
        # A buffer of which the checkpoint knows nothing.
        block(["m.norm"], tensor("m.norm.weight", "p.enc.norm.weight"), tensor("m.norm.step")),
        # The same name in both conventions.
        block(["out"], tensor("out.weight")),
        block(["head"], tensor("head.weight", num_bytes=0, tied_to="m.emb.weight"), tied_to=0),
        # What the caller does.
        block([], tied_to=0),
    ),
)
