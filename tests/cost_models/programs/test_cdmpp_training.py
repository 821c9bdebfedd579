"""CDMPP's networks trained together: the stacked step against the module and PyTorch's Adam."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from foreplan.cost_models.programs import program_crossval
from foreplan.cost_models.programs.baselines import (
    CdmppReleased,
    cdmpp_training,
    fit_cdmpp_together,
)
from foreplan.cost_models.programs.baselines._cdmpp_network import cmd, mmd, network
from foreplan.cost_models.programs.baselines.cdmpp_training import (
    CdmppRows,
    CdmppSettings,
    _courses,
    _rounds,
    train_cdmpp_together,
    triangular_rate,
)
from foreplan.cost_models.programs.compact_ast import CompactAst
from foreplan.cost_models.programs.program_crossval import Job, _of_device, run
from foreplan.cost_models.programs.program_folds import Fold
from foreplan.cost_models.programs.program_table import ProgramTable
from foreplan.datasets import device_zoo
from foreplan.errors import SpecError

_WIDTH = 8


# Double precision: slopes of some biases are zero but for rounding, which Adam would blow up.
def _rows(counts: list[int], seed: int, *, labelled: bool = True) -> CdmppRows:
    generator = np.random.default_rng(seed)
    leaves = generator.random((sum(counts), _WIDTH))
    start = np.cumsum([0, *counts[:-1]]).astype(np.int64)
    device = generator.random((len(counts), 8))
    target = generator.normal(size=len(counts)) if labelled else None
    return CdmppRows(leaves, start, np.array(counts, np.int64), device, target)


def _settings(**more: Any) -> CdmppSettings:
    return CdmppSettings(
        epochs=2, batch=8, learning_rate=1e-4, weight_decay=1e-2, discrepancy="mmd",
        discrepancy_weight=1.0, discrepancy_rows=6, torch_device="cpu", seed=5, dropout=0.0,
    )._replace(**more)  # fmt: skip


def _networks(devices: bool, counts: list[list[int]]) -> list[dict[int, Any]]:
    found: list[dict[int, Any]] = []
    for number, own in enumerate(counts):
        found.append({})
        for count in own:
            torch.manual_seed(10 * number + count)
            # Narrow, and of sizes that are no multiples of four.
            found[-1][count] = network(_WIDTH, devices, count, 2, 0.0, (22, 39, 13, 27)).double()
    return found


def _gather(rows: CdmppRows, chosen: np.ndarray, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = rows.start[chosen][:, None] + np.arange(count)
    return torch.from_numpy(rows.leaves[at]), torch.from_numpy(rows.device[chosen])


def _alone(
    net: Any, own: CdmppRows, other: CdmppRows | None, steps: list[Any], settings: CdmppSettings
) -> None:
    """The release's loop: the module, PyTorch's Adam, clipping and cycle; one step a batch."""
    optimiser = torch.optim.Adam(
        net.parameters(), settings.learning_rate, weight_decay=settings.weight_decay
    )
    cycle = torch.optim.lr_scheduler.CyclicLR(
        optimiser, settings.learning_rate / 10, settings.learning_rate * 10, cycle_momentum=False
    )
    net.train()
    for labels, others in steps:
        assert own.target is not None
        wanted = torch.from_numpy(own.target[labels])
        output, hidden = net(*_gather(own, labels, net.leaves))
        difference = output - wanted
        relative = (difference.abs() / wanted.abs().clamp(min=1e-3)).mean()
        loss = 1000 * difference.square().mean() + relative
        if others is not None:
            assert other is not None
            theirs = net(*_gather(other, others, net.leaves))[1]
            measure = mmd if settings.discrepancy == "mmd" else cmd
            loss = loss + settings.discrepancy_weight * measure(hidden, theirs)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        optimiser.step()
        cycle.step()


@pytest.mark.parametrize(
    ("discrepancy", "devices"), [("mmd", False), ("cmd", True), ("none", False)]
)
def test_a_stack_takes_the_steps_of_each_network_alone(discrepancy: str, devices: bool) -> None:
    settings = _settings(discrepancy=discrepancy)
    # The second model has no programs of three leaves, and no unlabelled ones of one leaf.
    labelled = [_rows([1] * 11 + [3] * 5, 1), _rows([1] * 6, 2)]
    unlabelled: list[CdmppRows | None] = [
        _rows([1] * 4 + [3] * 9, 3, labelled=False), _rows([3] * 4, 4, labelled=False)
    ]  # fmt: skip
    plain, stacked = (_networks(devices, [[1, 3], [1]]) for _ in range(2))
    start = plain[0][1].last.weight.detach().clone()
    seen = unlabelled if discrepancy != "none" else [None, None]
    one, three = _courses(plain, labelled, seen, settings)
    for course, members in ((one, ((0, 1), (1, 1))), (three, ((0, 3),))):
        drawn = list(itertools.islice(course.batches(), 2 * settings.epochs))
        for number, (k, count) in enumerate(members):
            paired = seen[k] is not None and bool((seen[k].counts == count).any())  # type: ignore[union-attr]
            steps = [(labels[number] - (0, 16)[k], others[number] - 22 if paired else None)
                     for labels, others in drawn]  # fmt: skip
            _alone(plain[k][count], labelled[k], seen[k], steps, settings)
    train_cdmpp_together(stacked, labelled, unlabelled, settings)
    for alone, together in zip(plain, stacked, strict=True):
        for count, net in alone.items():
            found = together[count].state_dict()
            for name, tensor in net.state_dict().items():
                if tensor.is_floating_point():
                    torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-9, msg=name)
    assert float((start - plain[0][1].last.weight.detach()).abs().max()) > 2e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_on_cuda_take_the_steps_of_the_cpu() -> None:
    labelled = [_rows([1] * 11 + [3] * 5, 1), _rows([1] * 6, 2)]
    unlabelled: list[CdmppRows | None] = [_rows([1] * 4 + [3] * 9, 3, labelled=False), None]
    found = []
    for device in ("cpu", "cuda"):
        nets = [{count: net.to(device) for count, net in own.items()}
                for own in _networks(True, [[1, 3], [1]])]  # fmt: skip
        train_cdmpp_together(nets, labelled, unlabelled, _settings(torch_device=device))
        found.append({
            (k, count, name): tensor.cpu() for k, own in enumerate(nets)
            for count, net in own.items() for name, tensor in net.state_dict().items()
        })  # fmt: skip
    for key, tensor in found[0].items():
        torch.testing.assert_close(found[1][key], tensor, rtol=1e-7, atol=1e-9)


def test_the_rate_is_of_the_precision_that_cudas_adam_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On CUDA a rate of networks in double precision was refused; a processor takes either.
    seen = []

    def step(*given: Any) -> None:
        seen.append((given[-1].dtype, given[-2].paired.dtype))

    monkeypatch.setattr(cdmpp_training.CdmppStack, "step", step)
    for double in (False, True):
        (nets,) = _networks(False, [[1]])
        nets = {count: net if double else net.float() for count, net in nets.items()}
        train_cdmpp_together([nets], [_rows([1] * 6, 1)], [None], _settings(epochs=1))
    assert seen == [(torch.float32, torch.float32), (torch.float32, torch.float64)]


def test_networks_of_leaf_counts_share_nothing() -> None:
    own = _rows([1] * 6 + [2] * 5, 1)
    assert own.target is not None
    other = own._replace(target=np.where(own.counts == 2, 3.0, own.target))
    results = []
    for rows in (own, other):
        (nets,) = _networks(False, [[1, 2]])
        train_cdmpp_together([nets], [rows], [None], _settings())
        results.append({count: net.state_dict() for count, net in nets.items()})
    same = {
        count: all(torch.equal(results[0][count][n], t) for n, t in results[1][count].items())
        for count in (1, 2)
    }
    assert same == {1: True, 2: False}


def test_stacks_are_cut_to_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    labelled = [_rows([1] * 9 + [2] * 8, seed) for seed in range(5)]
    nets = _networks(False, [[1, 2]] * 5)
    every: list[CdmppRows | None] = [None] * 5
    whole = list(_courses(nets, labelled, every, _settings()))
    assert len(whole) == 2
    most = whole[1].cost // 2  # of two leaves
    monkeypatch.setattr(cdmpp_training, "_MOST_KEPT_BYTES", most)
    parts = list(_courses(nets, labelled, every, _settings()))
    assert all(part.cost <= most for part in parts)
    assert [len(next(part.batches())[0]) for part in parts] == [5, 2, 2, 1]
    for limit, wanted in (
        (most, [1, 1, 1, 1]),
        (sum(p.cost for p in parts[:2]), [2, 2]),
        (1, [1] * 4),
    ):
        monkeypatch.setattr(cdmpp_training, "_MOST_AT_ONCE_BYTES", limit)
        assert [len(some) for some in _rounds(parts)] == wanted
    train_cdmpp_together(nets, labelled, every, _settings(epochs=1))


def test_the_rate_is_pytorchs_cycle() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.Adam([weight], 1e-3)
    cycle = torch.optim.lr_scheduler.CyclicLR(optimiser, 1e-4, 1e-2, cycle_momentum=False)
    optimiser.step()
    for step in range(4500):
        if step % 250 == 0:
            assert triangular_rate(step, 1e-3) == pytest.approx(cycle.get_last_lr()[0], rel=1e-9)
        cycle.step()


def test_a_pass_meets_every_program_of_a_leaf_count() -> None:
    labelled = [_rows([1] * 21 + [2] * 3, 1), _rows([2] * 7 + [1] * 2, 2)]
    nets = _networks(False, [[1, 2], [1, 2]])
    wanted = {1: (set(range(21)), {31, 32}), 2: ({21, 22, 23}, set(range(24, 31)))}
    for count, course in enumerate(_courses(nets, labelled, [None, None], _settings()), 1):
        seen: list[set[int]] = [set(), set()]
        for labels, others in itertools.islice(course.batches(), course.turns):
            assert labels.shape[1] <= 8
            assert others.shape == (2, 0)
            for k in (0, 1):
                seen[k].update(labels[k].tolist())
        assert tuple(seen) == wanted[count]


def _table(devices: int) -> ProgramTable:
    generator = np.random.default_rng(0)
    tables = []
    for name in ("h200", "a100-sxm-40gb")[:devices]:
        asts = [
            CompactAst(generator.random((2, _WIDTH)).astype(np.float32),
                       np.array([2, 4], np.int32), np.array([2, 2], np.int32), np.ones(1))
            for _ in range(12)
        ]  # fmt: skip
        seconds = (1e-5 * (1 + generator.random(12))).tolist()
        tables.append(ProgramTable.from_asts(asts, device_zoo.device(name), latency_s=seconds))
    return ProgramTable.join(tables)


def test_models_are_fitted_each_on_its_own_table() -> None:
    table = _table(1)
    halves = [table.take(np.arange(0, 8)), table.take(np.arange(4, 12))]
    models = [CdmppReleased(layers=1, epochs=2, seed=seed) for seed in (0, 1)]
    passes: list[int] = []
    fit_cdmpp_together(models, halves, [None, table], on_epoch=lambda n: passes.append(n))
    assert passes == [1, 2]
    one, two = (model.predict(table) for model in models)
    assert np.all(np.isfinite(one) & np.isfinite(two))
    assert not np.array_equal(one, two)
    assert models[0].scale_[0].tolist() == halves[0].leaves.min(0).tolist()


def test_unlike_models_are_not_fitted_together() -> None:
    models = [CdmppReleased(layers=1, epochs=1), CdmppReleased(layers=1, epochs=2)]
    with pytest.raises(SpecError, match="equal settings"):
        fit_cdmpp_together(models, [_table(1)] * 2, [None, None])
    models = [CdmppReleased(layers=1), CdmppReleased(layers=1)]
    with pytest.raises(SpecError, match="one device"):
        fit_cdmpp_together(models, [_table(1), _table(2)], [None, None])


def test_a_cross_validation_that_runs_out_of_time_keeps_what_there_is(tmp_path: Path) -> None:
    table = _table(1)
    test = np.arange(12) < 6
    jobs = [Job("task", Fold(name, ~own, own), "cdmpp", 0) for name, own in
            (("a", test), ("b", ~test))]  # fmt: skip
    models = [CdmppReleased(layers=1, epochs=9) for _ in jobs]
    errors = run(jobs, table, models, tmp_path, 0.5, deadline=0.0)
    assert set(errors) == {"task__a__cdmpp__0", "task__b__cdmpp__0"}
    facts = json.loads((tmp_path / "task__b__cdmpp__0.json").read_text())
    assert [entry[0] for entry in facts["curve"]] == [1]  # ended after the first pass
    assert facts["curve"][0][2] == pytest.approx(errors["task__b__cdmpp__0"])
    trained = np.abs(models[1].predict(table.take(test)) / table.latency_s[test] - 1).mean()
    assert facts["curve"][0][3] == pytest.approx(trained)
    early = np.load(tmp_path / "early" / "task__b__cdmpp__0.npz")
    assert early["rows"].tolist() == list(range(6, 12))


@pytest.mark.parametrize(
    ("limit", "steps"),
    [({"deadline": 6.5}, [3, 6]), ({"cycles": 1}, [3]), ({"cycles": 9}, [3, 6, 9])],
)
def test_a_cross_validation_ends_with_a_whole_cycle(
    limit: dict[str, float], steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()  # one second a pass, which is a step here
    clock = SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=time.perf_counter)
    monkeypatch.setattr(program_crossval, "time", clock)
    monkeypatch.setattr(program_crossval, "CYCLE", 3)
    test = np.arange(12) < 6
    job = Job("task", Fold("a", ~test, test), "cdmpp", 0)
    run([job], _table(1), [CdmppReleased(layers=1, epochs=9)], tmp_path, 0.5, **limit)
    facts = json.loads((tmp_path / "task__a__cdmpp__0.json").read_text())
    assert [entry[0] for entry in facts["curve"]] == steps


def test_devices_to_score_are_named() -> None:
    both = _table(2)
    own = _of_device(both, both.devices[1].name)
    assert own.devices == both.devices[1:]
    assert own.latency_s.tolist() == both.latency_s[12:].tolist()
    assert not own.device.any()
    with pytest.raises(SpecError, match="--only"):
        _of_device(both, "none")
