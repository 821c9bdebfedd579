import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.datasets import device_zoo
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.cluster_merge import merge
from foreplan.datasets.inline_cluster import parse_devices
from foreplan.datasets.specs import validate
from foreplan.datasets.tier import CollectiveFit
from foreplan.errors import MissingDataError, SpecError

LINK = {"latency_s": "12 us", "bandwidth_bytes_per_s": "12 GB/s", "source": "measured"}


def cluster(**fields: Any) -> Cluster:
    return validate(Cluster, fields, "c.yaml")


def two_hosts() -> Cluster:
    return cluster(
        devices=[
            {"name": "h200", "count": 2, "host": "a"},
            {"name": "t4", "count": 2, "host": "a", "memory_bytes": "12 GiB"},
            {"name": "t4", "host": "b", "profile": "profiles/t4.json"},
        ],
        tiers=[
            LINK | {"group": "all", "scope": "network", "bandwidth_bytes_per_s": "25 Gbit/s"},
            LINK | {"group": "a", "scope": "host"},
            LINK | {"group": ["a/h200"], "scope": "host", "bandwidth_bytes_per_s": "450 GB/s"},
            LINK | {"group": ["a/h200"], "scope": "host", "backend": "gloo", "emulated": True},
        ],
        contention=[
            {"kind": "memory", "factors": {2: 1.3}},
            {"kind": "memory", "host": "b", "factors": {"2": 1.8, "4": 3.1}},
        ],
    )


def test_ranks_come_one_by_one_with_memory() -> None:
    ranks = two_hosts().ranks()
    assert [rank.label for rank in ranks] == ["a/h200#0", "a/h200#1", "a/t4#0", "a/t4#1", "b/t4"]
    assert [rank.index for rank in ranks] == [0, 1, 2, 3, 4]
    assert ranks[0].memory_bytes == device_zoo.device("h200").memory_bytes
    assert ranks[2].memory_bytes == 12 * 2**30
    assert ranks[4].profile == "profiles/t4.json"
    assert cluster(devices=[{"name": "cuda:0"}]).ranks()[0].memory_bytes is None


def test_link_is_the_narrowest() -> None:
    both = two_hosts()
    assert both.link(0, 1).bandwidth_bytes_per_s == 450e9
    assert both.link(0, 1, backend="gloo").bandwidth_bytes_per_s == 450e9  # said of no backend
    assert both.link(1, 2).group == ("a",)
    assert both.link(both.ranks()[3], both.ranks()[4]).scope == "network"
    with pytest.raises(SpecError, match="two different ranks"):
        both.link(1, 1)
    with pytest.raises(SpecError, match="a rank from 0 to 4"):
        both.link(0, 5)
    with pytest.raises(MissingDataError, match=r"joins localhost/t4#0 and localhost/t4#1; "):
        cluster(devices=[{"name": "t4", "count": 2}]).link(0, 1)
    slices = [{"name": "cuda:0/sms=32"}, {"name": "cuda:0/sms=8"}]
    with pytest.raises(MissingDataError, match=r"at the same time; .* cuda:0/sms=32@a,cuda:0/sm"):
        cluster(devices=slices).link(0, 1)


def test_links_of_a_copy_are_its_own() -> None:
    both = two_hosts()
    assert both.link(0, 1).group == ("a/h200",)
    assert both.links((0, 1))
    _, *others = both.tiers
    copied = both.model_copy(update={"tiers": (*others, *others[-2:], others[0])})
    assert copied.link(0, 1) is copied.tiers[1]
    nothing = both.model_copy(update={"tiers": both.tiers[:1]})
    with pytest.raises(MissingDataError):
        nothing.link(0, 1)
    narrower = both.model_copy(update={"devices": both.devices[:1], "tiers": others})
    assert narrower.link(0, 1) is others[0]
    assert narrower.links((0, 1)) == (others[0],)


