"""`PaceProgram`: a program of a profile by which a verification tells how fast a machine runs.

A machine changes its speed, so that an error of a plan cannot be told from one of the machine.
*Pace* is the time that programs of a device's profile take now over what they took when it was
measured: 1.3 is a machine that runs 1.3 times as long.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.specs import StrictModel


class PaceProgram(StrictModel):
    """A program to time again.

    Attributes:
        op, dims, variant: the program, as a row of a profile has it.
        expected_s: seconds of a call by the profile, times what the plan's prices say that one
            rank takes longer in a pass, and ranks of the host from each other when all run it.
        priced_s: seconds of a rank's predicted compute that rest on the program; its weight.
        calls: of it in one of the rank's actions at most, as many as are timed in a row, each on
            operands of its own.
    """

    op: str
    dims: dict[str, Annotated[int, Field(ge=1)]]
    variant: str
    expected_s: Annotated[float, Field(gt=0)]
    priced_s: Annotated[float, Field(gt=0)]
    calls: Annotated[int, Field(ge=1)] = 1

    @property
    def program(self) -> Program:
        """What is to be timed.

        Raises:
            SpecError: there is no such program.
        """
        return program(self.op, Variant.parse(self.variant), **self.dims)


class RankPace(StrictModel):
    """What to time on one rank of the cluster.

    Attributes:
        device: label of the rank.
        programs: those that most of its predicted compute rests on, most first.
        in_pass: a processor's are timed behind one another, as a pass that the profile knows;
            else each by itself, as the profile timed it.
        issued: the plan's calls are issued one by one, so that a call takes the longer of a GPU and
            of its host.
    """

    device: str
    programs: tuple[PaceProgram, ...]
    in_pass: bool = True
    issued: bool = False
