"""The command tree that the other files add to, and what all commands share."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from foreplan.errors import ForeplanError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class Commands(TyperGroup):
    """Lists commands with their whole first sentence, which click cuts at the line's end."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list; lines are wrapped to the terminal's width."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(limit=500))
            for name, command in found
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


app = typer.Typer(
    name="foreplan",
    cls=Commands,
    help="Predict how long tensor programs take on each device of a cluster, and plan with it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cluster_app = typer.Typer(
    cls=Commands, help="Work with cluster descriptions.", no_args_is_help=True
)
simulate_app = typer.Typer(
    cls=Commands,
    help="Simulate a pipeline's schedule, or traffic on a serving plan.",
    no_args_is_help=True,
)
dataset_app = typer.Typer(
    cls=Commands, help="Measured operators and programs.", no_args_is_help=True
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="File to write.")]
OutputFolder = Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")]


class Interrupted(ForeplanError):
    """Ctrl-C in a command that keeps what it has finished."""

    exit_code = 130


@contextmanager
def resumable(output: Path) -> Iterator[None]:
    """Run what goes on where it was when the command is given again; Ctrl-C says so."""
    try:
        yield
    except KeyboardInterrupt:
        if not output.exists():
            raise  # it came before there was anything to keep
        raise Interrupted(
            f"interrupted; what was measured is kept in {output}, the same command goes on there"
        ) from None


def console() -> Console:
    """Where progress goes: stderr."""
    from rich.console import Console

    return Console(stderr=True, width=_width())


def show(found: RenderableType) -> None:
    """Print a command's tables on stdout, where pipes and ``> FILE`` find them."""
    from rich.console import Console

    Console(width=_width()).print(found)


def _width() -> int | None:
    """Columns of tables; ``None`` leaves them to rich, which shows nothing in 0 of them."""
    columns = os.environ.get("COLUMNS", "")
    return shutil.get_terminal_size().columns if columns.isdigit() and not int(columns) else None


def error_document(message: str, code: int, kind: str) -> dict[str, Any]:
    """What ``--json`` prints of an error."""
    return {"error": {"type": kind, "message": message, "exit_code": code}}


def print_json(document: Any) -> None:
    """The one document on stdout."""
    print(json.dumps(document, allow_nan=False))
