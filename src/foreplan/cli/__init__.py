"""The command line: each command reads its arguments and calls the API; nothing is decided here.

Tables go to stdout, progress to stderr; with ``--json`` one JSON document is on stdout and nothing
else. Exit codes: 0 done, 1 internal error, 2 bad input, 3 infeasible, 4 missing data, 5
verification outside tolerance, 130 interrupted (Ctrl-C or SIGTERM), 141 nobody reads the output.

The commands stand by what they are about: `machines`, `plans`, `models`, `data` and `traffic`. What
a command does is imported when it runs, so that ``--help`` and completion answer at once.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from foreplan.cli import data, machines, models, plans, traffic
from foreplan.cli._app import (
    Interrupted,
    app,
    cluster_app,
    dataset_app,
    error_document,
    simulate_app,
)
from foreplan.cli._plain import plain_words
from foreplan.errors import ForeplanError, SpecError

__all__ = ["app", "data", "machines", "main", "models", "plans", "traffic"]

#: What a full or broken disk says, here of stdout: files are written by `write_atomically`.
_NOT_TAKEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

#: What a shell says of a command that SIGPIPE ended.
_SIGPIPE = 128 + 13

app.add_typer(cluster_app, name="cluster")
app.add_typer(simulate_app, name="simulate")
app.add_typer(dataset_app, name="dataset")


def main() -> NoReturn:
    """Run the command line; expected errors become one line and an exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # its caller closed it, as daemons do; nothing reads it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open as long as we run
    plain_words(sys.stdout, sys.stderr)
    # Locks and worker processes go as they do after Ctrl-C; a second one ends at once.
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        # By the name that every page and message has, also where a module was run.
        code = app(prog_name="foreplan", standalone_mode=False)
        sys.stdout.flush()
    except ForeplanError as error:
        _fail(str(error), error.exit_code, type(error).__name__)
    except typer.Exit as stop:
        code = stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = Interrupted.exit_code
    except SystemError as error:
        if not _of_ctrl_c(error):
            raise
        code = Interrupted.exit_code
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        code = _unread()
    except BrokenPipeError:
        code = _unread()
    except OSError as error:
        if error.errno not in _NOT_TAKEN or error.filename is not None:
            raise
        _drop_output()
        full = SpecError("standard output", got=error.strerror, expected="a place that takes it")
        _fail(str(full), full.exit_code, type(full).__name__)
    except Exception as error:
        # Click's own errors of usage; everything else is a bug and keeps its traceback.
        code, text = getattr(error, "exit_code", None), getattr(error, "format_message", None)
        if code is None or text is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError" and "--json" not in sys.argv:
            print(text(), file=sys.stderr)  # the whole help, which is no message of an error
            sys.exit(code)
        _fail(text(), code, type(error).__name__)
    finally:
        signal.signal(signal.SIGTERM, before)
    if code == Interrupted.exit_code:  # typer's own word for Ctrl-C
        _fail(
            "interrupted; the same command starts anew", Interrupted.exit_code, Interrupted.__name__
        )
    sys.exit(code if isinstance(code, int) else 0)


def _unread() -> int:
    """Exit code where a reader such as ``head`` has what it wanted: that of other commands."""
    _drop_output()
    return _SIGPIPE


def _drop_output() -> None:
    """What is left of stdout would fail again at the end."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def _of_ctrl_c(error: BaseException | None) -> bool:
    """Whether Ctrl-C is the first cause.

    Compiled code, and what loads it, goes on and returns results although there is an exception.
    The interpreter refuses each of them with an error of its own.
    """
    while isinstance(error, SystemError):
        error = error.__cause__
    return isinstance(error, KeyboardInterrupt)


def _interrupt(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


def _fail(message: str, code: int, kind: str) -> NoReturn:
    if "--json" in sys.argv:
        try:
            print(json.dumps(error_document(message, code, kind)), flush=True)
        except OSError:  # nobody reads it, or it has no place; the line below still tells
            _drop_output()
    print(f"foreplan: error: {message}", file=sys.stderr)
    sys.exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        import foreplan

        print(f"foreplan {foreplan.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Predict how long tensor programs take on each device of a mixed cluster, and plan with it."""
