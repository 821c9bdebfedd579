"""Operators of a processor, timed as the shipped rates want them: draws and the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreplan.datasets.profile import Profile
from foreplan.datasets.program import Variant, program
from foreplan.datasets.sweeps.processor_sweep import SMALL, convolutions, main
from foreplan.datasets.timing.measuring import Worker
from foreplan.errors import SpecError


def test_draws_are_convolutions_of_both_passes_and_of_every_kind() -> None:
    found = convolutions(30)
    assert found == convolutions(30) != convolutions(30, seed=1)
    assert {item.op for item in found} == {"conv2d_forward", "conv2d_backward"}
    assert {item.variant.compute for item in found} == {"fp32", "bf16"}
    assert any(item.dims["groups"] == item.dims["channels"] > 1 for item in found)
    assert any(item.dims["stride"] == 2 for item in found)
    assert all(item.flops <= 4e9 for item in found), "2e9 forward, twice that backward"


def test_small_images_have_few_positions_and_many_channels() -> None:
    small = convolutions(60, images=SMALL)
    assert {item.dims["height"] for item in small} <= set(SMALL.sizes)
    assert max(item.dims["channels"] for item in small) == 2048
    assert any(item.dims["kernel_height"] > item.dims["height"] for item in small)
    assert not {*small} & {*convolutions(60)}


@pytest.mark.serial
def test_rows_are_timed_again_and_kept_bare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"memory_bandwidth": 1e10, "launch_overhead_s": 1e-6}  # measured, they take seconds
    monkeypatch.setattr(Worker, "figures", lambda _: figures)
    add = program("add", Variant("bf16", "bf16", "torch.add"), rows=4, cols=64)
    like = Profile.model_validate({
        "schema": "foreplan.profile/1", "software": {"torch": "2"}, "device": {
            "name": "cpu:threads=1", "chip": "x", "vendor": "x", "kind": "cpu"},
        "rows": ({"op": "add", "dims": add.dims, "variant": str(add.variant), "status": "failed"},),
    })  # fmt: skip
    like.save(tmp_path / "like.json")
    output = tmp_path / "found.json.xz"
    main(["cpu:threads=1", "-o", str(output), "--like", str(tmp_path / "like.json"),
          "--convolutions", "1", "--rounds", "1"])  # fmt: skip
    assert "5 operators, 5 ran" in capsys.readouterr().out
    found = Profile.load(output)
    assert add in found.by_program
    assert all(row.samples == 0 and row.clock_hz is None for row in found.rows)
    output.write_bytes(b"no xz")
    with pytest.raises(SpecError, match="compressed profile"):
        Profile.load(output)


@pytest.mark.parametrize(
    ("output", "count", "field"),
    [("x.json", "1", "--output"), ("x.json.xz", "-1", "--convolutions")],
)
def test_bad_input_is_refused_before_anything_is_timed(
    tmp_path: Path, output: str, count: str, field: str
) -> None:
    with pytest.raises(SpecError, match=field):
        main(["cpu:threads=1", "-o", str(tmp_path / output), "--convolutions", count])
    assert not list(tmp_path.iterdir())
