"""Small pieces: what one reads at once stays short.

A function's lines are those of its body, from the first statement after the docstring to the
last, blank lines and comments included; the signature and the docstring are the contract, and
don't count. In C they are what is between its braces. Parameters are all but `self` and `cls`, with
keyword-only ones: six, or a seventh where what they say belongs together in no dataclass. A public
function's signature is its documentation, a command of the command line has one parameter per
option, a test one per fixture, and a model's `forward` those that transformers reads from it by
name, so there they may be more.

The code lines of `src` (neither blank, nor a comment, nor inside a docstring) have a ceiling, which
only goes down.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import duoka

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 40
MAX_PARAMETERS = 7
MAX_CODE_LINES = 48_925

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files() -> list[Path]:
    folders = ("src", "tests", "benchmarks", "scripts")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a tree and the statements in it; expressions, which are most nodes, hold none."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield from statements(node)


def functions(tree: ast.AST) -> Iterator[Function]:
    for node in statements(tree):
        if isinstance(node, Function):
            yield node


@functools.cache
def public_functions() -> frozenset[tuple[str, int]]:
    """File and line of every public function, and of the methods of public classes."""
    places = set()
    for name in duoka.__all__:
        value = getattr(duoka, name)
        members = vars(value).values() if inspect.isclass(value) else [value]
        for member in members:
            function = inspect.unwrap(getattr(member, "__func__", member))
            if inspect.isfunction(function):
                code = function.__code__
                places.add((code.co_filename, code.co_firstlineno))
    return frozenset(places)


def is_public(path: Path, function: Function) -> bool:
    # Python counts a function's lines from its first decorator.
    first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
    return (str(path), first) in public_functions()


def body_lines(function: Function) -> int:
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    if not body:
        return 0
    assert body[-1].end_lineno is not None
    return body[-1].end_lineno - body[0].lineno + 1


def num_parameters(function: Function) -> int:
    arguments = function.args
    names = [
        argument.arg for argument in arguments.posonlyargs + arguments.args + arguments.kwonlyargs
    ]
    if names and names[0] in ("self", "cls"):
        del names[0]
    return len(names)


def may_have_many_parameters(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    return parts[0] == "tests" or parts[:3] == ("src", "duoka", "api")


def faults(path: Path) -> Iterator[str]:
    """Describe what is too long in a file."""
    text = path.read_text(encoding="utf-8")
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"the file has {num_lines} lines"
    for function in functions(ast.parse(text)):
        place = f"{function.name} (line {function.lineno})"
        if body_lines(function) > MAX_FUNCTION_LINES:
            yield f"{place} has {body_lines(function)} lines"
        exempt = may_have_many_parameters(path) or is_public(path, function)
        exempt |= function.name == "forward" and path.parent.name == "models"
        if num_parameters(function) > MAX_PARAMETERS and not exempt:
            yield f"{place} has {num_parameters(function)} parameters"


def test_sizes() -> None:
    found = [f"{path.relative_to(ROOT)}: {fault}" for path in files() for fault in faults(path)]
    assert not found, "\n".join(found)


def test_sizes_in_c() -> None:
    for path in (ROOT / "src").rglob("*.[ch]"):
        text = path.read_text(encoding="utf-8")
        bodies = re.findall(r"^(\w+)\(.*\)\n\{\n((?:.*\n)*?)\}$", text, re.MULTILINE)
        assert bodies, path
        assert len(text.splitlines()) <= MAX_FILE_LINES, path
        long = [name for name, body in bodies if body.count("\n") > MAX_FUNCTION_LINES]
        assert long == [], path


def code_lines(text: str) -> int:
    """Count the lines that are neither blank, nor a comment, nor inside a docstring."""
    docstring_lines = set[int]()
    for node in statements(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            statement = node.body[0]
            docstring_lines.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in docstring_lines
        for number, line in enumerate(text.split("\n"), 1)
    )


def test_the_code_lines_of_src_stay_under_their_ceiling() -> None:
    paths = (ROOT / "src").rglob("*.py")
    assert sum(code_lines(path.read_text(encoding="utf-8")) for path in paths) <= MAX_CODE_LINES


def test_how_code_lines_are_counted() -> None:
    text = (
        '"""Doc."""\n\nx = 1  # one\n# a comment\n'
        'def f():\n    """Doc.\n\n    More.\n    """\n    return x\n'
    )
    assert code_lines(text) == 3


def test_how_lines_and_parameters_are_counted() -> None:
    text = (
        "class C:\n    def f(self, a,\n          *, b=1):\n        '''Doc.\n\n        More.'''\n"
        "        x = 1\n\n        return x\n    def g(): 'only a docstring'\n"
    )
    first, second = functions(ast.parse(text))
    assert (body_lines(first), num_parameters(first)) == (3, 2)
    assert (body_lines(second), num_parameters(second)) == (0, 0)


def test_public_functions_are_known() -> None:
    path = ROOT / "src" / "duoka" / "api" / "plan.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    public = {function.name for function in functions(tree) if is_public(path, function)}
    assert "plan" in public
    assert not {name for name in public if name.startswith("_")}
