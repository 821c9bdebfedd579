"""Launch scripts: environment, command and flags as text, and back."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from foreplan.errors import SpecError

#: The caller's model, a word that the shell expands.
MODEL = "${MODEL:?folder of the model}"
#: The script's own folder, another: scripts are started from anywhere.
HERE = '$(dirname "$0")'


def script(
    command: Sequence[str],
    flags: Mapping[str, str],
    environment: Mapping[str, str],
    notes: Sequence[str] = (),
    last: Sequence[str] = (),
) -> str:
    """A bash script that exports ``environment`` and runs ``command`` with ``flags``.

    Arguments that the caller adds go to the command, before the ``last`` words. The shell expands
    what begins as `MODEL` or `HERE` does, and no other word.
    """
    lines = ["#!/usr/bin/env bash", *(f"# {note}" for note in notes), "set -euo pipefail"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    # In the shell's place: what stops the script stops the launcher.
    words = [" ".join(["exec", *map(_quoted, command)])]
    words += [f"  {name} {_quoted(value)}" for name, value in flags.items()]
    rest = " ".join(['  "$@"', *map(_quoted, last)])
    return "\n".join([*lines, " \\\n".join([*words, rest]), ""])


def _quoted(word: str) -> str:
    return f'"{word}"' if word.startswith(("${MODEL:?", HERE)) else shlex.quote(word)


def parse(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Environment and flags of a script that `script` wrote.

    Raises:
        SpecError: not such a script.
    """
    environment: dict[str, str] = {}
    flags: dict[str, str] = {}
    for line in text.splitlines():
        words = shlex.split(line.rstrip("\\"), comments=True)
        if len(words) == 2 and words[0] == "export":
            name, _, value = words[1].partition("=")
            environment[name] = value
        elif len(words) == 2 and words[0].startswith("-"):
            flags[words[0]] = words[1]
    if not flags:
        raise SpecError("launch script", got="no flags", expected="a script of this exporter")
    return environment, flags
