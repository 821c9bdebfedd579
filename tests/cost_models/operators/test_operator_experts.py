"""Which experts are asked for a row's kernels."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
from tests.cost_models.operator_rows import attention

from foreplan.cost_models.operators.operator_predictor import OperatorPredictor
from foreplan.cost_models.operators.prompt_kernels import prompt_s
from foreplan.datasets.sweeps.operator_table import OperatorTable

SIZES = list(product((1, 8, 64), (16, 128, 1024), (4, 8, 32, 64)))


def prompts(device: str, factor: float, *, products: str = "bfloat16") -> OperatorTable:
    """Prompts that take so many times what their structure says."""
    found = []
    row = partial(attention, device=device, products=products, cache=products)
    for b, queries, heads in SIZES:
        table, work, offer = row(b, queries, heads, 4, queries=queries)
        table.latency_s[:] = factor * prompt_s(table, work, offer)
        found.append(table)
    return OperatorTable.concat(found)


def test_prompts_hear_those_who_know_their_kernels() -> None:
    ampere, hopper = prompts("a100_sxm", 1.0), prompts("h100_sxm", 3.0)
    narrow = prompts("h100_sxm", 5.0, products="fp8")
    everyone = OperatorPredictor(trees=20).fit(OperatorTable.concat([ampere, hopper, narrow]))

    ada = prompts("l40s", 1.0)
    alone = OperatorPredictor(trees=20).fit(ampere)
    np.testing.assert_array_equal(everyone.predict(ada), alone.predict(ada))
    # Nobody knows Ada's kernels of 8 bits: all are asked.
    unknown = prompts("l40s", 1.0, products="fp8")
    assert np.all(everyone.predict(unknown) > alone.predict(unknown))
