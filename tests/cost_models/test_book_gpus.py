"""Predicted costs of a profiled GPU rest on its measured figures alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreplan.cost_models.book import COST_CHOICES, Profiles, cost_book
from foreplan.cost_models.commands import train_files
from foreplan.cost_models.model_store import model_folder
from foreplan.cost_models.operators.operator_weights import load_experts
from foreplan.datasets import device_zoo
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.inline_cluster import parse_devices
from foreplan.datasets.kernels.training_programs import linear_program
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.program import Variant, program
from foreplan.datasets.specs import validate
from foreplan.datasets.sweeps.operator_table import operator_table, texts, write_operators
from foreplan.errors import SpecError

ITEM = program("linear", Variant("bf16", "bf16", "torch.linear"), rows=4096, n=4096, k=4096)


def test_a_profiled_gpu_is_predicted_by_its_figures() -> None:
    h200 = device_zoo.device("h200").model_copy(update={"name": "cuda:0"})
    row = Row(
        op=ITEM.op, dims=ITEM.dims, variant=str(ITEM.variant), status="ok", samples=9,
        low_s=1.0, median_s=1.0, high_s=1.0,
    )  # fmt: skip
    cluster = validate(Cluster, {"devices": [{"name": "cuda:0"}]}, "cluster")
    label = cluster.ranks()[0].label
    profiles = Profiles({label: Profile(device=h200, software={}, rows=(row,))})
    found = {
        c: cost_book(cluster, profiles, c).cost(ITEM, label) for c in ("measured", "predicted")
    }
    assert found["measured"].mean_s == 1.0
    assert found["predicted"].source == "predicted"
    ideal_s = ITEM.flops / h200.peak_flops["bf16/matrix"]
    assert ideal_s < found["predicted"].mean_s < 10 * ideal_s


@pytest.mark.parametrize(("name", "refused"), [("cuda:0", True), ("cpu:threads=1", False)])
def test_a_cap_above_a_profiled_gpus_memory_is_refused(name: str, refused: bool) -> None:
    """A processor's memory is its host's: another host of the same profile may have more."""
    device = device_zoo.device("h200").model_copy(update={"name": name, "memory_bytes": 1 << 30})
    profile = Profile(device=device, software={}, rows=())
    entry = {"name": name, "memory_bytes": 2 << 30}
    cluster = validate(Cluster, {"devices": [entry]}, "cluster")
    profiles = Profiles({cluster.ranks()[0].label: profile})
    if refused:
        with pytest.raises(
            SpecError, match=r"localhost/cuda:0: memory_bytes: .*at most .*1.00 GiB"
        ):
            profiles.completed(cluster)
    else:
        assert profiles.completed(cluster) == cluster


def test_no_launch_by_the_host_stands_between_programs_that_are_replayed() -> None:
    h200 = device_zoo.device("h200").model_copy(
        update={"name": "cuda:0", "launch_overhead_s": 9e-6}
    )
    cluster = validate(Cluster, {"devices": [{"name": "cuda:0"}]}, "cluster")
    label = cluster.ranks()[0].label
    copy = Variant("bf16", "bf16", "torch.copy")
    written = program("cache_write", copy, batch=1, tokens=1, kv_heads=8, head_dim=64)
    eager = program("norm_backward", Variant("fp32", "fp32", "torch.rms_norm"), rows=1, cols=64)
    found = {}
    for switch_s in (None, 1.5e-6):
        profile = Profile(device=h200, software={}, rows=(), switch_s=switch_s)
        for choice in ("predicted", "roofline"):
            book = cost_book(cluster, Profiles({label: profile}), choice)
            found[choice, switch_s] = book.cost(written, label).mean_s
        roofline = cost_book(cluster, Profiles({label: profile}), "roofline")
        assert roofline.cost(eager, label).mean_s > 9e-6
    for choice in ("predicted", "roofline"):
        assert found[choice, None] > 9e-6
    assert 1.5e-6 < found["roofline", 1.5e-6] < 1.6e-6
    # Keys and values are one kernel of 1.45 us (`replayed_kernels`).
    assert found["predicted", 1.5e-6] == pytest.approx(1.5e-6 + 1.45e-6, rel=0.01)


def test_a_profiled_gpu_s_training_passes_are_predicted_not_the_roofline_s() -> None:
    h200 = device_zoo.device("h200").model_copy(update={"name": "cuda:0"})
    cluster = validate(Cluster, {"devices": [{"name": "cuda:0"}]}, "cluster")
    label = cluster.ranks()[0].label
    profiles = Profiles({label: Profile(device=h200, software={}, rows=())})
    work = linear_program("backward", 4096, 4096, 4096, "fp32/bf16/torch.linear")
    found = {c: cost_book(cluster, profiles, c).cost(work, label) for c in COST_CHOICES}
    assert found["predicted"].source == "predicted"
    assert found["roofline"].source == found["measured"].source == "roofline"


def test_a_zoo_gpu_s_training_passes_are_predicted_without_a_profile() -> None:
    cluster = validate(Cluster, {"devices": [{"name": "t4"}]}, "cluster")
    (rank,) = cluster.ranks()
    for variant in ("fp32/fp32/torch.linear", "fp32/bf16/torch.linear"):
        work = linear_program("backward", 4096, 4096, 4096, variant)
        for choice in COST_CHOICES:
            found = cost_book(cluster, Profiles({}), choice).cost(work, rank.label)
            assert found.source == ("roofline" if choice == "roofline" else "predicted")


def test_products_see_how_fast_a_slice_reads() -> None:
    slice_ = device_zoo.device("h200").model_copy(
        update={"name": "cuda:0/sms=32", "units": 32, "memory_bandwidth": 2.3e12}
    )
    cluster = validate(Cluster, {"devices": [{"name": "cuda:0/sms=32"}]}, "cluster")
    label = cluster.ranks()[0].label
    plain = Variant("bf16", "bf16", "torch.linear")
    few = program("linear", plain, rows=8, n=8192, k=8192)
    norm = program("norm", Variant("bf16", "bf16", "torch.rms_norm"), rows=8192, cols=8192)
    found = {}
    for read in (None, 3.4e12):
        profiles = Profiles(
            {label: Profile(device=slice_, software={}, rows=(), read_bandwidth=read)}
        )
        for choice in ("predicted", "roofline"):
            book = cost_book(cluster, profiles, choice)
            found[choice, read] = [book.cost(item, label).mean_s for item in (few, norm)]
    for choice in ("predicted", "roofline"):
        (before, same), (after, unchanged) = found[choice, None], found[choice, 3.4e12]
        assert after < 0.9 * before
        assert unchanged == same


def test_plans_are_priced_by_weights_of_ones_own(tmp_path: Path) -> None:
    """They were fine-tuned by rows of one device, which takes twice as long as predicted."""
    rng, count = np.random.default_rng(0), 80
    m, n, k = (np.round(2 ** rng.uniform(8, 13, count)) for _ in range(3))
    columns = {
        name: texts([word] * count)
        for name, word in (("op", "linear"), ("kind", "linear"), ("dtype", "bfloat16"),
                           ("library", "torch_graph-2.11-cuda"), ("device", "l4"))
    }  # fmt: skip
    sizes = {"b": np.ones(count), "m": m, "n": n, "k": k}
    asked = operator_table(**columns, dims=sizes, latency_s=np.full(count, np.nan))
    shipped = load_experts(model_folder("pretrained:ops"))
    rows = tmp_path / "rows.parquet"
    write_operators(replace(asked, latency_s=2 * shipped.predict(asked)), rows)
    train_files([rows], ["foreplan"], tmp_path / "mine", start="pretrained:ops")
    cluster = parse_devices("1xl4,1xt4", "test")
    mine = f"predicted:{tmp_path / 'mine'}"
    books = {choice: cost_book(cluster, Profiles(), choice) for choice in ("predicted", mine)}
    slow, same = (
        books[mine].cost(ITEM, rank.label).mean_s / books["predicted"].cost(ITEM, rank.label).mean_s
        for rank in cluster.ranks()
    )
    assert slow > 1.5, "the L4's sweep answers for it"
    assert same == 1.0
