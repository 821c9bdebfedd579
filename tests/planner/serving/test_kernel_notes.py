"""A plan says where its weights are priced with a kernel that the device cannot run."""

from __future__ import annotations

import pytest

import foreplan

ASKED = {"batch": 4, "prompt_tokens": 16, "new_tokens": 4}


@pytest.mark.parametrize(
    ("kind", "device", "bits", "said"),
    [
        ("serving", "mi300x", 8, True),
        ("serving", "t4", 8, True),
        ("replicas", "2xt4", 4, True),
        ("serving", "a100-80g", 8, False),  # has what the kernel is written in
        ("serving", "mi300x", 16, False),  # runs torch's own
    ],
)
def test_kernels_that_a_device_does_not_have(kind: str, device: str, bits: int, said: bool) -> None:
    made = foreplan.plan(kind, "llama-3.2-1b", device, {**ASKED, "bits": [bits]}, costs="roofline")
    lines = [line for line in made.assumptions if "fused kernel" in line]
    assert bool(lines) == said
    if said:
        assert lines[0].startswith(f"weights of {bits} bits on {device[-6:].removeprefix('2x')} ")
