"""Errors a user can act on, one class per way of acting.

Every error prints as one line that says what is wrong, where, and what would mend it; the CLI
turns the class into its exit code. Anything else that reaches the CLI is a bug and keeps its
traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

#: Longest message; names and values from files can be of any length.
MOST_CHARACTERS = 1500


class ForeplanError(Exception):
    """Base of every error that Foreplan raises on purpose.

    Its message is one line: line ends become spaces, control characters are written out.

    Attributes:
        exit_code: what the CLI exits with.
        fix: what would mend it, or ``None``.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        self.fix = fix
        text = " ".join((message if fix is None else f"{message}; {fix}").split())
        if len(text) > MOST_CHARACTERS:
            text = text[: MOST_CHARACTERS - 3] + "..."
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))

    def __reduce__(self) -> tuple[Any, ...]:
        # Between processes an exception is called again with its message alone, which a SpecError
        # refuses: `multiprocessing.Pool` then waits for ever, a process executor breaks.
        return type(self)._again, self.args, self.__dict__

    @classmethod
    def _again(cls, *args: object) -> Self:
        """An error of this message; copies and other processes add its attributes."""
        return cls.__new__(cls, *args)


class SpecError(ForeplanError):
    """A description is wrong: an unknown field, unit, device or file.

    Args:
        where: file and field, as ``cluster.yaml: devices[0].count``.
        got: what stands there.
        expected: what should stand there.
        fix: what to do, if that is not clear from ``expected``.
    """

    exit_code = 2

    def __init__(self, where: str, *, got: object, expected: str, fix: str | None = None) -> None:
        self.where = where
        self.got = got
        self.expected = expected
        shown = "nothing" if got is None else repr(got)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{where}: got {shown}, expected {expected}", fix=fix)


class InfeasibleError(ForeplanError):
    """No plan meets the limits; says which device lacks how much of which memory or time."""

    exit_code = 3


class MissingDataError(ForeplanError):
    """A cost is not known; ``fix`` names the command that produces it."""

    exit_code = 4


class FailedProgramError(MissingDataError):
    """A program was tried on a device and failed there: it has no cost, and no plan may use it."""


class VerificationError(ForeplanError):
    """A real run disagrees with the plan beyond the tolerance, or could not be carried out."""

    exit_code = 5


@contextmanager
def told() -> Iterator[None]:
    """End the process with an error's line and exit code, as the CLI does; for ``python -m``."""
    try:
        yield
    except ForeplanError as error:
        print(f"foreplan: error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
