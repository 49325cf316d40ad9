"""Names that say nothing: a name is a noun for what a thing is, or a verb for what it does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import duoka

ROOT = Path(__file__).resolve().parents[1]
# Participles and pronouns that don't say of what.
BARE = frozenset(
    [
        "told",
        "found",
        "made",
        "given",
        "asked",
        "each",
        "own",
        "others",
        "here",
        "kept",
        "held",
        "with",
        "may",
        "on",
    ]
)


def names(tree: ast.AST) -> Iterator[tuple[str | None, int]]:
    """Every name that a module gives: of functions, classes, parameters, variables, fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


@pytest.mark.parametrize(
    "path", sorted((ROOT / "src").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_names_say_what_they_name(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bare = [f"{name}, line {line}" for name, line in names(tree) if (name or "").strip("_") in BARE]
    assert not bare, f"{path.relative_to(ROOT)}: " + "; ".join(bare)


def test_what_is_counted_as_a_name() -> None:
    tree = ast.parse("def f(a, *, b): c = d = 1; self.e = 2; (g, h) = i\nclass J: k: int\n")
    assert sorted(name for name, _ in names(tree) if name) == list("Jabcdefghk")


def test_the_glossary_has_one_meaning_for_each_word() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| .+ \|$", page, re.MULTILINE)
    words = [word.strip() for row in rows for word in row.split(",") if row not in ("word", "---")]
    assert len(words) == len(set(words))
    nouns = {name.lower() for name in duoka.__all__ if name[0].isupper()} - {"constraints"}
    assert nouns <= {*words, "training"}
