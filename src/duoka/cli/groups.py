"""Groups of options: dataclasses whose fields are options of a command.

A command takes a group as one parameter, and Typer sees each field as an option of its own. So an
option is declared once, for all commands that have it. A tuple beside a group in `Annotated` names
the fields that the command has, in its order.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import partial
from typing import Annotated, Any

import typer

from duoka.errors import UsageError

Command = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionGroup:
    """Base of all groups."""

    def given_options(self, *names: str) -> list[str]:
        """Return the given options among some fields, as on the command line; 0 is a value."""
        by_name = {item.name: item for item in fields(self)}
        return [_option_names(by_name[name])[0] for name in names if is_given(getattr(self, name))]

    def refuse(self, *names: str, beside: str, hint: str) -> None:
        """Raise UsageError if any option of some fields is given."""
        refuse_beside(self.given_options(*names), beside, hint)


def is_given(value: object) -> bool:
    """Return True if an option was given, by its value; 0 is a value."""
    return value is not None and value is not False and value != []


def refuse_beside(options: Sequence[str], what: str, hint: str) -> None:
    """Raise UsageError if there are any options."""
    if options:
        raise UsageError(f"{', '.join(options)} can't be given with {what}", hint=hint)


def option(
    metavar: str,
    text: str,
    *,
    panel: str | None = None,
    names: tuple[str, ...] = (),
    values: Sequence[str] = (),
    **settings: Any,
) -> Any:
    """Declare a field of a group: an option with a value, by default None.

    It has the field's name, unless it has `names`. Shells complete it with `values`, and where
    there are none with files.
    """

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    settings |= {"metavar": metavar, "show_default": False, "autocompletion": complete}
    declare = partial(typer.Option, help=text, rich_help_panel=panel, **settings)
    return field(default=None, metadata={"declare": declare, "names": names})


def flag(text: str, *, panel: str | None = None, names: tuple[str, ...] = ()) -> Any:
    """Declare a field of a group: a flag."""
    declare = partial(typer.Option, help=text, rich_help_panel=panel)
    return field(default=False, metadata={"declare": declare, "names": names})


def argument(metavar: str, text: str) -> Any:
    """Declare a field of a group: an optional argument."""
    declare = partial(typer.Argument, metavar=metavar, help=text, show_default=False)
    return field(default=None, metadata={"declare": declare})


def all_but(group: Any, *names: str) -> tuple[str, ...]:
    """Return the fields of a group but for some."""
    return tuple(item.name for item in fields(group) if item.name not in names)


Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of every error.")]


def with_groups(command: Command) -> Command:
    """Flatten the groups of a command for Typer, and add ``--debug``."""
    # Typer reads a command's signature. So the wrapper gets one of its own, in which each group is
    # replaced by its fields; when it is called, the values go back into their groups:
    #
    #     def plan(options: PlanOptions, model: ModelOptions)             what is written
    #     def call(*, gpus, context, …, model, revision, …, debug)        what Typer sees
    #     plan(options=PlanOptions(gpus=…, …), model=ModelOptions(…))     what is called
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[Any, tuple[str, ...]]] = {}
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        group, *rest = typing.get_args(hints[parameter.name]) or (hints[parameter.name],)
        if is_dataclass(group):
            names = next((note for note in rest if isinstance(note, tuple)), all_but(group))
            groups[parameter.name] = group, names
            options += _options(group, names)
        else:
            options.append(_keyword(parameter.name, parameter.default, hints[parameter.name]))
    options.append(_keyword("debug", False, Debug))

    def call(debug: bool, **values: Any) -> None:
        filled = {
            name: group(**{option: values.pop(option) for option in names})
            for name, (group, names) in groups.items()
        }
        command(**filled, **values)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {item.name: item.annotation for item in options}
    call.__dict__["__signature__"] = inspect.Signature(options)
    return call


def _options(group: Any, names: tuple[str, ...]) -> Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(group)
    by_name = {item.name: item for item in fields(group)}
    for name in names:
        item = by_name[name]
        is_argument = "names" not in item.metadata
        declared = item.metadata["declare"](*(() if is_argument else _option_names(item)))
        yield _keyword(name, item.default, Annotated[hints[name], declared])


def _option_names(item: Field[Any]) -> tuple[str, ...]:
    return item.metadata.get("names") or (f"--{item.name.replace('_', '-')}",)


def _keyword(name: str, default: object, annotation: object) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)
