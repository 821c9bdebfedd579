"""Makes `bubble_cases` importable, which processes started by the tests import too."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    # Sums of several threads come in another order, and bits are compared here.
    torch.set_num_threads(1)
