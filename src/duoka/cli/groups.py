"""Groups of options: dataclasses whose fields are options of a command.

A command takes a group as one parameter; Typer sees each field as a separate option. Therefore an
option is declared once for all commands that have it. `Annotated[Group, ("gpus", "context")]`
selects the fields that a command has, in this order; without a tuple it has all fields.
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
    """Base class of option groups."""

    def given_options(self, *names: str) -> list[str]:
        """Return the options and arguments of the named fields that were given, as "--gpus"."""
        items = [item for item in fields(self) if item.name in names]
        return [
            item.metadata.get("metavar") or _option_names(item)[0]
            for item in items
            if is_given(getattr(self, item.name))
        ]

    def refuse(self, *names: str, beside: str, hint: str) -> None:
        """Raise UsageError if an option of the named fields is given.

        `beside` names the option or mode that excludes them.
        """
        refuse_beside(self.given_options(*names), beside, hint)


def is_given(value: object) -> bool:
    """Return True if an option's value shows that it was given; 0 and "" count as given."""
    return value is not None and value is not False and value != []


def refuse_beside(options: Sequence[str], what: str, hint: str) -> None:
    """Raise UsageError if `options` is not empty; `what` excludes them."""
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
    """Declare an option with a value as a field of a group; the default is None.

    The option is named after the field unless `names` are given. Shells complete its value with
    `values`, or with files if there are no `values`.
    """

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    settings |= {"metavar": metavar, "show_default": False, "autocompletion": complete}
    declare = partial(typer.Option, help=text, rich_help_panel=panel, **settings)
    return field(default=None, metadata={"declare": declare, "names": names})


def flag(text: str, *, panel: str | None = None, names: tuple[str, ...] = ()) -> Any:
    """Declare a flag as a field of a group; the default is False."""
    declare = partial(typer.Option, help=text, rich_help_panel=panel)
    return field(default=False, metadata={"declare": declare, "names": names})


def argument(metavar: str, text: str) -> Any:
    """Declare an optional positional argument as a field of a group; the default is None."""
    declare = partial(typer.Argument, metavar=metavar, help=text, show_default=False)
    return field(default=None, metadata={"declare": declare, "metavar": metavar})


def all_but(group: Any, *names: str) -> tuple[str, ...]:
    """Return the names of a group's fields except the given names."""
    return tuple(item.name for item in fields(group) if item.name not in names)


Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of every error.")]


def with_groups(command: Command) -> Command:
    """Replace a command's groups by their options for Typer, and add ``--debug``."""
    # Typer reads a command's signature. The wrapper `call` therefore gets a signature in which each
    # group is replaced by its fields; when called, it puts the values back into their groups:
    #
    #     def plan(options: PlanOptions, model: ModelOptions)             the command as written
    #     def call(*, gpus, context, …, model, revision, …, debug)        the signature for Typer
    #     plan(options=PlanOptions(gpus=…, …), model=ModelOptions(…))     the call of the command
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[Any, tuple[str, ...]]] = {}
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        group, *rest = typing.get_args(hints[parameter.name]) or (hints[parameter.name],)
        if is_dataclass(group):
            names = next((note for note in rest if isinstance(note, tuple)), all_but(group))
            groups[parameter.name] = group, names
            options += _parameters_of(group, names)
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


def _parameters_of(group: Any, names: tuple[str, ...]) -> Iterator[inspect.Parameter]:
    """Yield a keyword parameter, with its Typer declaration, for each named field of a group."""
    hints = typing.get_type_hints(group)
    by_name = {item.name: item for item in fields(group)}
    for name in names:
        item = by_name[name]
        is_argument = "names" not in item.metadata
        declared = item.metadata["declare"](*(() if is_argument else _option_names(item)))
        yield _keyword(name, item.default, Annotated[hints[name], declared])


def _option_names(item: Field[Any]) -> tuple[str, ...]:
    """Return the names of a field's option on the command line."""
    return item.metadata.get("names") or (f"--{item.name.replace('_', '-')}",)


def _keyword(name: str, default: object, annotation: object) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)
