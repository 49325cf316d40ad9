from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from duoka.checker.expressions import Expressions
from duoka.checker.source_map import (
    forget_sources,
    is_named,
    place_of,
    returned_expression,
    source_of,
    spot_of,
)
from duoka.report.check_report import Place


def texts(*tensors: Any, direct: bool = True) -> list[str]:
    """The texts of the arguments, as the caller wrote them."""
    expressions = Expressions(sys._getframe(1), direct=direct)
    return [expressions.of(each, (at,), receiver=False).text for at, each in enumerate(tensors)]


def place(*args: Any) -> Place:
    """Where this is called."""
    return place_of(spot_of(sys._getframe(1)))


def test_a_place_is_the_expression_that_runs() -> None:
    found = [0, place(1, 2)][1]
    assert found.text == "place(1, 2)"
    assert found.file == __file__
    assert found.function == "test_a_place_is_the_expression_that_runs"


def test_equal_functions_of_two_files_keep_their_files(tmp_path: Path) -> None:
    """Python compares code objects without their files."""
    places = []
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("def f(place):\n    return place(1)\n")
        variables: dict[str, Any] = {}
        exec(compile((tmp_path / name).read_text(), str(tmp_path / name), "exec"), variables)
        places.append(variables["f"](place))
    assert [found.file for found in places] == [str(tmp_path / "a.py"), str(tmp_path / "b.py")]
    assert [found.text for found in places] == ["place(1)", "place(1)"]


def test_columns_are_characters_and_lines_are_joined() -> None:
    found = ("多卡", place(
        "多",
    ))[1]  # fmt: skip
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert lines[found.line - 1][found.column :] == "place("
    assert found.text == 'place( "多", )'
    assert found.end_line == found.line + 2


def test_operands_are_found_by_name_and_by_position() -> None:
    a, b = torch.ones(1), torch.ones(1)
    pair = {"left": a}
    assert texts(a, b.neg()) == ["a", "b.neg()"]
    assert texts(pair["left"], b) == ['pair["left"]', "b"]


def test_items_of_lists_and_starred_arguments_have_a_text() -> None:
    some = [torch.ones(1), torch.ones(1)]

    def second(items: list[torch.Tensor]) -> str:
        expressions = Expressions(sys._getframe(1), direct=True)
        return expressions.of(items[1], (0, 1), receiver=False).text

    assert second(some) == "some[1]"
    assert second([some[0], some[1].neg()]) == "some[1].neg()"
    assert second([each.neg() for each in some]) == "each.neg()"
    assert texts(*some) == ["some[0]", "some[1]"]
    assert texts(*(each.neg() for each in some))[1].endswith("[1]")


def test_a_parameter_of_the_module_that_is_called() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> list[str]:
            frame = sys._getframe(0)
            while frame.f_code.co_name != "test_a_parameter_of_the_module_that_is_called":
                assert frame.f_back is not None
                frame = frame.f_back
            expressions = Expressions(frame, direct=False)
            return [expressions.of(each, (0,), receiver=False).text for each in (x, self.weight)]

    layer, y = Layer(), torch.ones(1)
    assert layer(y) == ["y", "layer.weight"]


def test_a_device_is_named_by_the_code_or_asked_for() -> None:
    x, spots = torch.ones(1), []

    def make(*args: Any, device: Any = None) -> None:
        spots.append((spot_of(sys._getframe(1)), device))

    make(device="cuda")
    make(device=x.device)
    make(device=0)
    make(device=x.get_device())
    make(device=torch.device("cuda", 0))
    make(device=f"cuda:{x.device.index}")
    assert [is_named(*each) for each in spots] == [True, False, True, False, True, False]


def test_what_a_backward_returns_at_a_position() -> None:
    def backward(ctx: Any, gradient: Any) -> Any:
        x = gradient
        return x * 1, (x * 2).sum()

    assert returned_expression(backward.__code__, 1).text == "(x * 2).sum()"
    assert returned_expression(backward.__code__, 0).line == backward.__code__.co_firstlineno + 2


def test_code_without_source_has_a_line_at_least() -> None:
    namespace: dict[str, Any] = {"place": place}
    exec(compile("def f():\n    return place()\n", "<made>", "exec"), namespace)
    found = namespace["f"]()
    assert (found.file, found.line, found.text) == ("<made>", 2, "")


def test_a_file_is_parsed_again_when_it_was_edited(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text("a = b + c\n")
    nodes = source_of(str(file)).nodes
    forget_sources()
    assert source_of(str(file)).nodes is nodes
    file.write_text("a = d\n")
    forget_sources()
    assert source_of(str(file)).lines == ("a = d\n",)
    assert source_of(str(file)).nodes.keys() != nodes.keys()
