"""Pages of freed tensors are kept where a step comes again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from foreplan.datasets.timing.freed_memory import keep_freed_memory
keep_freed_memory()
def step():
    held = [torch.ones(1 << 20) for _ in range(8)]
    del held
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
print((faults() - before) / 10)
"""
#: 8 tensors of 4 MiB in pages of 4 KiB. Without the call 6,000 and more were seen.
PAGES = 8 * 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="parameters of glibc's malloc")
def test_steps_fault_in_no_pages_once_freed_memory_is_kept() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < PAGES / 100
