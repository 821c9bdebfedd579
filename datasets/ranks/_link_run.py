"""The processes of `foreplan.datasets.ranks.links` as their parent sees them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from foreplan.datasets.timing.child_process import module_command, module_environment
from foreplan.errors import MissingDataError


def run_ranks(
    settings: Sequence[Mapping[str, Any]],
    environments: Sequence[Mapping[str, str]],
    timeout_s: float,
) -> dict[str, Any]:
    """Start ranks, wait for the first one's answer, and leave none behind.

    Args:
        settings: of each rank of this host; see `foreplan.datasets.ranks._link_rank`.
        environments: of their processes.
        timeout_s: their own limit; a rank that does not end then is ended.

    Raises:
        MissingDataError: a rank failed, died or did not end; says which, and at what.
    """
    with contextlib.ExitStack() as stack:
        ranks: list[subprocess.Popen[bytes]] = []
        answers = []
        for setting, environment in zip(settings, environments, strict=True):
            answer = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                module_command(
                    "foreplan.datasets.ranks._link_rank",
                    json.dumps({**setting, "parent": os.getpid()}),
                ),
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=subprocess.DEVNULL,
                env=module_environment(environment),
            )
            stack.callback(_end, process)
            ranks.append(process)
            answers.append(answer)
        _wait(ranks, time.monotonic() + timeout_s + 20.0)
        codes = [process.poll() for process in ranks]
        found = [_answer(answer) for answer in answers]
    if all(code == 0 for code in codes) and "samples" in found[0]:
        return found[0]
    raise MissingDataError(
        f"links were not measured: {_cause(settings, codes, found, timeout_s)}",
        fix=what_to_do(settings[0]),
    )


def _cause(
    settings: Sequence[Mapping[str, Any]], codes: Sequence[int | None],
    found: Sequence[Mapping[str, Any]], timeout_s: float,
) -> str:  # fmt: skip
    """Who failed at what: a rank that died, else one that says why, else one that does not end."""

    def at(rank: int) -> str:
        name = f"rank {settings[rank]['rank']} ({settings[rank]['device']})"
        return f"{name} at {found[rank].get('doing', 'its start')}"

    silent = [rank for rank, answer in enumerate(found) if "error" not in answer]
    died = [rank for rank in silent if codes[rank] not in (None, 0)]
    if died:
        return f"{at(died[0])} died with code {codes[died[0]]}"
    said = [(rank, str(answer["error"])) for rank, answer in enumerate(found) if "error" in answer]
    if said:
        # The first to fail tells the cause; the others only lost their peer.
        rank, error = said[0]
        return f"{error}, {at(rank)}" if "doing" in found[rank] else error
    return f"{at(silent[0])} was not done after {timeout_s:g} s"


def what_to_do(setting: Mapping[str, Any]) -> str:
    """What a user can do where links were not measured."""
    if "port" not in setting:
        return "run it again, with less other work on the cores"
    endpoint = f"{setting['host']}:{setting['port']}"
    side = "--link" if setting["rank"] == 0 else "--serve"
    return f"run 'foreplan profile {side} {endpoint}' on the other host"


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    while time.monotonic() < deadline:
        codes = [rank.poll() for rank in ranks]
        if any(code not in (None, 0) for code in codes):
            # Give the others a moment to say why, then end them all.
            time.sleep(0.5)
            return
        if all(code == 0 for code in codes):
            return
        time.sleep(0.02)


def _answer(file: Any) -> dict[str, Any]:
    """What a rank has said, later words over earlier ones: what it did last, and its answer."""
    file.seek(0)
    answer: dict[str, Any] = {}
    for line in file.read().decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            answer |= json.loads(line)
    return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
