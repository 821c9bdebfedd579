"""Networks that are trained together: rows of each, batches of fixed shapes, the loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foreplan.cost_models.programs.program_training import _cycle, _Plan, discrepancy, relative_loss


def test_batches_hold_rows_of_their_own_network_and_shape() -> None:
    generator = np.random.default_rng(0)
    sizes = [generator.integers(0, 3, count) for count in (70, 40)]
    plan = _Plan(sizes, 16, np.array([0, 70]), seed=0)
    seen: list[set[int]] = [set(), set()]
    steps = 0
    for size, rows in plan.epoch():
        steps += 1
        assert rows.shape == (2, 16)
        for number, (offset, own) in enumerate(zip((0, 70), sizes, strict=True)):
            local = rows[number] - offset
            assert np.all((local >= 0) & (local < len(own)))
            assert np.all(own[local] == size)
            seen[number].update(local.tolist())
    assert steps == plan.steps
    assert seen == [set(range(70)), set(range(40))]  # an epoch meets every row


def test_a_network_without_rows_of_a_shape_gets_shorter_ones() -> None:
    plan = _Plan([np.array([0, 0, 2]), np.array([0, 1, 1])], 4, np.array([0, 3]), seed=0)
    for size, rows in plan.epoch():
        assert rows[0].max() < 3 <= rows[1].min(), size


def test_relative_loss_is_the_relative_error_up_to_a_factor_of_two() -> None:
    off = torch.log(torch.tensor([1.5, 0.75, 1.0]))
    assert float(relative_loss(off)) == pytest.approx((0.5 + 0.25 + 0.0) / 3, rel=1e-5)
    far = torch.tensor([3.0], requires_grad=True)
    relative_loss(far).backward()
    assert float(far.grad) == pytest.approx(2.0)  # type: ignore[arg-type]


def test_discrepancy_needs_two_domains() -> None:
    torch.manual_seed(0)
    sample = torch.rand(40, 4)
    sample[:20] += 0.5
    two = torch.tensor([0] * 20 + [1] * 20)
    assert float(discrepancy(sample, torch.zeros(40))) == 0
    assert float(discrepancy(sample, two)) > 0.1


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [_cycle(share) for share in np.linspace(0, 1, 101)]
    assert max(rates) == pytest.approx(1, abs=1e-3)
    assert np.argmax(rates) == 10
    assert rates[-1] < 1e-4
