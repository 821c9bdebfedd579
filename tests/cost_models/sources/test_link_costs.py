from __future__ import annotations

import pytest

from foreplan.cost_models.costs import Collective, HostLaunch
from foreplan.cost_models.sources.link_costs import LinkSource
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.cluster_entry import DeviceEntry
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.tier import CollectiveFit, Tier
from foreplan.errors import MissingDataError


def _cluster(*tiers: Tier) -> Cluster:
    cpu = DeviceName.parse("cpu")
    entries = (
        DeviceEntry(name=cpu, host="a", count=2),
        DeviceEntry(name=cpu, host="b", count=2),
    )
    return Cluster(devices=entries, tiers=tiers)


def _tier(scope: str, bandwidth: float, fits: tuple[CollectiveFit, ...] = ()) -> Tier:
    return Tier(
        group=("all",), scope=scope, latency_s=1e-5, bandwidth_bytes_per_s=bandwidth,  # type: ignore[arg-type]
        collectives=fits, source="test",
    )  # fmt: skip


FIT = CollectiveFit(
    kind="p2p", ranks=2, alpha_s=5e-5, beta_s_per_byte=1e-9, residual=0.1, samples=9
)


def test_fit_of_the_tier_is_used_with_its_residual() -> None:
    source = LinkSource(_cluster(_tier("host", 1e10, (FIT,))))
    found = source.estimate(Collective("p2p", 10**6, (0, 1)), "a/cpu#0")
    assert found is not None
    assert found.mean_s == pytest.approx(5e-5 + 1e-3)
    assert found.source == "interpolated"
    assert found.low_s < found.mean_s < found.high_s < 1.3 * found.mean_s


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("p2p", None),
        ("all_reduce", 4 * 1e-5 + 4 / 3 * 0.1),
        ("all_gather", 2 * 1e-5 + 2 / 3 * 0.1),
        ("reduce_scatter", 2 * 1e-5 + 2 / 3 * 0.1),
        ("all_to_all", 2 * 1e-5 + 2 / 3 * 0.1),
        ("broadcast", 2 * 1e-5 + 0.1),
    ],
)
def test_ring_formulas_where_nothing_was_measured(kind: str, seconds: float | None) -> None:
    source = LinkSource(_cluster(_tier("host", 1e10), _tier("network", 1e10)))
    group = (0, 1) if kind == "p2p" else (0, 1, 2)
    found = source.estimate(Collective(kind, 10**9, group), "a/cpu#0")
    assert found is not None
    assert found.source == "theory"
    assert found.mean_s == pytest.approx(seconds or 1e-5 + 0.1)


def test_a_group_over_two_tiers_runs_at_the_slower_one() -> None:
    source = LinkSource(_cluster(_tier("host", 1e10), _tier("network", 1e8)))
    inside = source.estimate(Collective("all_reduce", 10**8, (0, 1)), "a/cpu#0")
    across = source.estimate(Collective("all_reduce", 10**8, (0, 1, 2)), "a/cpu#0")
    assert inside is not None
    assert across is not None
    assert across.mean_s > 50 * inside.mean_s


def test_no_tier_no_rank_no_collective_no_price() -> None:
    source = LinkSource(_cluster(_tier("host", 1e10)))
    with pytest.raises(MissingDataError, match=r"joins a/cpu#0 and b/cpu#0; .* --link"):
        source.estimate(Collective("p2p", 8, (0, 2)), "a/cpu#0")
    assert source.estimate(Collective("p2p", 8, (0, 9)), "a/cpu#0") is None
    assert source.estimate(Collective("gossip", 8, (0, 1)), "a/cpu#0") is None
    assert source.estimate(HostLaunch(), "a/cpu#0") is None
    alone = source.estimate(Collective("all_reduce", 8, (0,)), "a/cpu#0")
    assert alone is not None
    assert alone.mean_s == 0.0


def test_what_nothing_is_computed_beside_has_a_price_of_its_own() -> None:
    def fit(kind: str, seconds: float) -> CollectiveFit:
        return CollectiveFit(
            kind=kind, ranks=2, alpha_s=seconds, beta_s_per_byte=0.0, residual=0.1, samples=9  # type: ignore[arg-type]
        )  # fmt: skip

    plain = (fit("all_reduce", 3e-4), fit("all_gather", 4e-4))
    tier = _tier("host", 1e10, plain).model_copy(update={"waited": (fit("all_reduce", 2e-5),)})
    source = LinkSource(_cluster(tier))

    def price(kind: str, *, waited: bool) -> float:
        found = source.estimate(Collective(kind, 100, (0, 1), waited=waited), "a/cpu#0")
        assert found is not None
        return found.mean_s

    assert price("all_reduce", waited=True) == pytest.approx(2e-5)
    assert price("all_reduce", waited=False) == pytest.approx(3e-4)
    assert price("all_gather", waited=True) == pytest.approx(4e-4), "none of its own"
