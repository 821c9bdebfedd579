"""`check_progress`: whether the programs of all ranks come to their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foreplan.errors import SpecError
from foreplan.planner.verify.partners import Partners

if TYPE_CHECKING:
    from foreplan.planner.verify.rank_program import RankProgram


def check_progress(programs: Sequence[RankProgram], partners: Partners) -> None:
    """Walk all programs together, without running anything, and see that each comes to its end.

    Args:
        programs: one a rank.
        partners: of their schedule.

    Raises:
        SpecError: ranks that wait for each other; names who waits for whom.
    """
    others: dict[int, tuple[int, ...]] = {}
    for receive, send in partners.sent_by.items():
        others[receive], others[send] = (send,), (receive,)
    for meeting in partners.members.values():
        for index in meeting:
            others[index] = tuple(other for other in meeting if other != index)
    posted: set[int] = set()
    places = [0] * len(programs)

    def stuck_at(rank: int) -> int | None:
        """Advance a rank; the action of another rank that it waits for, if any."""
        steps = programs[rank].steps
        while places[rank] < len(steps):
            step = steps[places[rank]]
            for k in step.waits:
                for partner in others[steps[k].index]:
                    if partner not in posted:
                        return partner
            posted.add(step.index)
            if step.blocking and step.kind != "run":
                for partner in others[step.index]:
                    if partner not in posted:
                        return partner
            places[rank] += 1
        return None

    moved = True
    while moved:
        former = list(places), len(posted)
        waits = [stuck_at(rank) for rank in range(len(programs))]
        moved = (list(places), len(posted)) != former
    shown = [
        f"rank {rank} at {programs[rank].steps[places[rank]].action.label} waits for "
        f"{partners.actions[needed].label} of rank {partners.actions[needed].rank}"
        for rank, needed in enumerate(waits)
        if needed is not None
    ]
    if shown:
        more = [f"{len(shown) - 4} more ranks"] if len(shown) > 4 else []
        raise SpecError(
            "schedule", got="a deadlock: " + ", ".join(shown[:4] + more),
            expected="an order in which every rank comes to its end",
        )  # fmt: skip
