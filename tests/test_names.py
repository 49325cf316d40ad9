"""Names that say nothing: a name is a noun for what a thing is, or a verb for what it does."""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import duoka
from duoka.base.garbage import freeze_objects

ROOT = Path(__file__).resolve().parents[1]


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Participles and pronouns that don't say of what; no name is one of them.
BARE = words("told found made given asked each own others here kept held with may on")
# Words that seldom say what a value is; few names may be one of them.
VAGUE = words(
    "told tell tells found find made make given give asked ask known own others other each some "
    "all least most fewest here there away apart alone together alike like same met kept keep "
    "held hold heard meant said shown moved placed named called added taken dropped left judged "
    "dealt chosen wanted looked seen filled settled borrowed followed begun ended one two first "
    "last before after between around inside within enough more less few many whole"
)
PRONOUNS = words("what which who that it those one ones")
# Shares in percent, and a number of docstrings: the aims that they have reached.
MAX_VAGUE_FUNCTIONS = 1.0
MAX_VAGUE_BINDINGS = 2.0
MAX_PRONOUNS = 3.0
MAX_QUESTIONS = 0

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Parse every file of the source, by its path."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "src").rglob("*.py"))
    }


@functools.cache
def all_nodes() -> list[tuple[str, ast.AST]]:
    """Every node of the source, with the path of its file.

    Collecting garbage among so many new objects would take longer than making them.
    """
    gc.disable()
    found = [(path, node) for path, tree in modules().items() for node in ast.walk(tree)]
    freeze_objects()
    gc.enable()
    return found


def nodes(kind: Any) -> Iterator[Any]:
    yield from (node for _, node in all_nodes() if isinstance(node, kind))


def names(nodes: Iterable[ast.AST]) -> Iterator[tuple[str | None, int]]:
    """Every name that a module gives: of functions, classes, parameters, variables, fields."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def first_words(docstring: str) -> list[str]:
    """Return the words of the first sentence."""
    return re.findall(r"[a-z']+", docstring.split("\n\n")[0].split(". ")[0].lower())


def first_sentences() -> Iterator[list[str]]:
    for node in nodes(ast.Module | Definition):
        if text := ast.get_docstring(node):
            yield first_words(text)


def bindings() -> Iterator[str]:
    """Name every parameter and variable, each time it is bound."""
    yield from (node.arg for node in nodes(ast.arg))
    yield from (node.id for node in nodes(ast.Name) if isinstance(node.ctx, ast.Store))


def percent(words: Iterable[str], counted: Container[str]) -> float:
    """Return the share of the words that are counted."""
    found = [word in counted for word in words]
    return 100 * sum(found) / len(found)


def test_names_say_what_they_name() -> None:
    bare = [
        f"{path}:{line}: {name}"
        for path, node in all_nodes()
        for name, line in names([node])
        if (name or "").strip("_") in BARE
    ]
    assert not bare, "\n".join(bare)


def test_a_class_name_is_defined_once() -> None:
    paths: dict[str, set[str]] = {}
    for path, node in all_nodes():
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            paths.setdefault(node.name, set()).add(path)
    assert {name: sorted(found) for name, found in paths.items() if len(found) > 1} == {}


def test_vague_words_become_fewer() -> None:
    functions = [node.name for node in nodes(ast.FunctionDef | ast.AsyncFunctionDef)]
    functions = [name.strip("_") for name in functions if not name.startswith("__")]
    sentences = list(first_sentences())
    first = [word for sentence in sentences for word in sentence]
    questions = sum(sentence[:1] in (["what"], ["whether"]) for sentence in sentences)
    assert percent(functions, VAGUE) <= MAX_VAGUE_FUNCTIONS
    assert percent((name.strip("_") for name in bindings()), VAGUE) <= MAX_VAGUE_BINDINGS
    assert percent(first, PRONOUNS) <= MAX_PRONOUNS
    assert questions <= MAX_QUESTIONS


def test_what_is_counted_as_a_name() -> None:
    tree = ast.parse("def f(a, *, b): c = d = 1; self.e = 2; (g, h) = i\nclass J: k: int\n")
    assert sorted(name for name, _ in names(ast.walk(tree)) if name) == list("Jabcdefghk")


def test_what_is_counted_as_a_first_sentence() -> None:
    assert first_words("What it is. More.\n\nMuch more.") == ["what", "it", "is"]
    assert percent(["what", "is", "a", "plan"], PRONOUNS) == 25


def test_the_glossary_has_one_meaning_for_each_word() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| .+ \|$", page, re.MULTILINE)
    words = [word.strip() for row in rows for word in row.split(",") if row not in ("word", "---")]
    assert len(words) == len(set(words))
    nouns = {name.lower() for name in duoka.__all__ if name[0].isupper()} - {"constraints"}
    assert nouns <= {*words, "training"}
