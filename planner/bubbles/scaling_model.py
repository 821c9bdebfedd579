"""Optimus' strong scaling (ATC 2025, section 5.2.2) replayed: two fitted numbers, seven predicted.

ViT-22B with GPT-175B, 1536 samples a step, 1536, 2048 and 3072 GPUs in layout (DP, 8, 8): 32, 24
and 16 micro-batches of 2. Published times of layers, collectives and bubbles are taken as they are;
two numbers are fitted on two rows of one baseline:

- seconds of a backbone layer's forward pass (its backward pass takes twice that);
- the share of the published gather and reduction that is left exposed at these sizes.

A baseline is the same chain for both of the paper's: encoder and backbone shared evenly by all
virtual stages. What the paper's cuts lose to that is not known; whole layers in 96 virtual stages,
cut by the paper's own rule, would lose a tenth of each micro-batch (144 layers: the slowest stage
has two, the mean 1.5), which its rows do not show.

The third baseline row, the other baseline and all rows of Optimus are then predicted: a calibration
and no reproduction, as encoder plans, recomputation and the encoders' tokens are unpublished.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from foreplan.cost_models.book import Profiles, cost_book
from foreplan.cost_models.schedule import FloatArray
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.inline_cluster import parse_devices
from foreplan.errors import SpecError
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.filling import Filling, fill
from foreplan.planner.bubbles.search import BubbleSearch
from foreplan.planner.bubbles.spec import (
    BackbonePlan,
    BubblesWorkload,
    Encoder,
    GivenTimes,
    TransformerDims,
)
from foreplan.planner.bubbles.works import given_prices

#: Published (paper, tables 1 and 4 and section 2): seconds.
ENCODER_LAYER_S = (1.4e-3, 2.0e-3)
TENSOR_COLLECTIVE_S = 300e-6
GATHER_S, SCATTER_S = 0.167, 0.458
#: An encoder's activations are half as wide as the backbone's (6144 of 12288), its collectives are
#: taken to last half as long, and to be part of the published time of its layers (assumed).
ENCODER_COLLECTIVE_S = TENSOR_COLLECTIVE_S / 2


#: Where the fit starts (layer seconds, exposed share), its steps for slopes, and when it ends.
START, STEPS, CLOSE_S = (5e-3, 1.0), (1e-5, 1e-2), 1e-4


@dataclass(frozen=True, slots=True)
class Row:
    """One column of the paper's strong-scaling table.

    Attributes:
        devices, microbatches: size.
        megatron_s, balanced_s, optimus_s: published steps.
        coarse, fine: published shares of encoder computation inside bubbles (from simulation).
    """

    devices: int
    microbatches: int
    megatron_s: float
    balanced_s: float
    optimus_s: float
    coarse: float
    fine: float

    def baseline_s(self, name: str) -> float:
        """Published step of a baseline, ``Megatron-LM`` or ``balanced``."""
        return {"Megatron-LM": self.megatron_s, "balanced": self.balanced_s}[name]


PUBLISHED = (
    Row(1536, 32, 10.65, 10.43, 9.80, 0.343, 0.575),
    Row(2048, 24, 8.26, 8.06, 7.29, 0.458, 0.693),
    Row(3072, 16, 5.91, 5.87, 4.87, 0.687, 0.850),
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A row as the model has it.

    Attributes:
        row: the published one.
        baseline_s: simulated baseline.
        alone_s: simulated backbone without any encoder.
        encoder_s: encoder time of a device.
        coarse_s, fine_s: simulated steps with filled idle time.
        coarse, fine: shares of encoder time inside the backbone's step.
        stages, unit_layers: of the fine plan.
    """

    row: Row
    baseline_s: float
    alone_s: float
    encoder_s: float
    coarse_s: float
    fine_s: float
    coarse: float
    fine: float
    stages: int
    unit_layers: float

    def hidden(self, total_s: float) -> float:
        """Share of the encoder's time that does not make a step of so many seconds longer."""
        return 1.0 - (total_s - self.alone_s) / self.encoder_s


