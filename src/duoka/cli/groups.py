"""Groups of options: dataclasses whose fields are options of a command.

A command takes a group as one parameter, and Typer sees each field as an option of its own. So an
option is declared once, for all commands that have it.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any

import typer

Command = Callable[..., None]


def option(
    metavar: str | None,
    text: str,
    *,
    panel: str | None = None,
    names: tuple[str, ...] = (),
    values: Sequence[str] = (),
    **settings: Any,
) -> Any:
    """Declare a field of a group: an option with a value, by default None.

    Shells complete it with `values`, and where there are none with files.
    """
    declared = typer.Option(
        *names,
        metavar=metavar,
        help=text,
        rich_help_panel=panel,
        show_default=False,
        autocompletion=_completing(values),
        **settings,
    )
    return field(default=None, metadata={"option": declared})


def _completing(values: Sequence[str]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


def flag(name: str, text: str, *, panel: str | None = None) -> Any:
    """Declare a field of a group: a flag."""
    declared = typer.Option(name, help=text, rich_help_panel=panel)
    return field(default=False, metadata={"option": declared})


def argument(metavar: str, text: str) -> Any:
    """Declare a field of a group: an optional argument."""
    declared = typer.Argument(metavar=metavar, help=text, show_default=False)
    return field(default=None, metadata={"option": declared})


class Only(tuple[str, ...]):
    """Beside a group in `Annotated`: the fields of the command, in this order."""

    __slots__ = ()


def all_but(group: Any, *names: str) -> Only:
    """Return the fields of a group but for some."""
    return Only(declared.name for declared in fields(group) if declared.name not in names)


@dataclass(slots=True)
class State:
    """The state of a run of the program."""

    debug: bool = False


def _set_debug(context: typer.Context, wanted: bool) -> bool:
    if isinstance(context.obj, State):
        context.obj.debug |= wanted
    return wanted


Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Show the traceback of every error.",
        callback=_set_debug,
        is_eager=True,  # so that it also holds for options that can't be read
    ),
]


def with_groups(command: Command) -> Command:
    """Flatten the groups of a command for Typer, and add ``--debug``."""
    # Typer reads a command's signature. So the wrapper gets one of its own, in which each group is
    # replaced by its fields; when it is called, the values go back into their groups.
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[Any, Only]] = {}
    options: dict[str, inspect.Parameter] = {}
    for parameter in inspect.signature(command).parameters.values():
        group, *rest = typing.get_args(hints[parameter.name]) or (hints[parameter.name],)
        if is_dataclass(group):
            names = next((note for note in rest if isinstance(note, Only)), all_but(group))
            groups[parameter.name] = group, names
            options |= {item.name: item for item in _options(group, names)}
        else:
            options[parameter.name] = _keyword(
                parameter.name, parameter.default, hints[parameter.name]
            )
    options["debug"] = _keyword("debug", False, Debug)

    def call(debug: bool, **values: Any) -> None:
        filled = {
            name: group(**{option: values.pop(option) for option in names})
            for name, (group, names) in groups.items()
        }
        command(**filled, **values)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {name: item.annotation for name, item in options.items()}
    call.__dict__["__signature__"] = inspect.Signature(list(options.values()))
    return call


def _options(group: Any, names: Only) -> Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(group)
    by_name = {item.name: item for item in fields(group)}
    for name in names:
        declaration = by_name[name].metadata["option"]
        yield _keyword(name, by_name[name].default, Annotated[hints[name], declaration])


def _keyword(name: str, default: object, annotation: object) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)
