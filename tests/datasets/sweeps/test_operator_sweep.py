"""Operators of the sweep: what is drawn, that it runs, and that no time is lost."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foreplan.cost_models.operators.operator_features import FAMILIES, features
from foreplan.cost_models.operators.operator_work import out_size
from foreplan.datasets.importers import read_operators
from foreplan.datasets.sweeps import operator_sweep
from foreplan.datasets.sweeps.map_functions import MAP_FUNCTIONS
from foreplan.datasets.sweeps.operator_case import Case, Operands
from foreplan.datasets.sweeps.operator_cases import NAMES, USUAL, graph_cases
from foreplan.datasets.sweeps.operator_sweep import SweepJournal, eager_cases, main, run
from foreplan.datasets.sweeps.operator_table import KINDS
from foreplan.errors import MissingDataError, SpecError

MEASURED = Path(__file__).parents[3] / "datasets/measured"
SMALL = 2e-6
GROUPED = [name for name in NAMES if name.startswith("grouped_")]
MASKED = [name for name in NAMES if name.startswith("masked_")]
IMAGES = [name for name in NAMES if name.startswith("image_")]
SOUND = [name for name in NAMES if name.startswith("sound_")]
NARROW = [name for name in NAMES if name.startswith("narrow_")]
#: As the fifth sweep asks for them.
FIFTH = [*GROUPED, *IMAGES, *SOUND, *NARROW, "roll", "fp32_masked_generation"]


def drawn(count: int, scale: float = 1.0) -> list[Case]:
    return list(itertools.islice(graph_cases(0, scale=scale), count))


def elements(case: Case) -> int:
    """What an operator writes, from its sizes."""
    d = case.dims
    if case.kind in ("linear", "bmm"):
        return d["b"] * d["m"] * d["n"]
    if case.kind.startswith("conv"):
        out = int(out_size({name: np.float64(size) for name, size in d.items()}))  # type: ignore[misc]
        rank = 2 - d["line"]
        kernel = d["cout"] * d["cin"] // d["groups"] * d["window"] ** rank
        return {
            "conv": d["b"] * d["cout"] * out**rank,
            "conv_input_gradient": d["b"] * d["cin"] * d["size"] ** rank,
            "conv_weight_gradient": kernel,
        }[case.kind]
    if "attention" in case.kind:
        return d["b"] * d["queries"] * d["heads"] * d["head_dim"]
    if case.kind == "embedding_gradient":
        return d["values"] * d["cols"]
    if case.kind == "pool":
        return d["rows"]
    return d["rows"] * (1 if case.kind == "reduction" else d["cols"])


def test_every_operator_runs_and_writes_what_its_sizes_say() -> None:
    view = Operands("cpu", 3e8)
    seen: Counter[str] = Counter()
    asked = [
        case
        for names, count in (*(([name], 4) for name in USUAL),
                             (GROUPED, 12), (MASKED, 40), (["embedding_gradient"], 8),
                             (IMAGES, 12), (SOUND, 12), (NARROW, 40), (["roll"], 8),
                             (["fp32_masked_generation"], 3), (["pool", "pool_gradient"], 30),
                             (["apart"], 40))
        for case in itertools.islice(graph_cases(0, scale=SMALL, names=names), count)
    ]  # fmt: skip
    named = itertools.islice(graph_cases(0, scale=SMALL, names=["function", "layout"]), 800)
    for case in [*named, *asked]:
        if seen[case.op] >= 4 and case not in asked:  # a few of each
            continue
        seen[case.op] += 1
        assert set(case.dims) == set(KINDS[case.kind])
        for call in case.calls(view):
            made = call()
            if case.op != "update":
                results = [made] if isinstance(made, torch.Tensor) else made
                made, *others = [tensor for tensor in results if tensor is not None]
                # An image's elements for each output of a pool are rounded.
                near = case.dims["rows"] / 2 if case.kind == "pool_gradient" else 0
                assert abs(made.numel() - elements(case)) <= near, case
                assert torch.isfinite(made.float()).all(), case
                # Of norms and attention autograd takes all gradients at once, the input's first.
                one = case.kind.startswith(("conv", "embedding", "pool"))
                several = 0 if one or not case.kind.endswith("_gradient") else 2
                learned = case.kind != "batchnorm_gradient" and case.dims.get("training", 0)
                assert len(others) == several + (several and learned), case
    assert set(seen) == {
        "linear", "bmm", "conv", "conv_input_gradient", "conv_weight_gradient", "elementwise",
        "softmax", "layernorm", "layernorm_gradient", "batchnorm", "batchnorm_gradient",
        "generation_attention", "context_attention", "context_attention_gradient", "embedding",
        "reduction", "update", "embedding_gradient", "pool", "pool_gradient", *MAP_FUNCTIONS,
        # Of the eighth and ninth sweep: `test_lying_cases`, `test_staged_cases`.
    } - {"cumsum", "topk", "sort", "softmax_backward", "log_softmax_backward"}  # fmt: skip


def test_draws_cover_layouts_types_and_sizes() -> None:
    cases = drawn(3000)
    convs = [c for c in cases if c.kind.startswith("conv")]
    assert {c.dtype for c in convs} == {"bfloat16", "float16", "fp32"}
    assert {c.dims["channels_last"] for c in convs} == {0, 1}
    assert any(c.dims["groups"] == c.dims["cin"] for c in convs)
    assert any(1 < c.dims["groups"] < c.dims["cin"] for c in convs)
    assert {1, 2} <= {c.dims["stride"] for c in convs}
    assert {c.dims["strided"] for c in cases if c.kind == "reduction"} == {0, 1, 2}
    products = [c for c in cases if c.kind == "linear"]
    assert {c.dims["turned"] for c in products} == {0, 1, 2}
    # Any size may be the odd one.
    odd = {tuple(c.dims[size] % 64 > 0 for size in "mnk") for c in products}
    assert len(odd) == 8
    maps = [c for c in cases if c.kind == "elementwise"]
    assert {c.dims["broadcast"] for c in maps} == {0, 1, 2, 3}
    assert {c.dtype for c in maps if c.dims["converts"]} == {"bfloat16", "float16", "fp32"}
    attention = [c for c in cases if "attention" in c.kind]
    assert any(c.dims["kv_heads"] < c.dims["heads"] for c in attention)
    # A draw does not hang on the ones before it: a resumed sweep draws the same.
    again = next(itertools.islice(graph_cases(0), 77, None))
    assert (again.op, again.dims) == (cases[77].op, cases[77].dims)


def test_grouped_convolutions_are_drawn_as_networks_have_them() -> None:
    cases = list(itertools.islice(graph_cases(0, names=GROUPED), 1500))
    assert {c.kind for c in cases} == {name.removeprefix("grouped_") for name in GROUPED}
    assert {c.op for c in cases} == {c.kind for c in cases}  # experts know these words alone
    widths = Counter(c.dims["cin"] // c.dims["groups"] for c in cases)
    assert all(c.dims["groups"] > 1 for c in cases)
    assert 0.2 < widths[1] / len(cases) < 0.5
    # Neither powers of two alone nor multiples of eight alone, up to whole products of a group.
    assert {2, 4, 8, 16, 24, 32, 56, 64, 104, 128} <= set(widths)
    counts = {c.dims["groups"] for c in cases if c.dims["groups"] < c.dims["cin"]}
    assert {2, 3, 5, 7, 12, 16, 32} <= counts
    assert {c.dims["window"] for c in cases} == {1, 3, 5, 7}
    assert {c.dims["stride"] for c in cases} == {1, 2}
    for layout in (0, 1):
        assert {c.kind for c in cases if c.dims["channels_last"] == layout and
                c.dtype == "bfloat16"} == {c.kind for c in cases}  # fmt: skip
    assert {c.dims["bias"] for c in cases if c.kind == "conv"} == {0, 1}
    assert max(max(c.dims["cin"], c.dims["cout"]) for c in cases) <= 4096


def test_what_is_added_to_scores_is_drawn_in_every_way_that_decides_the_kernel() -> None:
    cases = list(itertools.islice(graph_cases(0, names=MASKED), 1500))
    kinds = {"context_attention", "context_attention_gradient", "generation_attention"}
    masked = [c.dims for c in cases if c.dims["masks"]]
    assert 0.8 < len(masked) / len(cases) < 0.95
    for kind in kinds:
        assert {c.dtype.partition("/")[0] for c in cases if c.kind == kind} == {
            "bfloat16", "float16", "fp32",
        }  # fmt: skip
    for own in ("strided", "training", "converts", "broadcast"):
        assert {d[own] for d in masked} == {0, 1}
    several = [d for d in masked if d["b"] > 1 and d["heads"] > 1]
    for count in (lambda d: 1, lambda d: d["b"], lambda d: d["heads"],
                  lambda d: d["b"] * d["heads"]):  # fmt: skip
        assert sum(d["masks"] == count(d) for d in several) > 50
    # What is not there has no layout, and nothing is learned that is true or false.
    assert not any(c.dims[name] for c in cases if not c.dims["masks"]
                   for name in ("strided", "training", "converts", "broadcast"))  # fmt: skip
    assert not any(d["training"] and d["converts"] for d in masked)


def test_convolutions_of_images_are_drawn_without_groups_and_in_every_layout() -> None:
    cases = list(itertools.islice(graph_cases(0, names=IMAGES), 1500))
    kinds = {name.removeprefix("image_") for name in IMAGES}
    assert {c.kind for c in cases} == {c.op for c in cases} == kinds
    assert {c.dims["groups"] for c in cases} == {1}
    for dtype in ("bfloat16", "float16", "fp32"):
        for last in (0, 1):
            assert {c.kind for c in cases if c.dtype == dtype
                    and c.dims["channels_last"] == last} == kinds  # fmt: skip
    assert {(c.dims["window"], c.dims["stride"]) for c in cases} == {
        (window, stride) for window in (1, 3, 5, 7) for stride in (1, 2)
    }
    assert 7 == min(c.dims["size"] for c in cases) < max(c.dims["size"] for c in cases) <= 224
    assert 100 < max(c.dims["b"] for c in cases) <= 128
    assert {1, 3, 4} < {c.dims["cin"] for c in cases}
    assert 1500 < max(c.dims["cin"] for c in cases) <= 2048
    round_, odd = (sum((c.dims["cin"] % 8 == 0) == is_round for c in cases) for is_round in (1, 0))
    assert round_ > odd > 150


def test_convolutions_along_a_line_are_long_and_of_windows_of_any_size() -> None:
    cases = list(itertools.islice(graph_cases(0, names=SOUND), 1500))
    assert {c.kind for c in cases} == {name.removeprefix("sound_") for name in SOUND}
    assert {c.dims["line"] for c in cases} == {1}
    assert set(range(1, 11)) < {c.dims["window"] for c in cases}
    assert {c.dims["stride"] for c in cases} == set(range(1, 6))
    assert {c.dims["channels_last"] for c in cases} == {0, 1}
    assert sum(c.dims["size"] > 10_000 for c in cases) > 500
    assert {1, 2} < {c.dims["cin"] for c in cases}
    assert {c.dims["groups"] for c in cases} > {1, 2, 4, 8, 16, 32}
    # All others are of images.
    assert not any(c.dims["line"] for c in drawn(300) if c.kind.startswith("conv"))


def test_narrow_operators_have_many_short_rows() -> None:
    cases = list(itertools.islice(graph_cases(0, names=NARROW), 3000))
    assert {c.kind for c in cases} == {name.removeprefix("narrow_") for name in NARROW}
    by_kind = {kind: [c for c in cases if c.kind == kind] for kind in {c.kind for c in cases}}
    for kind, found in by_kind.items():
        assert {c.op for c in found} == {kind}
        assert {c.dtype for c in found} == {"bfloat16", "float16", "fp32"}, kind
    for kind in ("layernorm", "layernorm_gradient"):
        dims = [c.dims for c in by_kind[kind]]
        assert max(d["cols"] for d in dims) <= 1024
        assert sum(d["rows"] > 50_000 for d in dims) > len(dims) / 4
        assert sum(d["cols"] <= 256 and d["rows"] > 50_000 for d in dims) > 20
    products = [c.dims for c in by_kind["linear"]]
    assert max(min(d["n"], d["k"], d["m"]) for d in products) <= 512
    sums = [d for d in products if d["turned"] == 2]  # gradients by weights: over all rows
    assert sum(d["k"] > 30_000 and min(d["m"], d["n"]) <= 256 for d in sums) > len(sums) / 4
    assert max(d["k"] for d in sums) > 500_000
    assert sum(c.dims["rows"] > 32_768 for c in by_kind["embedding"]) > 50
    assert max(c.dims["cols"] for c in by_kind["embedding"]) < 182
    assert {c.dims["strided"] for c in by_kind["embedding"]} == {0, 1}
    assert {c.dims["strided"] for c in by_kind["reduction"]} == {0, 1, 2}


def test_a_roll_goes_round_within_each_row() -> None:
    cases = list(itertools.islice(graph_cases(0, names=["roll"]), 200))
    assert {(c.kind, c.dims["strided"]) for c in cases} == {("elementwise", 2)}
    case = next(itertools.islice(graph_cases(0, scale=SMALL, names=["roll"]), 3, None))
    view = Operands("cpu", 1e6)
    (call,) = case.calls(view)
    rolled = call()
    source = view(case.dtype, 0, *rolled.shape).flatten(1)
    assert source.shape == (case.dims["rows"], case.dims["cols"])
    _, size, inner = rolled.shape
    assert any(torch.equal(rolled.flatten(1), source.roll(at * inner, 1)) for at in range(1, size))
    assert not torch.equal(rolled.flatten(1), source)


def test_one_new_token_in_fp32_is_drawn_alone() -> None:
    cases = list(itertools.islice(graph_cases(0, names=["fp32_masked_generation"]), 200))
    assert {(c.kind, c.dtype) for c in cases} == {("generation_attention", "fp32/fp32")}
    assert 0.75 < sum(c.dims["masks"] > 0 for c in cases) / 200 < 1.0


def test_half_of_the_fifth_sweep_is_convolutions() -> None:
    cases = list(itertools.islice(graph_cases(0, names=FIFTH), 2000))
    kinds = Counter(c.kind for c in cases)
    convolutions = sum(count for kind, count in kinds.items() if kind.startswith("conv"))
    assert 0.5 < convolutions / 2000 < 0.6
    assert min(kinds.values()) > 40


def test_named_operators_are_drawn_alone() -> None:
    names = ("softmax", "embedding")
    assert {c.op for c in itertools.islice(graph_cases(3, names=names), 30)} == set(names)


@pytest.mark.parametrize(
    ("name", "first", "seed", "names"),
    [("more", 0, 100, ()), ("more", 1_000_000, 101, ()), ("grouped", 0, 102, GROUPED),
     ("grouped", 1_000_000, 103, ()), ("masked", 0, 104, [*MASKED, "embedding_gradient"]),
     ("masked", 1_000_000, 105, ["conv", "conv_input_gradient", "conv_weight_gradient"]),
     ("masked", 2_000_000, 106, ()), ("sound", 0, 110, SOUND),
     *(("narrow", first, seed, [name for name in FIFTH if name not in SOUND])
       for first, seed in ((0, 108), (1_000_000, 109)))],
)  # fmt: skip
def test_rows_that_were_timed_before_can_be_drawn_again(
    name: str, first: int, seed: int, names: list[str]
) -> None:
    table = read_operators(MEASURED / f"h200_operators_graph_{name}.parquet", "foreplan")
    asked: dict[str, Any] = {"names": names} if names else {}
    rows = {int(row): at for at, row in enumerate(table.source_row)}
    found = 0
    for index, case in enumerate(itertools.islice(graph_cases(seed, **asked), 60)):
        if first + index in rows:  # but what did not fit
            at = rows[first + index]
            found += 1
            assert (table.op[at], table.dtype[at]) == (case.op, case.dtype)
            assert {n: int(table.dims[n][at]) for n in case.dims} == case.dims
    assert found > 50


def test_the_eager_sweep_draws_what_its_counts_say() -> None:
    cases = eager_cases({"bmm": 4, "linear": 2, "wide": 3}, 0)
    kinds = Counter((c.kind, c.dtype) for c in cases)
    assert kinds["bmm", "fp32"] == 4
    assert kinds["bmm", "bfloat16"] == 2
    assert kinds["softmax", "fp32"] == kinds["layernorm", "fp32"] == 3
    assert kinds["elementwise", "fp32"] == 3 * 11


def test_kinds_are_part_of_what_a_journal_is_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ops.parquet"
    head = {**HEAD, "kinds": ["embedding", "softmax"]}
    lines = [head, *([index, 1e-6] for index in range(20))]
    (tmp_path / "ops.parquet.journal").write_text("".join(json.dumps(x) + "\n" for x in lines))
    asked = ["-o", str(path), "--timing", "graph", "--seconds", "0"]
    assert main(asked) == 0
    assert set(read_operators(path, "foreplan").op) == {"softmax", "embedding"}
    assert main([*asked, "--kinds", "softmax", "embedding"]) == 0
    with pytest.raises(SpecError, match="a journal of"):
        main([*asked, "--kinds", "linear"])
    with pytest.raises(SpecError, match="--kinds"):
        main(["-o", str(path), "--kinds", "linear"])
    assert "20 rows" in capsys.readouterr().out


HEAD: dict[str, Any] = {"seed": 0, "timing": "graph", "library": "torch_graph-2.11-cuda",
                        "device": "NVIDIA H200"}  # fmt: skip


def test_a_lost_device_costs_one_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[int] = []
    usable = [True]
    monkeypatch.setattr(operator_sweep, "_usable", lambda: usable[0])

    def timer(case: Case) -> float:
        tried.append(len(tried))
        if tried[-1] == 3:
            raise RuntimeError("out of memory")
        if tried[-1] == 5:
            usable[0] = False
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        if tried[-1] == 8:
            raise KeyboardInterrupt  # stands for a kill
        return 1e-6 * (1 + tried[-1])

    path = tmp_path / "ops.journal"
    assert not run(graph_cases(0), SweepJournal(path, HEAD, resume=False), timer, 60.0)
    usable[0] = True
    with pytest.raises(KeyboardInterrupt):
        run(graph_cases(0), SweepJournal(path, HEAD, resume=True), timer, 60.0)
    with path.open("a") as file:
        file.write("[9, 1.2")  # a line torn by the kill
    found = SweepJournal(path, HEAD, resume=True)
    assert sorted(found.times) == [0, 1, 2, 4, 6, 7]
    assert found.next == 9
    assert "out of memory" in found.failed[3]
    assert "illegal memory access" in found.failed[5]
    assert found.failed[8] == "the process ended"
    assert "illegal" in capsys.readouterr().err
    with pytest.raises(SpecError, match="a journal of"):
        SweepJournal(path, {**HEAD, "seed": 1}, resume=True)


def test_a_journal_becomes_a_table_on_any_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ops.parquet"
    lines = [HEAD, *([index, 1e-6 * (index + 1)] for index in range(200)), [200]]
    (tmp_path / "ops.parquet.journal").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert main(["-o", str(path), "--timing", "graph", "--seconds", "0"]) == 0
    assert "200 rows, 1 operators failed" in capsys.readouterr().out
    table = read_operators(path, "foreplan")
    assert set(table.library) == {"torch_graph-2.11-cuda"}
    assert table.latency_s[:3] == pytest.approx([1e-6, 2e-6, 3e-6])
    for family in ("conv", "wide", "product", "context"):
        rows = np.isin(table.kind, FAMILIES[family])
        block = features(table.take(rows), family)
        assert np.isfinite(block.structural_s).all()
        assert (block.bound_s <= block.roofline_s * 1.0001).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_a_device_or_a_journal_it_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    output = ["-o", str(tmp_path / "found.parquet")]
    with pytest.raises(MissingDataError, match="no CUDA device"):
        main(output)
    with pytest.raises(SpecError, match="no such file"):
        main([*output, "--seconds", "0"])
    assert not list(tmp_path.iterdir())


def test_buffers_make_room_for_each_other_on_a_small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [47]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 80))
    assert Operands("cuda:0", most_bytes=16)._short_of_memory()
    free[0] = 48
    assert not Operands("cuda:0", most_bytes=16)._short_of_memory()
    # The buffers of one device do not matter to another, and a processor's are small.
    view = Operands("cpu", most_bytes=1 << 20)
    for dtype in ("fp32", "bfloat16", "float16"):
        assert view(dtype, 0, 8).shape == view(dtype, 0, 8, normal=True).shape
    assert len(view._buffers) == 6
