"""Steps of a long command, in a log."""

from __future__ import annotations

import io
import time

from rich.console import Console

from foreplan.planner.api import plan
from foreplan.planner.steps import told_step, told_steps


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


def test_a_command_that_takes_long_tells_what_it_is_at_and_what_follows() -> None:
    log = io.StringIO()
    with told_steps(Console(file=log), "reading", logged=False, quick_s=0.05) as say:
        say("deciding")
        while not log.getvalue():
            time.sleep(0.01)
        say("comparing")
    lines = log.getvalue().splitlines()
    assert [line.partition(" s  ")[2] for line in lines] == ["deciding", "comparing"]


def test_a_step_is_a_line_of_a_log() -> None:
    log = io.StringIO()
    with told_step(Console(file=log), "measuring [links]"):
        assert log.getvalue() == "measuring [links]\n"


def test_a_plan_tells_its_steps() -> None:
    told: list[str] = []
    plan(
        "serving", "tiny-llama-random", "2xt4",
        {"batch": 2, "prompt_tokens": 8, "new_tokens": 2}, costs="roofline", progress=told.append,
    )  # fmt: skip
    assert told[0] == "deciding: serving on 2 devices"
    assert len(told) == 3
