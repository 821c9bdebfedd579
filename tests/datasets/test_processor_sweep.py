"""Operators of a processor, timed as the shipped rates want them: draws and the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreplan.datasets.processor_sweep import convolutions, main
from foreplan.datasets.profile import Profile
from foreplan.datasets.program import Variant, program
from foreplan.errors import SpecError


def test_draws_are_convolutions_of_both_passes_and_of_every_kind() -> None:
    found = convolutions(30)
    assert found == convolutions(30) != convolutions(30, seed=1)
    assert {item.op for item in found} == {"conv2d_forward", "conv2d_backward"}
    assert {item.variant.compute for item in found} == {"fp32", "bf16"}
    assert any(item.dims["groups"] == item.dims["channels"] > 1 for item in found)
    assert any(item.dims["stride"] == 2 for item in found)
    assert all(item.flops <= 4e9 for item in found), "2e9 forward, twice that backward"


@pytest.mark.serial
def test_rows_are_timed_again_and_kept_bare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert "3 operators, 3 ran" in capsys.readouterr().out
    found = Profile.load(output)
    assert add in found.by_program
    assert all(row.samples == 0 and row.clock_hz is None for row in found.rows)
    output.write_bytes(b"no xz")
    with pytest.raises(SpecError, match="compressed profile"):
        Profile.load(output)
