"""read_as_released: measured programs with the leaves that CDMPP's release has.

``python -m foreplan.cost_models.programs.baselines.released_table --data FOLDER -o FILE`` writes
them to a file, for machines without TVM (``program_crossval --table FILE``).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from foreplan.cost_models.programs.baselines.store_features import StoreFeatureEncoder
from foreplan.cost_models.programs.program_data import read_programs
from foreplan.cost_models.programs.program_store import write_table
from foreplan.cost_models.programs.program_table import ProgramTable
from foreplan.datasets.storage import exclusive
from foreplan.errors import SpecError, told

#: What files of such programs say of their leaves.
ENCODER = "tvm-store-features"


def read_as_released(paths: Sequence[Path]) -> ProgramTable:
    """Read measured programs with the leaves that CDMPP's release has; needs TVM.

    Args:
        paths: as of `read_programs`.

    Raises:
        MissingDataError: no TVM, or no programs.
        SpecError: a program that TVM cannot lower.
    """
    read = read_programs(paths, encoder=StoreFeatureEncoder())
    if read.unsupported:
        reason = read.unsupported[0].reason
        raise SpecError("--data", got=reason, expected="programs that TVM can lower, for cdmpp")
    return read.table


def main(arguments: Iterable[str] | None = None) -> None:
    """Write a file of programs as CDMPP's release describes them."""
    parser = argparse.ArgumentParser(description="Programs as CDMPP's release describes them.")
    parser.add_argument("--data", action="append", required=True, type=Path)
    parser.add_argument("-o", "--output", required=True, type=Path)
    options = parser.parse_args(None if arguments is None else list(arguments))
    with exclusive(options.output, file=True):
        write_table(read_as_released(options.data), options.output, ENCODER)


if __name__ == "__main__":
    with told():
        main()
