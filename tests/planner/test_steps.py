"""Steps of a long command, in a log."""

from __future__ import annotations

import io

from rich.console import Console

from foreplan.planner.api import plan
from foreplan.planner.steps import told_steps


def test_a_log_has_a_line_for_every_step() -> None:
    log = io.StringIO()
    with told_steps(Console(file=log)) as say:
        say("deciding [all]")
        say("comparing")
    lines = log.getvalue().splitlines()
    assert [line.partition(" s  ")[2] for line in lines] == ["deciding [all]", "comparing"]


def test_a_quick_command_leaves_logs_alone() -> None:
    log = io.StringIO()
    with told_steps(Console(file=log), logged=False) as say:
        say("deciding")
    assert not log.getvalue()


def test_a_plan_tells_its_steps() -> None:
    told: list[str] = []
    plan(
        "serving", "tiny-llama-random", "2xt4",
        {"batch": 2, "prompt_tokens": 8, "new_tokens": 2}, costs="roofline", progress=told.append,
    )  # fmt: skip
    assert told[0] == "deciding: serving on 2 devices"
    assert len(told) == 3