def test_a_group_may_use_any_name_of_a_device() -> None:
    made = cluster(
        devices=[{"name": "a100-80g", "count": 2, "host": "x"}, {"name": "t4", "host": "x"}],
        tiers=[
            LINK | {"group": ["x/A100_SXM"], "scope": "host"},
            LINK | {"group": ["x/a100-80g#0", "Tesla T4"], "scope": "host"},
        ],
    )
    assert made.link(0, 1) is made.tiers[0]
    assert made.link(0, 2) is made.tiers[1]
    assert merge(made, made).link(0, 2).group == ("x/a100-80g#0", "x/t4")
    with pytest.raises(MissingDataError):
        made.link(1, 2)


def test_schema_is_made() -> None:
    schema = Cluster.model_json_schema()
    assert schema["additionalProperties"] is False
    assert {"devices", "tiers", "contention", "assumptions"} <= set(schema["properties"])


def test_slowdown() -> None:
    both = two_hosts()
    assert both.slowdown("a", "memory", 1) == 1.0
    assert both.slowdown("a", "memory", 2) == 1.3
    assert both.slowdown("b", "memory", 2) == 1.8
    assert both.slowdown("a", "memory", 4) is None
    assert both.slowdown("a", "compute", 2) is None
    passes = {"kind": "training", "factors": {1: 0.9, 2: 1.1}}
    timed = validate(Cluster, {"devices": [{"name": "t4"}], "contention": [passes]}, "cluster")
    assert timed.slowdown("localhost", "training", 1) == 0.9
    assert timed.slowdown("localhost", "memory", 1) == 1.0


