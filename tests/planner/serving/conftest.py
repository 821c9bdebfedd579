"""What tests of serving share: a stage against two of half its layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import pytest

from foreplan.datasets.models.model import Model
from foreplan.planner.api import load_cluster
from foreplan.planner.serving.kernels import compare_tokens, single_process_tokens
from foreplan.planner.serving.spec import ServingDecision, ServingWorkload

CheckStages = Callable[[Model, ServingWorkload, Mapping[str, str]], None]


@pytest.fixture
def check_stages(one_thread: None) -> CheckStages:
    """Assert that three layers in two stages say what they say in one, token for token."""

    def decision(cuts: tuple[int, ...], kernels: Mapping[str, str], kv_bits: int) -> object:
        stages = [
            {"rank": rank, "device": "localhost/cpu:threads=1", "start": start, "end": end,
             "bits": [16] * (end - start), "kernels": dict(kernels)}
            for rank, (start, end) in enumerate(zip((0, *cuts), (*cuts, 3), strict=True))
        ]  # fmt: skip
        return {"stages": stages, "prefill_microbatch": 2, "decode_microbatch": 4,
                "average_bits": 16, "omega": 0, "kv_bits": kv_bits}  # fmt: skip

    def check(model: Model, workload: ServingWorkload, kernels: Mapping[str, str]) -> None:
        here, _ = load_cluster("2xcpu:threads=1")
        bits = int(workload.cache_bits)
        split = [
            ServingDecision.model_validate_json(json.dumps(decision(cuts, kernels, bits)))
            for cuts in ((), (1,))
        ]
        for mode in ("reference", "forced"):
            one, two = (
                single_process_tokens(model, here, workload, each, mode, 0) for each in split
            )
            assert compare_tokens(two, one, mode).exact

    return check
