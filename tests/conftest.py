"""Settings of the whole test run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Compiling and machines shared with others make single examples slow at random; on CI the examples
# are the same in every run.
settings.register_profile(
    "foreplan", deadline=None, max_examples=60, derandomize="CI" in os.environ
)
settings.load_profile("foreplan")

#: Files whose tests compare times, or wait for processes for some seconds only: a neighbour on the
#: same cores would make them wrong.
SERIAL = (
    "datasets/ranks/test_links.py",
    "datasets/timing/test_measuring.py",
    "datasets/test_profile.py",
    "planner/test_fourth_planner.py",
    "planner/verify/test_placement.py",
    "planner/verify/test_runtime.py",
    "planner/verify/test_verify.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no other files for what runs alone: all of them take longer than to find these."""
    if config.option.markexpr != "serial" or collection_path.suffix != ".py":
        return None
    name = collection_path.relative_to(Path(__file__).parent).as_posix()
    return (name not in SERIAL and "mark.serial" not in collection_path.read_text()) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what has to run alone; ``make test`` runs it after the rest, in one process."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.relative_to(here).as_posix() in SERIAL:
            item.add_marker("serial")


@pytest.fixture(scope="session")
def trained_decoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int, int], Path]:
    """Makes a folder with weights of a small decoder of bytes whose predictions are not flat."""

    def make(layers: int, kv_heads: int, positions: int) -> Path:
        import torch
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=kv_heads,
            max_position_embeddings=positions, initializer_range=0.2,
        )  # fmt: skip
        path = tmp_path_factory.mktemp("decoder")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
        return path

    return make


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads gain nothing on small tensors and wait for each other on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
