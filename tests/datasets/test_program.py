"""Programs as keys."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import replace

from foreplan.datasets.program import Program, Variant, program

LINEAR = program("linear", Variant("bf16", "bf16", "torch.linear"), rows=8, n=16, k=32)


def test_equal_programs_have_one_hash_that_no_copy_carries_along() -> None:
    again = program("linear", Variant("bf16", "bf16", "torch.linear"), rows=8, n=16, k=32)
    assert again == LINEAR
    assert hash(again) == hash(LINEAR) == hash(copy.deepcopy(LINEAR))
    other = replace(LINEAR, sizes=(8, 16, 33))
    assert other != LINEAR
    assert hash(other) == hash(Program("linear", (8, 16, 33), LINEAR.variant)) != hash(LINEAR)
    # Another process hashes strings otherwise.
    code = (
        "import pickle, sys\nfrom foreplan.datasets.program import Program\n"
        "found = pickle.loads(sys.stdin.buffer.read())\n"
        "print(found in {Program(found.op, found.sizes, found.variant)})"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(LINEAR), capture_output=True, check=True
    )
    assert answer.stdout.strip() == b"True"
