"""Bytes: published formulas and figures."""

import pytest
from tests.planner.bubbles.problems import encoder, problem, workload

from foreplan.datasets.models.encoders import load_encoder
from foreplan.planner.bubbles.memory import (
    colocation_overhead_bytes,
    stage_activation_bytes,
    state_bytes,
    unit_activation_bytes,
)
from foreplan.planner.bubbles.towers import Tower, encoder_towers


def tower(hidden, heads, layers=4):
    return Tower(
        name="t", layers=layers, hidden=hidden, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, ffn=4 * hidden, gated=False, causal=True, entry=None, exits=(),
        vocab=0,
    )  # fmt: skip


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize(("hidden", "heads"), [(6144, 64), (12288, 96)])
def test_layers_keep_what_korthikanti_counts(hidden, heads, tp):
    s, b = 2048, 2

    def kept(recompute):
        return stage_activation_bytes(
            tower(hidden, heads, 3), 0, 2, rows=s * b, tokens=s, tp=tp, recompute=recompute
        )

    assert kept("none") == pytest.approx(2 * s * b * (34 * hidden + 5 * heads * s) / tp)
    assert kept("selective") == pytest.approx(2 * s * b * 34 * hidden / tp)
    assert kept("full") == pytest.approx(2 * s * b * 2 * hidden / tp)


@pytest.mark.parametrize(("pipelines", "gigabytes"), [(2, 2.06), (4, 6.19), (8, 14.4)])
def test_overhead_of_colocation_is_the_papers(pipelines, gigabytes):
    # ViT-22B on 3072 GPUs, DP_l = 48 (T8); the paper's 22e9 parameters, k = 6.
    found = colocation_overhead_bytes(
        22_000_000_000, encoder_replicas=48 * pipelines, backbone_replicas=48, devices=3072
    )
    assert found / 1e9 == pytest.approx(gigabytes, abs=0.06)


def test_zoo_encoders_have_the_published_numbers_of_parameters():
    for name, billions in (("vit-3b", 3.1), ("vit-5b", 5.5), ("vit-11b", 9.7), ("vit-22b", 21.7)):
        sizes = load_encoder(name)
        layer = 4 * sizes.hidden * sizes.heads * sizes.head_dim + 2 * sizes.hidden * sizes.ffn
        assert sizes.layers * layer / 1e9 == pytest.approx(billions, rel=0.02)


def test_an_encoder_keeps_5_gigabytes_of_a_micro_batch():
    # ViT-22B, two sequences of 2048, TP 8, all 48 layers (field note, section 6).
    vit = tower(6144, 48, 48)
    whole = unit_activation_bytes(vit, 0, 96, rows=4096, tokens=2048, tp=8, recompute=False)
    assert whole / 1e9 == pytest.approx(5.1, abs=0.05)
    inputs = unit_activation_bytes(vit, 0, 96, rows=4096, tokens=2048, tp=8, recompute=True)
    assert inputs * 48 * 17 == pytest.approx(whole)


def test_states_are_sharded_over_replicas_and_absent_where_frozen():
    assert sum(state_bytes(10, replicas=4, sharded=False).values()) == 180
    assert sum(state_bytes(10, replicas=4, sharded=True).values()) == 90
    assert state_bytes(10, replicas=4, sharded=True, frozen=True) == {"weights": 20}


def test_parameters_of_halves_stages_and_ends_agree():
    (found,) = encoder_towers(problem(workload(encoder(projector="mlp"))))
    halves = sum(found.half_range_parameters(h, h + 1) for h in range(2 * found.layers))
    stages = sum(found.range_parameters(a, a + 2) for a in (0, 2))
    assert halves == stages == found.parameters
