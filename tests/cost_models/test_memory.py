from __future__ import annotations

import pytest

from foreplan.cost_models.memory import GIB, MIB, MemoryLedger, show_bytes, show_missing
from foreplan.errors import InfeasibleError


def test_lines_total_and_rest() -> None:
    ledger = MemoryLedger("t4", 16 * GIB, {"weights": 10 * GIB, "kv_cache": GIB})
    assert (ledger.total_bytes, ledger.free_bytes) == (11 * GIB, 5 * GIB)
    held = ledger.with_peak({"activations": 2 * GIB, "kv_cache": GIB})
    assert held.lines == {"weights": 10 * GIB, "kv_cache": 2 * GIB, "activations": 2 * GIB}
    assert list(held.lines) == ["weights", "kv_cache", "activations"]
    assert (held.total_bytes, held.free_bytes) == (14 * GIB, 2 * GIB)
    assert ledger.peak == {}
    held.check(0)


def test_what_does_not_fit_says_how_much_of_what() -> None:
    ledger = MemoryLedger("t4", 16 * GIB, {"weights": 20 * GIB, "workspace": 300 * MIB})
    assert ledger.free_bytes == -4 * GIB - 300 * MIB
    with pytest.raises(InfeasibleError) as caught:
        ledger.check(3)
    text = str(caught.value)
    assert "rank 3 (t4) needs 20.29 GiB of 16.00 GiB: 4.29 GiB too much" in text
    assert "above all weights (20.00 GiB)" in text
    assert caught.value.exit_code == 3


def test_exactly_full_fits_and_unknown_capacity_never_fails() -> None:
    MemoryLedger("t4", 5, {"weights": 5}).check(0)
    unknown = MemoryLedger("cpu", None, {"weights": 1 << 60})
    assert unknown.free_bytes is None
    unknown.check(0)
    MemoryLedger("t4", 0).check(0)
    with pytest.raises(InfeasibleError, match=r"of 0\.0 MiB"):
        MemoryLedger("t4", 0, {"weights": 1}).check(0)


def test_bytes_for_people() -> None:
    assert show_bytes(GIB) == "1.00 GiB"
    assert show_bytes(-3 * GIB) == "-3.00 GiB"
    assert show_bytes(GIB - MIB) == "1023.0 MiB"
    assert show_bytes(0) == "0.0 MiB"


def test_what_is_missing_is_rounded_up() -> None:
    assert show_missing(1) == "0.1 KiB"
    assert show_missing(MIB) == "1.0 MiB"
    assert show_missing(MIB + 1) == "1.1 MiB"
    assert show_missing(GIB + MIB) == "1.01 GiB"


def test_a_byte_too_much_is_not_0() -> None:
    with pytest.raises(InfeasibleError, match=r"needs 1\.0 MiB of 1\.0 MiB: 1 B too much"):
        MemoryLedger("t4", MIB - 1, {"weights": MIB}).check(0)
    assert show_bytes(5000) == "4.9 KiB"
    assert show_bytes(MIB // 10) == "0.1 MiB"
