from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from duoka.cli.groups import (
    Command,
    OptionGroup,
    all_but,
    argument,
    flag,
    option,
    with_groups,
)


@dataclass(frozen=True, kw_only=True)
class Sizes(OptionGroup):
    name: str | None = argument("NAME", "Whose.")
    height: int | None = option("N", "How high.", min=1)
    width: int | None = option("N", "How wide.", names=("--width", "-w"))
    is_round: bool = flag("Without corners.", names=("--round",))


def run(command: Command, *words: str) -> int:
    app = typer.Typer()
    app.command()(with_groups(command))
    return CliRunner().invoke(app, [*words]).exit_code


def test_a_group_is_filled_by_its_options() -> None:
    seen: list[object] = []

    def draw(sizes: Sizes, depth: Annotated[int, typer.Option()] = 3) -> None:
        """Draw."""
        seen.extend((sizes, depth))

    assert run(draw, "x", "--height", "2", "-w", "5", "--round", "--depth", "1", "--debug") == 0
    assert run(draw) == 0
    assert seen == [Sizes(name="x", height=2, width=5, is_round=True), 1, Sizes(), 3]
    assert run(draw, "--height", "0") == 2
    assert Sizes(width=0, is_round=True).given_options("height", "width", "is_round") == [
        "--width",
        "--round",
    ]


def test_a_command_has_the_fields_that_it_names() -> None:
    seen: list[Sizes] = []

    def draw(sizes: Annotated[Sizes, ("width", "height")]) -> None:
        seen.append(sizes)

    names = [*inspect.signature(with_groups(draw)).parameters]
    assert names == ["width", "height", "debug"]
    assert run(draw, "--width", "2") == 0
    assert run(draw, "--round") == 2
    assert seen == [Sizes(width=2)]
    assert all_but(Sizes, "name", "is_round") == ("height", "width")


def test_a_field_that_is_not_there_is_a_mistake_of_the_command() -> None:
    def draw(sizes: Annotated[Sizes, ("depth",)]) -> None: ...

    with pytest.raises(KeyError, match="depth"):
        with_groups(draw)
