"""Whole processes, as a user starts them: help, and a plan from a saved profile."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

PROFILES = Path(__file__).parent / "profiles"


def run(*words: str) -> None:
    command = [sys.executable, "-m", "foreplan.cli", *words]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "CI": "1"})


@pytest.mark.benchmark(group="process")
def test_help(benchmark) -> None:
    benchmark.pedantic(run, args=("--help",), rounds=5, warmup_rounds=1)


@pytest.mark.benchmark(group="process")
def test_plan_from_a_saved_profile(benchmark, tmp_path: Path) -> None:
    words = (
        "plan", "serving", "-m", "demo-llama-random", "-c", str(PROFILES / "cluster.yaml"),
        "-w", "batch=8,prompt_tokens=64,new_tokens=24,min_average_bits=8",
        "-o", str(tmp_path / "plan.json"),
    )  # fmt: skip
    benchmark.pedantic(run, args=words, rounds=5, warmup_rounds=1)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    benchmark.extra_info["peak_memory_mib"] = usage.ru_maxrss / 1024
