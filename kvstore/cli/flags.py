"""Command-line flags made from `kvstore.config`, so that a setting is written down once.

A flag is the setting's name with dashes and takes text; the settings themselves check it, as they do for file and
environment. A flag that is not given is not a value: weaker sources then decide.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.config import Settings, describe, load

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="TOML file. Else ./kvstore.toml, else /etc/kvstore.toml."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for programs.")]


@dataclass(frozen=True, slots=True)
class Group:
    """Flags of one table: `--{prefix}{setting}` for every setting that is not in `without`."""

    kind: type[Settings]
    prefix: str = ""
    without: Collection[str] = ()

    def parameters(self) -> Iterator[inspect.Parameter]:
        """The flags as typer sees them."""
        for row in describe():
            if row.table != self.kind.table or row.name not in self._names():
                continue
            field = self.kind.model_fields[row.name]
            is_switch = field.annotation is bool
            flag = f"--{self._parameter(row.name)}".replace("_", "-")
            option = typer.Option(
                f"{flag}/--no-{flag[2:]}" if is_switch else flag,
                help=row.text if is_switch or not row.default else f"{row.text} Default: {row.default}.",
                metavar=None if is_switch else field.title or "NAME",
                show_default=False,
                rich_help_panel=f"Settings of the {self.kind.table} table",
            )
            kind: Any = bool | None if is_switch else str | None
            yield _keyword(self._parameter(row.name), Annotated[kind, option], None)

    def load(self, given: dict[str, Any], config: Path | None) -> Settings:
        """The table's settings; `given` are all flags of the command, None where not given."""
        values = {name: given[self._parameter(name)] for name in self._names()}
        return load(self.kind, {name: value for name, value in values.items() if value is not None}, config=config)

    def _names(self) -> list[str]:
        return [name for name in self.kind.model_fields if name not in self.without]

    def _parameter(self, name: str) -> str:
        return f"{self.prefix}{name}"


def takes_settings(*groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of these groups, `--config` and `--json`.

    The command's positional parameters receive the loaded settings in the order of the groups; its keyword-only
    parameters stay flags of their own.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY]

        def run(*, config: Path | None, **given: Any) -> None:
            settings = [group.load(given, config) for group in groups]
            command(*settings, **{parameter.name: given[parameter.name] for parameter in own})

        parameters = [p for group in groups for p in group.parameters()]
        parameters = [_keyword("config", ConfigOption, None), *own, *parameters]
        # Typer reads the signature; the flags exist only there.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _keyword(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
