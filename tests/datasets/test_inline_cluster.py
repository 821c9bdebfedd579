"""Clusters written on the command line."""

from __future__ import annotations

import pytest

from foreplan.datasets import device_zoo
from foreplan.datasets.inline_cluster import parse_devices
from foreplan.errors import MissingDataError, SpecError


def test_inline_form() -> None:
    made = parse_devices("2xa100-80g,4xt4")
    a100, t4 = device_zoo.device("a100-80g"), device_zoo.device("t4")
    assert [rank.memory_bytes for rank in made.ranks()] == (
        [a100.memory_bytes] * 2 + [t4.memory_bytes] * 4
    )
    assert made.link(0, 1).bandwidth_bytes_per_s == a100.peer_link_bandwidth
    assert made.link(0, 2).bandwidth_bytes_per_s == t4.host_link_bandwidth
    assert all(tier.source.startswith("assumed") for tier in made.tiers)
    assert "a100-80g is read as the zoo's a100_sxm_80gb" in made.assumptions
    assert len(made.assumptions) == 2 + len(made.tiers)  # nothing assumed silently
    assert parse_devices("t4").assumptions == ()
    alike = parse_devices("4xh200")
    assert [tier.bandwidth_bytes_per_s for tier in alike.tiers] == [450e9]
    assert parse_devices("2xt4,t4").link(0, 2).bandwidth_bytes_per_s == t4.host_link_bandwidth


def test_a_pair_has_the_slower_link_of_the_two_whatever_else_there_is() -> None:
    """One old board took every pair's link down to its own."""
    names = ("rtx_4090", "mi210", "rtx_3090", "p100_pcie_16gb")
    links = {name: device_zoo.device(name).host_link_bandwidth for name in names}
    assert links["p100_pcie_16gb"] < links["rtx_4090"] == links["mi210"]
    made = parse_devices("2xrtx_4090,2xmi210,2xrtx_3090,p100_pcie_16gb")
    ranks = list(made.ranks())
    for a in ranks:
        for b in ranks:
            if a.index < b.index:
                found = made.link(a.index, b.index)
                first, second = (device_zoo.device(r.name.zoo) for r in (a, b))
                slower = min(first.host_link_bandwidth, second.host_link_bandwidth)
                peer = first.peer_link_bandwidth if first.name == second.name else None
                assert found.bandwidth_bytes_per_s == (peer or slower)
    without = parse_devices("2xrtx_4090,2xmi210,2xrtx_3090")
    for a, b in ((0, 1), (0, 2), (2, 3), (0, 4)):
        here, there = made.link(a, b), without.link(a, b)
        assert here.bandwidth_bytes_per_s == there.bandwidth_bytes_per_s


def test_inline_form_with_hosts_options_and_own_devices() -> None:
    made = parse_devices("2xcpu:threads=1,isa=avx2@a, cuda:0@b")
    assert [rank.label for rank in made.ranks()] == [
        "a/cpu:threads=1,isa=avx2#0", "a/cpu:threads=1,isa=avx2#1", "b/cuda:0"
    ]  # fmt: skip
    assert made.link(0, 2).scope == "network"
    with pytest.raises(MissingDataError):
        made.link(0, 1)  # no figure is published for the host's own devices


@pytest.mark.parametrize(
    "text", ["", "2x", "0xt4", "t4@", "-1xt4", "2xt5", "2 t4", "t4,,t4", "2xcuda:0"]
)
def test_inline_errors(text: str) -> None:
    with pytest.raises(SpecError, match=r"^--devices: ") as caught:
        parse_devices(text)
    assert "\n" not in str(caught.value)
