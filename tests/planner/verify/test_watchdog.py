"""A phase that hangs is named, with the place where it stands; others are left alone."""

from __future__ import annotations

import subprocess
import sys
import threading

from foreplan.planner.verify.watchdog import Watchdog

#: Far beyond what a busy machine needs; nothing waits so long where the code is right.
PATIENCE_S = 60.0


def test_a_phase_that_hangs_is_named_with_its_place() -> None:
    said: list[str] = []
    ended = threading.Event()

    def stands_here() -> bool:
        return ended.wait(PATIENCE_S)

    with Watchdog(said.append, ended.set).phase("meeting nobody", 0.01):
        assert stands_here()
    (text,) = said
    assert text.startswith("meeting nobody took more than 0 s; it stands at wait, line ")


def test_what_else_is_known_is_said_unless_asking_hangs_too() -> None:
    never = threading.Event()
    for detail, known in ((lambda: "asleep", "; asleep"), (lambda: str(never.wait()), "")):
        said: list[str] = []
        ended = threading.Event()
        with Watchdog(said.append, ended.set).phase("waiting", 0.01, detail):
            assert ended.wait(PATIENCE_S)
        assert said[0].partition(", line ")[2].lstrip("0123456789") == known
    never.set()


def test_a_phase_that_ends_is_left_alone() -> None:
    said: list[str] = []
    threads = threading.active_count()
    with Watchdog(said.append, lambda: said.append("ended")).phase("a moment", PATIENCE_S):
        pass
    assert not said
    assert threading.active_count() <= threads + 1  # the timer may still be on its way out


def test_the_process_ends_though_a_call_never_returns() -> None:
    code = (
        "import threading\n"
        "from foreplan.planner.verify.watchdog import Watchdog\n"
        "with Watchdog(lambda text: print(text, flush=True)).phase('waiting', 0.1):\n"
        "    threading.Event().wait()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 1
    assert done.stdout.startswith("waiting took more than 0 s; it stands at wait, line ")
