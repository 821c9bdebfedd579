"""Small training workloads for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foreplan.planner.precision.spec import PrecisionWorkload

OPTIONS = {
    "byte_lm": {"width": 32, "layers": 2, "heads": 2, "context": 16},
    "digits_mlp": {"width": 32},
    "digits_cnn": {"width": 8},
}


@pytest.fixture
def workload() -> Callable[..., PrecisionWorkload]:
    """Workload of a small network, in a few buckets."""

    def make(network: str = "byte_lm", **more: object) -> PrecisionWorkload:
        fields = {
            "batch": 4, "network": network, "network_options": OPTIONS[network],
            "first_bucket_bytes": 4096, "bucket_bytes": 20_000, **more,
        }  # fmt: skip
        return PrecisionWorkload.model_validate(fields)

    return make
