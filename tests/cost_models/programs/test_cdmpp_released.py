"""CDMPP as released: its leaf features by hand, its formulas, its use of targets."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foreplan.cost_models.programs.baselines import CdmppReleased
from foreplan.cost_models.programs.baselines._cdmpp_network import cmd, encoding, mmd, network
from foreplan.cost_models.programs.baselines.cdmpp_released import released_device_figures
from foreplan.cost_models.programs.compact_ast import CompactAst
from foreplan.cost_models.programs.program_table import ProgramTable
from foreplan.datasets import device_zoo
from foreplan.datasets.tir.task import decode_module
from foreplan.datasets.tir.toolchain import require_tvm
from foreplan.errors import MissingDataError, SpecError

_LINES = (Path(__file__).parents[1] / "data" / "tir_examples.jsonl").read_text().splitlines()
TEXTS = {line["name"]: decode_module(line["mod"]) for line in map(json.loads, _LINES)}


# ------------------------------------------------------------------------------------ features


@pytest.fixture(scope="module")
def leaves() -> dict[str, CompactAst]:
    try:
        require_tvm()
    except (MissingDataError, SpecError) as error:
        pytest.skip(f"needs TVM: {error}")
    from foreplan.cost_models.programs.baselines import StoreFeatureEncoder

    encoder = StoreFeatureEncoder()
    return {name: encoder.encode(TEXTS[name]) for name in ("gemm", "gemm_tiled", "cuda", "chain")}


def _log(value: float) -> float:
    return math.log2(1 + value)


def test_a_product_has_one_leaf_of_164_entries(leaves: dict[str, CompactAst]) -> None:
    vector = leaves["gemm"].leaves
    assert vector.shape == (1, 164)  # the store that starts the sum is none
    n = 64 * 32 * 128
    # Sixteen counts: a product and a sum are no fused one to TVM; indices are not counted.
    assert vector[0, 1] == pytest.approx(_log(n))  # float additions
    assert vector[0, 2] == pytest.approx(_log(n))  # float products
    assert not vector[0, 3:16].any()
    # No GPU, so one thread in each direction; three loops whose extents multiply to n.
    assert vector[0, 49:57].tolist() == [0, *[1] * 7]
    assert vector[0, 161:].tolist() == pytest.approx([_log(n), _log(3), 0])
    assert not vector[0, 157:161].any()  # allocation: never written to a leaf


def test_buffers_of_a_product(leaves: dict[str, CompactAst]) -> None:
    buffers = leaves["gemm"].leaves[0, 57:147].reshape(5, 18)
    n = 64 * 32 * 128
    # access type (read, write, both), bytes, unique bytes ...
    kinds = [b[:3].tolist() for b in buffers]
    assert sorted(kinds[:3]) == sorted([[0, 0, 1], [1, 0, 0], [1, 0, 0]])
    assert not buffers[3:].any()
    unique = {round(float(2 ** b[4] - 1)) for b in buffers[:3]}
    assert unique == {64 * 128 * 4, 128 * 32 * 4, 64 * 32 * 4}
    assert {round(float(2 ** b[3] - 1), -2) for b in buffers[:3]} == {round(4 * n, -2)}


def test_places_count_loops_allocations_and_stores(leaves: dict[str, CompactAst]) -> None:
    # root 0, three loops, the init store 4, the update 5
    assert (leaves["gemm"].position.tolist(), leaves["gemm"].depth.tolist()) == ([5], [4])
    # B is allocated (1), its loop (2), its store (3), then two loops (4, 5) and C's store (6)
    chain = leaves["chain"]
    assert (chain.position.tolist(), chain.depth.tolist()) == ([3, 6], [3, 4])


def test_threads_of_a_gpu_are_seen(leaves: dict[str, CompactAst]) -> None:
    vector = leaves["cuda"].leaves
    assert np.all(vector[:, 49] == 1)
    assert np.all(vector[:, 50] == pytest.approx(_log(4 * 4)))  # blocks: 64 / 16 by 32 / 8
    assert np.all(vector[:, 53] == pytest.approx(_log(128)))  # threads of a block


def test_lowering_errors_name_the_program() -> None:
    try:
        require_tvm()
    except (MissingDataError, SpecError) as error:
        pytest.skip(f"needs TVM: {error}")
    from foreplan.cost_models.programs.baselines import StoreFeatureEncoder

    with pytest.raises(SpecError, match="line 3"):
        StoreFeatureEncoder().encode("{}", "line 3")


# ------------------------------------------------------------------------------------ formulas


def test_positions_are_encoded_with_the_exponents_of_the_release() -> None:
    found = encoding(np.array([3]), 164)[0]
    assert found[0] == pytest.approx(math.sin(3))
    assert found[1] == pytest.approx(math.cos(3 / 10000 ** (2 / 164)))
    assert found[82] == pytest.approx(math.sin(3 / 10000.0))  # half way the exponent is 1


def test_discrepancies_by_formula() -> None:
    one, two = torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [4.0]])
    same = 2 + 2 * math.exp(-1) + 2 + 2 * math.exp(-0.1) + 2 + 2 * math.exp(-0.001)
    other = sum(2 + 2 * math.exp(-4 * a) for a in (1, 0.1, 0.001))
    across = sum(math.exp(-d * a) for d in (4, 16, 1, 9) for a in (1, 0.1, 0.001))
    assert float(mmd(one, two)) == pytest.approx((same + other) / 4 - 2 * across / 4, rel=1e-5)
    # means 0.5 and 3; second moments 1/4 and 1; fourth 1/16 and 1; odd ones nothing
    assert float(cmd(one, two)) == pytest.approx(2.5 + 0.75 + 0.9375, rel=1e-5)


def test_the_network_is_as_large_as_the_release() -> None:
    # 164-wide post-norm layers with 2048 hidden units, 11 of them; the head of five leaves
    # 820 -> 716 -> 985 -> 985 -> 985 -> 69, the decoder 69 -> 930 -> 930 -> 930 -> 1; weights and
    # biases, and scale and shift of each BatchNorm.
    net = network(164, False, 5, 11)
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in net.named_children()}
    layer = 4 * (164 * 164 + 164) + 2 * 164 * 2048 + 2048 + 164 + 4 * 164
    head = 820 * 716 + 716 * 985 + 2 * 985 * 985 + 985 * 69 + 3 * (716 + 3 * 985 + 69)
    decoder = 69 * 930 + 2 * 930 * 930 + 3 * 3 * 930
    assert (sizes["encoder"], sizes["flatten"]) == (11 * layer, head)
    assert (sizes["decoder"], sizes["last"]) == (decoder, 931)
    first = net.encoder.layers[0]
    assert (first.norm_first, first.self_attn.num_heads, first.dropout.p) == (False, 4, 0.1)


def test_figures_of_a_device() -> None:
    h200 = device_zoo.device("h200")
    found = released_device_figures(h200)
    assert found[0] == 1
    assert h200.memory_bytes is not None
    assert found[2] == pytest.approx(math.log2(h200.memory_bytes / 2**30) / 6)
    bare = h200.model_copy(update={"clock_hz": None, "memory_bytes": None, "l2_bytes": None})
    assert released_device_figures(bare)[[1, 2, 4]].tolist() == [0, 0, 0]


# -------------------------------------------------------------------------------------- fitting


def _table(shift: float = 0.0, seed: int = 0) -> ProgramTable:
    generator = np.random.default_rng(seed)
    asts, seconds = [], []
    for number in range(60):
        count = (1, 3)[number % 2]
        vectors = generator.random((count, 164)).astype(np.float32) + np.float32(shift)
        place = np.arange(1, count + 1, dtype=np.int32)
        asts.append(CompactAst(vectors, 2 * place, 0 * place + 2, np.ones(1)))
        seconds.append(1e-5 * float(1 + vectors[:, 0].sum()))
    return ProgramTable.from_asts(asts, device_zoo.device("h200"), latency_s=seconds)


def test_a_fit_learns_what_labels_depend_on() -> None:
    table = _table().take(np.arange(0, 60, 2))  # of one leaf
    model = CdmppReleased(layers=1, epochs=40, learning_rate=1e-3).fit(table)
    error = np.abs(model.predict(table) / table.latency_s - 1).mean()
    constant = np.abs(np.median(table.latency_s) / table.latency_s - 1).mean()
    assert error < 0.5 * constant
    np.testing.assert_array_equal(model.predict(table), model.predict(table))  # no dropout


def test_labels_are_scaled_by_training_rows_and_come_back_as_seconds() -> None:
    table = _table()
    model = CdmppReleased(layers=1)
    rows = model.prepare(table)
    assert rows.target is not None
    assert (rows.target.mean(), rows.target.std()) == pytest.approx((0, 1), abs=1e-5)
    back = 1e-6 * model.label_.inverse_transform(rows.target[:, None].astype(float))[:, 0]
    np.testing.assert_allclose(back, table.latency_s, rtol=1e-5)
    # Leaves of training rows fill 0 to 1, and those of other programs do not leave it, not even in
    # an entry that is constant in training.
    table.leaves[:, 7] = 0.25
    model.prepare(table)
    for other, least in ((table, 0.0), (_table(0.5), 0.4), (_table(-2.0), 0.0)):
        plain = model.rows(other).leaves - encoding(2 * other.position - other.depth, 164)
        assert least - 1e-5 <= plain.min() <= plain.max() <= 1 + 1e-5
    for net in model.by_leaves_.values():
        net.last.bias.data.fill_(1e30)  # beyond what Box-Cox can give back
    assert np.all(np.isfinite(model.predict(table)))
    assert np.all(model.predict(table) > 0)


def test_unlabelled_programs_of_the_target_change_the_fit() -> None:
    table, target = _table(), _table(0.5, seed=1)
    hidden = target.latency_s.copy()
    settings: dict[str, Any] = {
        "layers": 1, "epochs": 1, "batch": 16, "seed": 3, "discrepancy": "mmd"
    }  # fmt: skip
    alone = CdmppReleased(**settings).fit(table).predict(table)
    given = CdmppReleased(**settings).fit(table, unlabelled=target).predict(table)
    again = CdmppReleased(**settings).fit(table, unlabelled=target).predict(table)
    np.testing.assert_array_equal(given, again)
    assert not np.array_equal(alone, given)
    object.__setattr__(target, "latency_s", 9 * hidden)  # labels of the target are not looked at
    blind = CdmppReleased(**settings).fit(table, unlabelled=target).predict(table)
    np.testing.assert_array_equal(given, blind)


def test_without_a_discrepancy_programs_of_the_target_are_not_seen() -> None:
    table = _table()
    settings: dict[str, Any] = {"layers": 1, "epochs": 1, "batch": 16}
    alone = CdmppReleased(**settings).fit(table).predict(table)
    given = CdmppReleased(**settings).fit(table, unlabelled=_table(0.5, seed=1)).predict(table)
    np.testing.assert_array_equal(alone, given)


def test_rare_leaf_counts_go_to_the_nearest_network() -> None:
    table = _table().take(np.arange(59))  # 30 programs of one leaf, 29 of three
    model = CdmppReleased(layers=1, epochs=1, least=30).fit(table)
    assert model.counts_.tolist() == [1]
    assert CdmppReleased(layers=1, epochs=1, least=29).fit(table).counts_.tolist() == [1, 3]
    assert CdmppReleased(layers=1, epochs=1, least=99).fit(table).counts_.tolist() == [1]
    predicted = model.predict(table)
    first = CompactAst(
        table.leaves[1:2], table.position[1:2], table.depth[1:2], np.ones(1)
    )  # the first leaf of the first program of three
    alike = ProgramTable.from_asts([first], table.devices[0], latency_s=[1e-5])
    assert predicted[1] == pytest.approx(float(model.predict(alike)[0]), rel=1e-5)


def test_a_fit_can_be_watched_and_ended() -> None:
    seen: list[tuple[int, float]] = []

    def watch(epoch: int, model: CdmppReleased) -> bool:
        seen.append((epoch, float(model.predict(_table())[0])))
        return epoch == 2

    CdmppReleased(layers=1, epochs=50, batch=16).fit(_table(), on_epoch=watch)
    assert [epoch for epoch, _ in seen] == [1, 2]


def test_settings_are_checked() -> None:
    with pytest.raises(SpecError, match="discrepancy"):
        CdmppReleased(discrepancy="other").fit(_table())
    with pytest.raises(SpecError, match="leaves"):
        CdmppReleased().fit(_table().take(np.array([0])))
