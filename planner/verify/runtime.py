"""`Runtime`: carries out one rank's program with the planner's kernels and says when each step ran.

It knows nothing of what is computed. Steps are walked in the order of the program (see
`rank_program`): ``send``, ``recv`` and collectives are posted to the channels, everything else goes
to ``kernels.run``; a posted step is waited for where a step needs it.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from foreplan.errors import VerificationError
from foreplan.planner.base import Kernels
from foreplan.planner.verify.channels import Channels
from foreplan.planner.verify.clock import Clock, HostClock
from foreplan.planner.verify.connections import ConnectionLost
from foreplan.planner.verify.rank_program import RankProgram

_RUN, _PAYLOAD, _BUFFER, _NOTHING = range(4)
#: Messages that a rank is said to wait for; the first ones hold up the rest.
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Record:
    """When the steps of one rank ran, in the order of its list in the schedule.

    Attributes:
        start_ns: nanoseconds of the host's monotonic clock; of a transfer, when it was posted.
        end_ns: of a transfer over gloo, when the rank had waited for it: an upper bound where
            nothing was waiting.
    """

    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]


class Runtime:
    """One rank of a run.

    Args:
        program: what to do.
        kernels: the planner's kernels of this rank.
        channels: open connections to the other ranks, which make their runtimes at the same time.
        clock: the clock that the channels stamp too.
    """

    def __init__(
        self, program: RankProgram, kernels: Kernels, channels: Channels, clock: Clock
    ) -> None:
        self._program = program
        self._kernels = kernels
        self._channels = channels
        self._clock = clock
        codes = {"run": _RUN, "send": _PAYLOAD, "recv": _BUFFER, "collective": _PAYLOAD}
        nothing: frozenset[str] = getattr(kernels, "computes_nothing", frozenset())
        self._walk = [
            (
                place, _NOTHING if step.action.op in nothing else codes[step.kind], step,
                step.action, step.waits, step.blocking,
            )
            for place, step in enumerate(program.steps)
        ]  # fmt: skip
        fixed = getattr(kernels, "keeps_buffers", False)
        channels.prepare(
            [step.tag for step in program.steps if step.kind == "send"],
            {s.tag: kernels.buffer(s.action) for s in program.steps if s.kind == "recv"}
            if fixed else None,
            [(s, kernels.payload(s.action)) for s in program.steps if s.kind == "collective"]
            if getattr(kernels, "keeps_collected", False) else (),
        )  # fmt: skip
        order = sorted(range(len(program.steps)), key=lambda k: program.steps[k].index)
        self._in_schedule = tuple(order)
        self._place = 0

    def execute(self, meet: Callable[[], None] = lambda: None) -> Record:
        """Run the program once.

        Args:
            meet: returns when every rank is about to start.

        Raises:
            VerificationError: a kernel failed; names the action.
            ConnectionLost: another rank has gone.
        """
        start, end, pass_by = self._clock.start, self._clock.end, self._clock.pass_by
        post, wait = self._channels.post, self._channels.wait
        run, payload, buffer = self._kernels.run, self._kernels.payload, self._kernels.buffer
        collecting = gc.isenabled()
        # What the last step left is young. Looking at all that a process has takes 0.1-0.3 s
        # (measured, torch and the planners loaded), which a training loop would pay in each step.
        gc.collect(1)
        gc.disable()  # a collection in the middle would be timed as somebody's compute
        self._place = 0
        try:
            meet()
            self._clock.begin()
            for place, code, step, action, waits, blocking in self._walk:
                self._place = place
                for posted in waits:
                    wait(posted)
                if code == _RUN:
                    start(place)
                    run(action)
                    end(place)
                elif code == _NOTHING:
                    pass_by(place)
                else:
                    post(place, step, payload(action) if code == _PAYLOAD else buffer(action))
                    if blocking:
                        wait(place)
            for posted in self._program.pending:
                wait(posted)
            starts, ends = self._clock.stamps()
        except ConnectionLost:
            raise
        except Exception as error:  # a planner's kernels may fail in any way
            action = self._program.steps[self._place].action
            # A GPU reports late: the action that failed may be an earlier one.
            word = "at" if isinstance(self._clock, HostClock) else "at or before"
            raise VerificationError(f"{word} {action.label}: {describe(error)}") from error
        finally:
            if collecting:
                gc.enable()
        return Record(
            tuple(starts[k] for k in self._in_schedule), tuple(ends[k] for k in self._in_schedule)
        )

    def standing(self) -> str:
        """Where a run is, for a message about one that does not end; from any thread."""
        steps, here = self._program.steps, self._place
        words = f"the host at step {here + 1} of {len(steps)}, {steps[here].action.label}"
        behind = [step for k, step in enumerate(steps[: here + 1]) if not self._clock.ended(k)]
        running = next((step for step in behind if step.kind == "run"), None)
        if running is not None and running is not steps[here]:
            words += f"; the device at {running.action.label}"
        waiting = [step for step in behind if step.kind != "run"]
        if waiting:
            shown = ", ".join(
                f"{step.action.label} of ranks {' '.join(map(str, step.group))}"
                for step in waiting[:_SHOWN]
            )
            more = f" and {len(waiting) - _SHOWN} more" if len(waiting) > _SHOWN else ""
            words += f"; not over: {shown}{more}"
        return words


def describe(error: BaseException) -> str:
    """One line about an exception of a stranger's code: type, text and where it was raised."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) > 300:
        text = text[:297] + "..."
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}"
