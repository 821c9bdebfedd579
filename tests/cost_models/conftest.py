"""Random schedules for the property tests of simulator and timeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from foreplan.cost_models.costs import HostLaunch
from foreplan.cost_models.schedule import Memory, Schedule
from foreplan.cost_models.schedule_builder import ScheduleBuilder

RESOURCES = [("compute",), ("compute",), ("send",), ("compute", "send"), ()]


@dataclass(frozen=True)
class Case:
    """A schedule that can run, its durations, and what the actions were built from."""

    schedule: Schedule
    duration: np.ndarray[Any, np.dtype[np.float64]]
    rows: list[dict[str, Any]]

    def interleaved(self, order: list[int]) -> Case:
        """The same lists of each rank, added in another order (a permutation of the actions)."""
        place = {old: new for new, old in enumerate(order)}
        builder = ScheduleBuilder(self.schedule.devices)
        for old in order:
            row = dict(self.rows[old])
            row["dependencies"] = [place[d] for d in row["dependencies"]]
            builder.add(**row)
        return Case(builder.build(), self.duration[order], [self.rows[old] for old in order])


@pytest.fixture(scope="session")
def random_case() -> Callable[..., Case]:
    """``random_case(data, shared=..., meetings=..., pressure=...)`` draws a `Case`."""

    def draw(
        data: st.DataObject, *, shared: bool = False, meetings: bool = False, pressure: bool = False
    ) -> Case:
        ranks = data.draw(st.integers(1, 4), label="ranks")
        count = data.draw(st.integers(0, 16), label="actions")
        rows: list[dict[str, Any]] = []
        seconds: list[float] = []
        meeting = 0
        while len(rows) < count:
            known = len(rows)
            together = meetings and ranks > 1 and data.draw(st.integers(0, 4)) == 0
            who = range(ranks) if together else [data.draw(st.integers(0, ranks - 1))]
            for rank in who:
                resources = data.draw(st.sampled_from(RESOURCES))
                if shared and not together and data.draw(st.booleans()):
                    resources = (*resources, data.draw(st.sampled_from(["shared:a", "shared:b"])))
                earlier = st.lists(st.integers(0, known - 1), max_size=3) if known else st.just([])
                memory = st.builds(
                    Memory, st.sampled_from("xy"), st.integers(0, 5), st.integers(0, 5)
                )
                strains = st.sampled_from([0.0, 0.5, 1.0] if pressure else [0.0])
                rows.append(
                    {
                        "op": data.draw(st.sampled_from("FB")),
                        "rank": rank,
                        "work": HostLaunch(0),
                        "dependencies": data.draw(earlier),
                        "resources": resources,
                        "rendezvous": meeting if together else -1,
                        "pressure": data.draw(strains),
                        "memory": data.draw(st.none() | memory),
                    }
                )
                # Eighths are exact, so that different orders of adding give equal times.
                seconds.append(data.draw(st.integers(0, 16)) / 8)
            meeting += together
        builder = ScheduleBuilder([f"cpu{r}" for r in range(ranks)])
        for row in rows:
            builder.add(**row)
        return Case(builder.build(), np.asarray(seconds, dtype=np.float64), rows)

    return draw
