"""Weights of kinds of work, and what one device is slower at than others."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan.cost_models.programs.program_estimate import PART_NAMES
from foreplan.cost_models.programs.program_scale import DeviceFigures, ProgramScale


def test_scale_finds_the_weights_of_a_sum() -> None:
    generator = np.random.default_rng(0)
    parts = np.exp(generator.normal(-9, 2, (400, len(PART_NAMES))))
    parts[:, 3:] = 0
    cpu = np.zeros(400, dtype=bool)
    wanted = parts[:, :3] @ [2.0, 0.5, 0.1]
    scale = ProgramScale.fit(parts, cpu, wanted)
    np.testing.assert_allclose(scale.weights[0, :3], [2.0, 0.5, 0.1], rtol=0.05)


def test_scale_finds_what_a_device_is_slower_at() -> None:
    """Two CPUs that differ in one kind of work and in clock, and what others take after them."""
    generator = np.random.default_rng(0)
    parts = np.zeros((800, len(PART_NAMES)))
    parts[:, :3] = np.exp(generator.normal(-9, 2, (800, 3)))
    device, cpu = np.repeat(["a", "b"], 400), np.ones(800, dtype=bool)
    wanted = parts[:, :3] @ [2.0, 0.5, 0.1]
    wanted[400:] = 3 * parts[400:, :3] @ [2.0, 0.5, 0.4]
    nan = float("nan")
    values = {"a": np.array([9.0, 1.0, nan]), "b": np.array([10.0, nan, 3.0])}
    figures = {name: DeviceFigures("chip", own) for name, own in values.items()}
    scale = ProgramScale.fit(parts, cpu, wanted, device, figures)
    weights = scale.of_rows(cpu, device, figures)
    np.testing.assert_allclose(weights[0, :3], [2.0, 0.5, 0.1], rtol=0.1)
    np.testing.assert_allclose(weights[400, :3], [6.0, 1.5, 1.2], rtol=0.1)

    def of_unknown(cpu: bool, *known: float, chip: str = "chip") -> Any:
        own = {"c": DeviceFigures(chip, np.array(known))}
        return scale.of_rows(np.array([cpu]), np.array(["c"]), own)[0]

    np.testing.assert_array_equal(of_unknown(True, 9.4, 7.0, 3.0), weights[400])  # 0.4 from b
    np.testing.assert_array_equal(of_unknown(True, 9.4, 1.0, 4.0), weights[0])  # 0.4 from a
    np.testing.assert_array_equal(of_unknown(True, 9.4, 1.0, 4.0, chip="new"), weights[0])
    np.testing.assert_array_equal(of_unknown(False, 9.4, 1.0, 4.0), scale.weights[0])
    # Of two chips an unknown third takes the mean, a device of one of them that one's.
    figures["b"] = DeviceFigures("other", values["b"])
    scale = ProgramScale.fit(parts, cpu, wanted, device, figures)
    both = np.sqrt(weights[0] * weights[400])
    np.testing.assert_allclose(of_unknown(True, 9.4, 1.0, 4.0, chip="new"), both)
    np.testing.assert_array_equal(of_unknown(True, 9.0, 1.0, 9.0, chip="other"), weights[400])
    assert not ProgramScale.fit(parts, cpu, wanted, np.full(800, "a")).devices
