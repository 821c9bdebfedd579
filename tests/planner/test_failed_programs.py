"""From a profile that holds failures to plans that do without them, whatever the costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foreplan.cost_models.book import Profiles, cost_book
from foreplan.cost_models.roofline import RooflineSource
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.program import Program
from foreplan.errors import InfeasibleError, MissingDataError
from foreplan.planner.api import load_cluster, plan
from foreplan.planner.plan import Plan
from foreplan.planner.precision.shapes import precision_programs
from foreplan.planner.precision.spec import PrecisionWorkload

MEASURED = Path(__file__).parents[1] / "benchmarks" / "profiles" / "cpu-threads-1.json"
SERVING = {"batch": 4, "prompt_tokens": 16, "new_tokens": 8, "bits": [16, 8, 4]}
TRAINING = {
    "batch": 8, "network": "byte_lm", "steps": 1, "calibration_batches": 1, "slack": 0.0,
    "network_options": {"context": 32, "width": 128, "layers": 1, "heads": 2},
}  # fmt: skip

Fails = Callable[[Program], bool]


def _failed(item: Program) -> Row:
    return Row(
        op=item.op, dims=item.dims, variant=str(item.variant), status="failed", error="SIGILL"
    )


def _cluster(folder: Path, *profiles: Profile) -> Path:
    """Equal processors, one with each profile."""
    lines = []
    for k, profile in enumerate(profiles):
        profile.save(folder / f"{k}.json")
        lines.append(f"- {{name: {profile.device.name!r}, host: h{k}, memory_bytes: 268435456,")
        lines.append(f"   profile: {k}.json}}")
    path = folder / "cluster.yaml"
    hosts = ", ".join(f"h{k}" for k in range(len(profiles)))
    path.write_text(
        "devices:\n" + "\n".join(lines) + f"\ntiers:\n- {{group: [{hosts}], scope: network, "
        "latency_s: 1e-4, bandwidth_bytes_per_s: 5e9, source: made up}\n"
    )
    return path


def _with_failures(profile: Profile, fails: Fails) -> Profile:
    rows = (_failed(r.program()) if fails(r.program()) else r for r in profile.rows)
    return profile.model_copy(update={"rows": tuple(rows)})


def _serving(cluster: Path, costs: str = "measured") -> Plan:
    return plan("serving", "tiny-llama-random", cluster, SERVING, costs=costs)


def _kernels(made: Plan) -> Iterator[tuple[str, str]]:
    for stage in made.decision["stages"]:
        yield from stage["kernels"].items()


@pytest.fixture(scope="module")
def measured() -> Profile:
    return Profile.load(MEASURED)


@pytest.mark.parametrize("costs", ["measured", "roofline"])
def test_serving_takes_the_next_kernel(measured: Profile, tmp_path: Path, costs: str) -> None:
    sound = dict(_kernels(_serving(_cluster(tmp_path, measured), costs)))
    crashed = next(variant for key, variant in sound.items() if key.startswith("decode/linear"))

    def fails(item: Program) -> bool:
        return item.op == "linear" and str(item.variant) == crashed

    made = _serving(_cluster(tmp_path, _with_failures(measured, fails)), costs)
    chosen = dict(_kernels(made))
    assert chosen
    assert all(v != crashed for key, v in chosen.items() if "attention" not in key)
    assert any("programs failed" in note and "do without" in note for note in made.assumptions)


def test_serving_leaves_out_a_device_that_cannot_attend(measured: Profile, tmp_path: Path) -> None:
    broken = _with_failures(measured, lambda item: item.op == "attention")
    made = _serving(_cluster(tmp_path, measured, broken))
    assert {stage["device"] for stage in made.decision["stages"]} == {"h0/cpu:threads=1"}
    assert any("h1/" in note and "left out" in note for note in made.assumptions)
    with pytest.raises(InfeasibleError, match=r"attention\(.*failed.*SIGILL.*foreplan profile"):
        _serving(_cluster(tmp_path, broken))


def test_serving_avoids_only_the_shapes_that_failed(measured: Profile, tmp_path: Path) -> None:
    """What failed for four sequences leaves smaller micro-batches."""
    argmax = next(row.program() for row in measured.rows if row.op == "argmax")
    of_four = Program("argmax", (4, load_model("tiny-llama-random").vocab), argmax.variant)
    sound = _serving(_cluster(tmp_path, measured)).decision
    broken = measured.model_copy(update={"rows": (*measured.rows, _failed(of_four))})
    made = _serving(_cluster(tmp_path, broken)).decision
    assert sound["decode_microbatch"] == 4
    assert max(made["decode_microbatch"], made["prefill_microbatch"]) < 4


def _training_profile(measured: Profile, fails: Fails) -> Profile:
    """Every program of the training step at the roofline of the measured device."""
    wanted = precision_programs(None, PrecisionWorkload.model_validate(TRAINING), "cpu")
    roofline, rows = RooflineSource(measured.device), []
    for item in wanted:
        price = roofline.estimate(item, measured.device.name)
        assert price is not None
        rows.append(
            _failed(item) if fails(item) else Row(
                op=item.op, dims=item.dims, variant=str(item.variant), status="ok", samples=9,
                low_s=price.low_s, median_s=price.mean_s, high_s=price.high_s,
            )
        )  # fmt: skip
    return measured.model_copy(update={"rows": tuple(rows)})


@pytest.mark.parametrize("costs", ["measured", "roofline"])
def test_precision_takes_no_variant_that_failed(
    measured: Profile, tmp_path: Path, costs: str
) -> None:
    def decided(fails: Fails) -> set[str]:
        cluster = _cluster(tmp_path, _training_profile(measured, fails))
        made = plan("precision", None, cluster, TRAINING, costs=costs)
        return {v for worker in made.decision["workers"] for v in worker["operators"].values()}

    crashed = decided(lambda item: False)
    lower = {text for text in crashed if not text.startswith("fp32/fp32/")}
    assert lower
    left = decided(lambda item: str(item.variant) in lower)
    assert left
    assert not left & lower


def test_no_cost_says_what_failed_where(measured: Profile, tmp_path: Path) -> None:
    broken = _with_failures(measured, lambda item: item.op == "norm")
    path = _cluster(tmp_path, broken)
    cluster, folder = load_cluster(path)
    profiles = Profiles.of(cluster, folder)
    failed = next(row.program() for row in broken.rows if row.op == "norm")
    for costs in ("measured", "predicted", "roofline"):
        book = cost_book(profiles.completed(cluster), profiles, costs)
        assert not book.can_price(failed, "h0/cpu:threads=1")
        with pytest.raises(MissingDataError) as raised:
            book.cost(failed, "h0/cpu:threads=1")
        text = str(raised.value)
        for word in ("norm(", "h0/cpu:threads=1", "SIGILL", "'foreplan profile'"):
            assert word in text