def test_fits_of_collectives() -> None:
    fit = {"kind": "all_reduce", "ranks": 4, "alpha_s": "30 us", "beta_s_per_byte": 1e-10}
    tier = LINK | {"group": "all", "scope": "host", "backend": "nccl"}
    made = cluster(
        devices=[{"name": "t4", "count": 4}],
        tiers=[tier | {"collectives": [fit | {"residual": 0.04, "samples": 12}]}],
    )
    found = made.link(0, 3).fit("all_reduce", 4)
    assert found == CollectiveFit(
        kind="all_reduce", ranks=4, alpha_s=3e-5, beta_s_per_byte=1e-10, residual=0.04, samples=12
    )
    assert found.seconds(1e6) == pytest.approx(1.3e-4)
    assert made.link(0, 3).fit("all_reduce", 2) is None
    twice = [fit | {"residual": 0.04, "samples": 12}] * 2
    with pytest.raises(SpecError, match="one fit for all_reduce over 4 ranks"):
        cluster(devices=[{"name": "t4", "count": 4}], tiers=[tier | {"collectives": twice}])


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"devices": []}, "c.yaml: devices: got [], expected at least 1 item"),
        (
            {"devices": [{"name": "t4", "count": -1}]},
            "c.yaml: devices[0].count: got -1, expected greater than 0",
        ),
        (
            {"devices": [{"name": "t4", "memory_bytes": "1 GB/s"}]},
            "c.yaml: devices[0].memory_bytes: got '1 GB/s', expected a size",
        ),
        ({"devices": [{"name": "t4", "memory_bytes": "17 GiB"}]}, "memory_bytes up to 16106127360"),
        ({"devices": [{"name": "rtx 4080"}]}, "(did you mean 'rtx_4090' or "),
        ({"devices": [{"name": "cuda:0", "count": 2}]}, "expected count 1 for cuda:0"),
        ({"devices": [{"name": "cuda:0"}, {"name": "cuda:0"}]}, "cuda:0 of localhost once"),
        ({"devices": [{"name": "t4", "host": "all"}]}, "a host that is not called 'all'"),
        ({"devices": [{"name": "t4", "host": "t4"}]}, "a host that is not called like a device"),
        ({"devices": [{"name": "t4", "profile": "/x"}]}, "a path relative to the cluster's file"),
        (
            {
                "devices": [{"name": "t4"}],
                "tiers": [LINK | {"group": "hostt", "scope": "host"}],
            },
            "c.yaml: got fields that do not go together, expected "
            "tiers[0].group of hosts and devices of this cluster, not 'hostt'",
        ),
        (
            {
                "devices": [{"name": "t4"}],
                "tiers": [
                    LINK | {"group": "all", "scope": "host", "bandwidth_bytes_per_s": "5 GB"}
                ],
            },
            "c.yaml: tiers[0].bandwidth_bytes_per_s: got '5 GB', expected a bandwidth",
        ),
        (
            {
                "devices": [{"name": "t4"}],
                "tiers": [LINK | {"group": group, "scope": "host"} for group in ("all", "t4")],
            },
            "tiers that differ: tiers[0] and tiers[1] do not",
        ),
        (
            {
                "devices": [{"name": "t4"}],
                "contention": [{"kind": "memory", "host": "x", "factors": {2: 1.5}}],
            },
            "contention of a host in devices, not of 'x'",
        ),
        (
            {
                "devices": [{"name": "t4"}],
                "contention": [{"kind": "memory", "factors": {2: 1.5}}] * 2,
            },
            "contention for memory once for each host",
        ),
        ({"devices": [{"name": "t4", "mem": 1}]}, "c.yaml: devices[0].mem"),
    ],
)
def test_errors_are_one_line(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(SpecError) as caught:
        cluster(**fields)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_merge_of_two_hosts() -> None:
    a = cluster(
        devices=[{"name": "cuda:0", "host": "a"}, {"name": "cuda:1", "host": "a"}],
        tiers=[LINK | {"group": "all", "scope": "host"}],
        contention=[{"kind": "memory", "factors": {2: 1.5}}],
        assumptions=["x"],
    )
    b = cluster(
        devices=[{"name": "cuda:0", "host": "b"}, {"name": "cuda:1", "host": "b"}],
        tiers=[LINK | {"group": "cuda:0", "scope": "host"}],
        assumptions=["x", "y"],
    )
    both = merge(a, b)
    assert [rank.label for rank in both.ranks()] == [
        "a/cuda:0", "a/cuda:1", "b/cuda:0", "b/cuda:1"
    ]  # fmt: skip
    assert both.tiers[0].group == ("a",)  # "all" no longer means all
    assert both.tiers[1].group == ("b/cuda:0",)
    assert both.slowdown("a", "memory", 2) == 1.5
    assert both.slowdown("b", "memory", 2) is None
    assert both.assumptions == ("x", "y")
    assert merge(both, a, b) == both
    with pytest.raises(MissingDataError):
        both.link(0, 2)


def test_merge_keeps_each_programs_part_in_a_pass() -> None:
    gelu = {"device": "cuda:0", "op": "activation_forward", "dims": {"rows": 2, "cols": 8},
            "variant": "fp32/fp32/torch.gelu", "factor": 0.5}  # fmt: skip
    passes = {"kind": "training", "factors": {1: 0.9, 2: 1.2}, "programs": [gelu]}
    a = cluster(devices=[{"name": "cuda:0", "host": "a"}], contention=[passes])
    b = cluster(devices=[{"name": "cuda:0", "host": "b"}])
    both = merge(a, b)
    known = both.measured_contention("a", "training", 1)
    assert known is not None
    assert [each.program().op for each in known.programs] == ["activation_forward"]
    assert both.measured_contention("b", "training", 1) is None


@pytest.mark.parametrize(("factors", "named"), [({1: 0.8}, ()), ({2: 1.3}, ("softmax_forward",))])
def test_merge_takes_programs_with_the_factor_of_one_rank(
    factors: dict[int, float], named: tuple[str, ...]
) -> None:
    """What a host says of one rank alone is said without programs, or by the entry for all."""
    part = {"device": "cpu", "op": "softmax_forward", "dims": {"rows": 2, "cols": 8},
            "variant": "fp32/fp32/torch.softmax", "factor": 0.5}  # fmt: skip
    every = {"kind": "training", "factors": {1: 0.9, 2: 1.2}, "programs": [part]}
    own = {"kind": "training", "factors": factors, "host": "a"}
    a = cluster(devices=[{"name": "cpu", "host": "a"}], contention=[every, own])
    for each in (a, merge(a, cluster(devices=[{"name": "cpu", "host": "b"}]))):
        known = each.measured_contention("a", "training", 1)
        assert known is not None
        assert tuple(program.op for program in known.programs) == named


def test_merge_keeps_what_each_host_said() -> None:
    both = merge(two_hosts(), two_hosts())
    for a in range(5):
        for b in range(a):
            assert both.link(a, b).bandwidth_bytes_per_s == (
                two_hosts().link(a, b).bandwidth_bytes_per_s
            )
    for host in ("a", "b"):
        for ranks in (2, 4):
            assert both.slowdown(host, "memory", ranks) == (
                two_hosts().slowdown(host, "memory", ranks)
            )


def test_merge_refuses_contradictions() -> None:
    one, two = ({"name": "t4", "host": "a", "count": count} for count in (1, 2))
    with pytest.raises(SpecError, match=r"devices: a/t4: .*expected what the other cluster says"):
        merge(cluster(devices=[one]), cluster(devices=[two]))
    tier = LINK | {"group": "all", "scope": "host"}
    with pytest.raises(SpecError, match=r"tiers: .*the other cluster's figures for the same"):
        merge(
            cluster(devices=[one], tiers=[tier]),
            cluster(devices=[one], tiers=[tier | {"latency_s": "1 s"}]),
        )
    with pytest.raises(SpecError, match="host names that tell the clusters apart"):
        merge(cluster(devices=[{"name": "cuda:0"}]), cluster(devices=[{"name": "cpu"}]))


def test_rebase_moves_profiles(tmp_path: Path) -> None:
    moved = two_hosts().rebase(tmp_path / "b", tmp_path)
    assert moved.devices[2].profile == "b/profiles/t4.json"
    assert moved.rebase(tmp_path, tmp_path / "b") == two_hosts()


def test_pickles_and_hashes() -> None:
    both = two_hosts()
    assert pickle.loads(pickle.dumps(both)) == both  # noqa: S301 - our own bytes
    assert hash(both) == hash(two_hosts())


Plain = dict[str, Any]
_hosts = st.sampled_from(["a", "node-1", "1e9", "no", "10.0.0.2"])
_entries: st.SearchStrategy[Plain] = st.fixed_dictionaries(
    {"name": st.sampled_from(["t4", "h200", "cpu", "cpu:threads=2,isa=avx512"]), "host": _hosts},
    optional={
        "count": st.integers(1, 4),
        "memory_bytes": st.integers(1, 2**33),
        "price_per_hour": st.floats(0.01, 100),
        "profile": st.sampled_from(["p.json", "../x y/µ.json"]),
    },
)
_tiers: st.SearchStrategy[Plain] = st.fixed_dictionaries(
    {
        "group": st.sampled_from(["all", ["all"]]),
        "scope": st.sampled_from(["host", "network"]),
        "latency_s": st.floats(0, 1),
        "bandwidth_bytes_per_s": st.floats(1, 1e13),
        "source": st.text(min_size=1),
    },
    optional={
        "backend": st.sampled_from(["gloo", "nccl"]),
        "emulated": st.booleans(),
        "collectives": st.lists(
            st.fixed_dictionaries(
                {
                    "kind": st.sampled_from(["p2p", "all_gather"]),
                    "ranks": st.integers(2, 3),
                    "alpha_s": st.floats(0, 1),
                    "beta_s_per_byte": st.floats(0, 1),
                    "residual": st.floats(0, 1),
                    "samples": st.integers(1, 9),
                }
            ),
            unique_by=lambda fit: (fit["kind"], fit["ranks"]),
        ),
    },
)
_contention: st.SearchStrategy[Plain] = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["memory", "compute"]),
        "factors": st.dictionaries(st.integers(2, 8), st.floats(0.5, 9), min_size=1, max_size=3),
    },
    optional={
        "source": st.text(),
        "programs": st.lists(
            st.fixed_dictionaries(
                {
                    "device": st.sampled_from(["cpu", "cuda:0"]),
                    "op": st.just("elementwise_forward"),
                    "dims": st.fixed_dictionaries(dict.fromkeys(("rows", "cols"), st.integers(1))),
                    "variant": st.sampled_from(["fp32/fp32/torch.add", "bf16/bf16/torch.mul"]),
                    "factor": st.floats(0.1, 9),
                }
            ),
            max_size=2,
        ),
    },
)
_documents: st.SearchStrategy[Plain] = st.builds(
    dict,
    devices=st.lists(_entries, min_size=1, max_size=4),
    tiers=st.lists(_tiers, max_size=3, unique_by=lambda t: (t["scope"], t.get("backend"))),
    contention=st.lists(_contention, max_size=2, unique_by=lambda item: str(item["kind"])),
    assumptions=st.lists(st.text(), max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(_documents)
def test_yaml_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]
) -> None:
    made = cluster(**document)
    path = tmp_path_factory.getbasetemp() / "cluster.yaml"
    path.write_text(made.to_yaml(), encoding="utf-8", newline="")
    again = Cluster.load(path)
    assert again == made
    assert again.to_yaml() == made.to_yaml()
    assert merge(made, made).ranks() == tuple(made.ranks())


