"""What the ranks of all candidates are forked with: loaded once, before them, without a thread."""

import os
import subprocess
import sys

import pytest

NEEDED = {
    "bubbles": "torch.fx.experimental.symbolic_shapes foreplan.planner.bubbles.execution.kernels",
    "precision": "torch._dynamo foreplan.planner.precision.execution.kernels",
}


@pytest.mark.parametrize("kind", NEEDED)
def test_what_forked_ranks_need_is_loaded_before_without_a_thread(kind: str) -> None:
    code = (
        "import os, sys\n"
        "from foreplan.planner.registry import planner\n"
        f"planner({kind!r}).preload()\n"
        "assert len(os.listdir('/proc/self/task')) == 1\n"
        f"assert not {set(NEEDED[kind].split())} - set(sys.modules)\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


def test_a_first_step_of_training_imports_nothing_more_of_torch() -> None:
    code = (
        "import sys, torch\n"
        "from foreplan.planner.registry import planner\n"
        "planner('precision').preload()\n"
        "loaded = {name for name in sys.modules if name.startswith('torch')}\n"
        "layer = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.AdamW(layer.parameters())\n"
        "layer(torch.ones(2, 4)).sum().backward()\n"
        "optimizer.step()\n"
        "late = {name for name in sys.modules if name.startswith('torch')} - loaded\n"
        "assert len(late) < 20, sorted(late)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
