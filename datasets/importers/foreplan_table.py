"""Format ``foreplan``: what `operator_table.write_operators` wrote, or a person's own table of it.

Shape legend: ``N`` rows of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from foreplan.datasets.importers import helix
from foreplan.datasets.importers._columns import Columns
from foreplan.datasets.sweeps.map_functions import MAP_FUNCTIONS
from foreplan.datasets.sweeps.operator_table import (
    DIMS,
    KINDS,
    UNKNOWN,
    OperatorTable,
    operator_table,
)
from foreplan.errors import SpecError

_COLUMNS = ("op", "kind", "dtype", "library", "device", "latency_s")

#: Dimensions that may be 0: no padding, no window, a whole prompt, nothing read or computed.
_MAY_BE_ZERO: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("conv", "conv_input_gradient", "conv_weight_gradient"),
            frozenset({"padding", "groups", "channels_last", "bias", "line"}),
        ),
        **dict.fromkeys(("bmm", "linear"), frozenset({"turned"})),
        # Of how many channels, the first sweep did not say.
        **dict.fromkeys(
            ("batchnorm", "batchnorm_gradient"),
            frozenset({"channels", "training", "channels_last"}),
        ),
        "layernorm": frozenset({"rms", "channels", "channels_last"}),
        "layernorm_gradient": frozenset({"channels", "channels_last"}),
        "elementwise": frozenset(
            {"inputs", "cost", "strided", "broadcast", "converts", "kernels", "longest", "function"}
        ),
        **dict.fromkeys(("pool", "pool_gradient"), frozenset({"channels_last", "average", "side"})),
        **dict.fromkeys(("reduction", "embedding", "embedding_gradient"), frozenset({"strided"})),
        **dict.fromkeys(
            ("context_attention", "context_attention_gradient", "generation_attention"),
            frozenset({"window", "masks", "strided", "training", "converts", "broadcast"}),
        ),
        "collective": frozenset({"pattern"}),
        "decoder_layer": frozenset({"context"}),
    }
)

#: What is no count of anything: the arithmetic of an element beside an addition's.
_RELATIVE = frozenset({"cost"})


def convert(columns: Columns) -> OperatorTable:
    """Read the table.

    A linear without ``b`` has a batch of 1; any other size that a row's kind needs has to be there,
    because a size of 0 would be priced as no work at all. Rows that name no device ran on the
    reader's own, if it was given one.

    Raises:
        SpecError: missing columns, an unknown kind, a row without a device where none is given, a
            size that is missing, below 0 or no whole number, a latency that is not positive.
    """
    given = () if columns.device is None else ("device",)
    absent = [name for name in _COLUMNS if not columns.has(name) and name not in given]
    if absent:
        raise SpecError(
            columns.where,
            got="no column " + ", ".join(absent),
            expected=f"the columns {', '.join(_COLUMNS)} and the sizes of each kind, such as m, n "
            "and k of a linear",
        )
    kind = columns.texts("kind")
    for name in sorted(set(kind)):
        if name not in KINDS and name != UNKNOWN:
            raise SpecError(
                f"{columns.where}: column kind", got=name, expected="one of " + ", ".join(KINDS)
            )
    dims = {name: columns.numbers(name, default=0.0) for name in DIMS}
    left_out = np.isnan(columns.numbers("b", default=np.nan))
    dims["b"] = np.where(left_out & (kind == "linear"), 1.0, dims["b"])
    _refuse_wrong(columns, kind, dims)
    library, device = columns.texts("library"), columns.devices("device")
    helix_rows = library == helix.LIBRARY
    return operator_table(
        op=columns.texts("op"),
        kind=kind,
        dtype=columns.texts("dtype"),
        library=library,
        device=device,
        dims=dims,
        latency_s=columns.seconds("latency_s"),
        source_row=columns.numbers("source_row", default=0.0).astype(np.int64),
        kernel=columns.texts("kernel", default=""),
        # An imported table keeps Helix's names, which say less than the zoo's.
        devices=helix.figures(set(device[helix_rows]) - set(device[~helix_rows])),
    )


def _refuse_wrong(
    columns: Columns, kind: NDArray[np.object_], dims: Mapping[str, NDArray[np.float64]]
) -> None:
    """Refuse a row (of N) without a size that its kind needs, or with a fraction of one."""
    for name, sizes in KINDS.items():
        rows = kind == name
        for size in sizes if rows.any() else ():
            optional = size in _MAY_BE_ZERO.get(name, ())
            bad = rows & ~((dims[size] >= 0) if optional else (dims[size] > 0))
            if size not in _RELATIVE:
                bad |= rows & (dims[size] != np.floor(dims[size]))
            if bad.any():
                row = int(np.argmax(bad))
                least = 0 if optional else 1
                number = "a number" if size in _RELATIVE else "a whole number"
                raise SpecError(
                    f"{columns.place(row)}, column {size}",
                    got=_stated(columns, size, row),
                    expected=f"{number} of at least {least}: a {name} has {', '.join(sizes)}",
                )
    unknown = dims["function"] > len(MAP_FUNCTIONS)
    if unknown.any():
        row = int(np.argmax(unknown))
        raise SpecError(
            f"{columns.place(row)}, column function",
            got=float(dims["function"][row]),
            expected=f"at most {len(MAP_FUNCTIONS)}: a function that sweeps time by name",
            fix="the table may come from a later version of foreplan; update it",
        )


def _stated(columns: Columns, size: str, row: int) -> float | None:
    """What a row says of a size; ``None`` where its cell is empty or there is no such column."""
    value = float(columns.numbers(size, default=np.nan)[row])
    return None if np.isnan(value) else value
