"""Small problems that the tests of the bubble planner share; every time is given."""

from foreplan.cost_models.book import Profiles, cost_book
from foreplan.datasets.inline_cluster import parse_devices
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.spec import (
    BackbonePlan,
    BubblesWorkload,
    Encoder,
    GivenTimes,
    TransformerDims,
)
from foreplan.planner.bubbles.works import given_prices


def encoder(name="image", *, layers=4, forward_s=0.01, backward_s=0.02, **rest):
    """An encoder whose layers take the given seconds."""
    dims = TransformerDims(
        layers=layers, hidden=64, heads=4, layer_forward_s=forward_s, layer_backward_s=backward_s
    )
    return Encoder(name=name, dims=dims, tokens=16, **rest)


def workload(
    *encoders, pp=4, chunks=2, tp=1, dp=1, layers=8, microbatches=8, forward_s=0.1, backward_s=0.2,
    transfer_s=0.0, tensor_s=0.0, gather_s=0.0, scatter_s=0.0, **rest
):  # fmt: skip
    """A workload with given times."""
    backbone = TransformerDims(
        layers=layers, hidden=128, heads=8, vocab=256,
        layer_forward_s=forward_s, layer_backward_s=backward_s,
    )  # fmt: skip
    times = GivenTimes(
        transfer_s=transfer_s, tensor_collective_s=tensor_s,
        encoder_tensor_collective_s=tensor_s, optimizer_s=0.0, all_gather_s=gather_s,
        reduce_scatter_s=scatter_s, encoder_all_gather_s=0.0, encoder_reduce_scatter_s=0.0,
    )  # fmt: skip
    return BubblesWorkload(
        **{
            "encoders": encoders or (encoder(),),
            "backbone": backbone,
            "sequence_length": 64,
            "microbatches": microbatches,
            "plan": BackbonePlan(dp=dp, pp=pp, tp=tp, chunks=chunks),
            "times": times,
            **rest,
        }
    )


def problem(asked, devices=None):
    """A problem on devices of the zoo, priced by what is given and the roofline."""
    count = asked.plan.devices if asked.plan else 4
    cluster = parse_devices(devices or f"{count}xh200")
    costs = cost_book(cluster, Profiles(), "roofline", given=given_prices(asked))
    return Problem(None, cluster, asked, costs)