def problem(row: Row, images: int, layer_s: float, exposed: float) -> Problem[BubblesWorkload]:
    """A row's problem under the two fitted numbers.

    Args:
        row: size.
        images: sequences of 2048 positions that the encoder sees of each sample.
        layer_s: fitted, see the module.
        exposed: likewise.
    """
    # Four collectives a pass, and four more where the backward pass computes a unit again.
    forward = ENCODER_LAYER_S[0] - 4 * ENCODER_COLLECTIVE_S
    backward = ENCODER_LAYER_S[1] - 8 * ENCODER_COLLECTIVE_S
    vit = TransformerDims(
        layers=48, hidden=6144, heads=48, head_dim=128, ffn=24576,
        layer_forward_s=images * forward, layer_backward_s=images * backward,
    )  # fmt: skip
    workload = BubblesWorkload(
        encoders=(Encoder(name="vit-22b", dims=vit, tokens=2048, images=images,
                          projected_tokens=2048, recompute=True),),
        backbone=TransformerDims(
            layers=96, hidden=12288, heads=96, vocab=51200,
            layer_forward_s=layer_s, layer_backward_s=2 * layer_s,
        ),
        sequence_length=2048, microbatch=2, global_batch=1536,
        plan=BackbonePlan(dp=row.devices // 64, pp=8, tp=8, chunks=12),
        times=GivenTimes(
            tensor_collective_s=TENSOR_COLLECTIVE_S,
            encoder_tensor_collective_s=images * ENCODER_COLLECTIVE_S,
            all_gather_s=GATHER_S * exposed, reduce_scatter_s=SCATTER_S * exposed,
            encoder_all_gather_s=0.0, encoder_reduce_scatter_s=0.0, optimizer_s=0.0,
        ),
    )  # fmt: skip
    return _priced(workload)


def _priced(workload: BubblesWorkload) -> Problem[BubblesWorkload]:
    assert workload.plan is not None
    cluster = _cluster(workload.plan.devices // 8)
    costs = cost_book(cluster, Profiles(), "roofline", given=given_prices(workload))
    return Problem(None, cluster, workload, costs)


@functools.cache
def _cluster(hosts: int) -> Cluster:
    return parse_devices(",".join(f"8xh100@h{i}" for i in range(hosts)))


def baseline_s(row: Row, images: int, layer_s: float, exposed: float) -> float:
    """Simulated step of encoder and backbone as one chain that all virtual stages share evenly."""
    workload = problem(row, images, layer_s, exposed).workload
    share = images * 48 / 96
    dims = {
        "layer_forward_s": layer_s + share * ENCODER_LAYER_S[0],
        "layer_backward_s": 2 * layer_s + share * ENCODER_LAYER_S[1],
    }
    assert workload.backbone is not None
    chain = workload.backbone.model_copy(update=dims)
    search = BubbleSearch(_priced(workload.model_copy(update={"backbone": chain})))
    (timeline,) = search.timelines(search.layouts[0], None, 1)
    return timeline.total_s


def calibrate(rows: tuple[Row, Row], images: int, baseline: str) -> tuple[float, float]:
    """Layer seconds and exposed share that bring two rows of a baseline to their times.

    Newton's method; the step is nearly affine in both.

    Raises:
        SpecError: it does not come to rest.
    """
    target: FloatArray = np.array([row.baseline_s(baseline) for row in rows])

    def off_s(found: FloatArray) -> FloatArray:
        layer_s, exposed = (float(x) for x in found)
        made = [baseline_s(row, images, layer_s, exposed) for row in rows]
        return np.array(made, dtype=np.float64) - target

    found = np.array(START)
    for _ in range(12):
        here = off_s(found)
        if np.abs(here).max() < CLOSE_S:
            return float(found[0]), float(found[1])
        slopes = [(off_s(found + step) - here) / step.max() for step in np.diag(STEPS)]
        found = found - np.linalg.solve(np.column_stack(slopes), here)
    raise SpecError("calibration", got=f"{found} after 12 rounds", expected="a fit of two rows")


def predict(row: Row, images: int, layer_s: float, exposed: float) -> Prediction:
    """Baseline and plans of a row."""
    search = BubbleSearch(problem(row, images, layer_s, exposed))
    (layout,) = search.layouts
    (timeline,) = search.timelines(layout, None, 1)
    best = search.best(search.candidates())[0]  # recomputed encoders always fit here
    assert best.filled is not None
    coarse = [
        found
        for stages in search.stages(layout)
        if (found := fill(Filling(timeline, stages, None, "coarse"))) is not None
    ]
    replays = [search.replay(found.decision, found) for found in coarse]
    least = min(replays, key=lambda replay: replay.total_s)
    assert least.filled is not None
    return Prediction(
        row=row,
        baseline_s=baseline_s(row, images, layer_s, exposed),
        alone_s=timeline.total_s,
        encoder_s=encoder_seconds(images) * row.microbatches,
        coarse_s=least.total_s,
        fine_s=best.total_s,
        coarse=least.filled.inside,
        fine=best.filled.inside,
        stages=best.filled.filling.stages,
        unit_layers=best.filled.filling.unit_layers or 0.0,
    )


def encoder_seconds(images: int) -> float:
    """Encoder seconds of a micro-batch on each device of a backbone pipeline."""
    return images * 48 * sum(ENCODER_LAYER_S) / 8