def test_a_copy_forgets_what_was_derived_from_the_old_fields():
    cluster = parse_devices("2xt4")
    assert cluster.ranks()[0].memory_bytes != 1 << 30
    entries = tuple(e.model_copy(update={"memory_bytes": 1 << 30}) for e in cluster.devices)
    copied = cluster.model_copy(update={"devices": entries})
    assert {rank.memory_bytes for rank in copied.ranks()} == {1 << 30}
    assert copied.model_copy(deep=True) == copied


def test_lags_are_those_of_the_widest_spread_among_a_groups_links():
    def tier(group: str, scope: str, share: float | None) -> dict[str, Any]:
        fit = {"kind": "all_reduce", "ranks": 2, "alpha_s": 0.0, "beta_s_per_byte": 0.0,
               "residual": 0.0, "samples": 1, "lag_share": share}  # fmt: skip
        return LINK | {"group": group, "scope": scope, "waited": [fit]}

    found = cluster(
        devices=[{"name": "t4", "count": 2, "host": "a"}, {"name": "t4", "host": "b"}],
        tiers=[tier("a", "host", 0.1), tier("all", "network", None)],
    )
    assert found.lag("all_reduce", (0, 1)) == 0.1
    assert found.lag("all_reduce", (0, 2)) == 0.0, "not measured between hosts"
    assert found.lag("all_gather", (0, 1)) == found.lag("all_reduce", (0,)) == 0.0
    assert cluster(devices=[{"name": "t4", "count": 2}]).lag("all_reduce", (0, 1)) == 0.0


def test_links_of_a_group_are_those_of_its_pairs():
    hosts = ",".join(f"4xh100@h{i}" for i in range(5)) + ",2xt4@h5"
    cluster = parse_devices(hosts)
    for group in ((0, 1, 2), (0, 4, 8, 20), (3, 4, 5, 20, 21), range(22)):
        pairs = {cluster.link(a, b).label for a, b in itertools.combinations(group, 2)}
        assert {tier.label for tier in cluster.links(group)} == pairs
    assert cluster.links((7,)) == ()
