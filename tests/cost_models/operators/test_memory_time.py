"""Which weights stay in L2 from call to call, and inputs that are rounded before a product."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.operators.memory_time import share_from_memory
from foreplan.cost_models.operators.operator_work import operator_work
from foreplan.cost_models.operators.rounded_inputs import rounding_s
from foreplan.datasets import device_zoo
from foreplan.datasets.sweeps.operator_table import OperatorTable, operator_table, texts

GRAPH = "torch_graph-2.11-cuda"


def product(
    library: str, dtype: str = "bfloat16", *, device: str = "h100_sxm", m: int = 1, n: int = 4096,
    k: int = 2560,
) -> OperatorTable:  # fmt: skip
    """A weight of 21 MB in 16 bits, if nothing else is said."""
    size = {"b": 1, "m": m, "n": n, "k": k}
    return operator_table(
        op=texts([f"gemm/{dtype}"]), kind=texts(["linear"]), dtype=texts([dtype]),
        library=texts([library]), device=texts([device]),
        dims={name: np.array([float(value)]) for name, value in size.items()},
        latency_s=np.array([np.nan]),
    )  # fmt: skip


def share(table: OperatorTable) -> float:
    l2 = np.array([float(device_zoo.device(name).l2_bytes or np.nan) for name in table.device])
    return float(share_from_memory(table, operator_work(table), {"l2": l2})[0])


def test_a_weight_that_is_used_again_stays_where_the_cache_holds_it() -> None:
    assert share(product("sglang")) < 0.05
    assert share(product("sglang", n=16384)) > 0.9  # 84 MB of 50
    assert share(product("sglang", "fp8", n=8192)) < 0.05


def test_five_weights_in_turn_need_five_times_the_cache() -> None:
    assert share(product("trtllm")) > 0.95  # 105 MB of 50
    assert share(product("trtllm", n=1024)) < 0.1
    assert share(product("trtllm", device="l40s")) == pytest.approx(0.6, abs=0.15)  # of 96


@given(n=st.integers(1, 1 << 16), k=st.integers(1, 1 << 14))
def test_weights_of_our_own_graphs_come_from_memory(n: int, k: int) -> None:
    assert share(product(GRAPH, n=n, k=k)) == 1.0
    assert share(product("torch-2.1", "float32", n=n, k=k)) <= 1.0


@given(m=st.integers(1, 8192), more=st.integers(0, 8192))
def test_inputs_are_rounded_where_the_table_has_it(m: int, more: int) -> None:
    def seconds(library: str, dtype: str, m: int = m) -> float:
        table = product(library, dtype, m=m)
        return float(rounding_s(table, operator_work(table))[0])

    assert seconds("sglang", "bfloat16") == seconds("trtllm", "int8_wo") == 0.0
    assert seconds("trtllm", "fp8") > seconds("sglang", "fp8") >= 1.2e-6
    assert seconds("sglang", "int8_wo") >= 9 * 1.2e-6  # by torch, kernel after kernel
    assert seconds("sglang", "int8_wo", m + more) >= seconds("sglang", "int8_wo")


def test_an_input_stays_while_weights_go_round() -> None:
    tall, square = product("trtllm", m=8192, n=64, k=2560), product("trtllm", m=64, n=8192, k=2560)
    assert share(tall) < 0.4  # 42 MB of inputs that every call reads, in 50
    assert share(square) > 0.9  # 42 MB of weights, five times


def test_the_scale_of_a_tensor_is_looked_for_before_it_is_rounded() -> None:
    def seconds(library: str) -> float:
        table = product(library, "fp8", m=8192)
        return float(rounding_s(table, operator_work(table))[0])

    moved = 8192 * 2560 * 2 / (0.85 * 3.35e12)  # 16 bits are read once more
    assert seconds("trtllm") - seconds("sglang") == pytest.approx(3 * 1.2e-6 + moved, rel=0.01)
