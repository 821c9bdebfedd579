"""Time of the bubble planner's search at the sizes of Optimus' strong scaling, one core.

Nothing here asserts a time; the aim is noted beside it (the paper's planner took 15.1 s for 3072
devices and 322.2 s for 1536).
"""

import pytest

from foreplan.cost_models.book import Profiles, cost_book
from foreplan.datasets.inline_cluster import parse_devices
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.search import BubbleSearch
from foreplan.planner.bubbles.spec import BackbonePlan, BubblesWorkload, Encoder, TransformerDims


def setting(dp):
    """ViT-22B and GPT-175B on 64 dp devices, batch 1536."""
    workload = BubblesWorkload(
        encoders=(Encoder(name="vit", model="vit-22b", tokens=2048, recompute=True),),
        backbone=TransformerDims(layers=96, hidden=12288, heads=96, vocab=51200),
        sequence_length=2048,
        microbatch=2,
        global_batch=1536,
        plan=BackbonePlan(dp=dp, pp=8, tp=8, chunks=12),
    )
    cluster = parse_devices(",".join(f"8xh100@h{i}" for i in range(8 * dp)))
    costs = cost_book(cluster, Profiles(), "roofline")
    return Problem(None, cluster, workload, costs)


@pytest.mark.parametrize(("dp", "aim_s"), [(48, 1.0), (24, 3.0)])
def test_search_at_published_sizes(benchmark, dp, aim_s):
    problem = setting(dp)
    benchmark.extra_info["aim_s"] = aim_s
    found = benchmark.pedantic(
        lambda: BubbleSearch(problem).candidates(),
        rounds=3,
        iterations=1,
        warmup_rounds=1,  # prices and compiled loops
    )
    assert len(found) >= 16
