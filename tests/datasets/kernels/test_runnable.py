"""`datasets.kernels.runnable`: inputs of programs, by themselves and behind one another."""

import pytest
import torch

from foreplan.datasets.kernels.runnable import Inputs
from foreplan.datasets.models.decoder_programs import layer_programs
from foreplan.datasets.models.model_zoo import zoo_model
from foreplan.datasets.program import Variant

KERNELS = {"linear": "bf16/bf16/torch.linear", "attention": "bf16/bf16/torch.sdpa"}


def inputs_of(monkeypatch: pytest.MonkeyPatch, inputs: Inputs) -> list[torch.Tensor]:
    """Activations that each program of a decoder layer was given, after all have run once."""
    seen: list[torch.Tensor] = []
    given = inputs._input
    monkeypatch.setattr(inputs, "_input", lambda *shape: seen.append(given(*shape)) or seen[-1])
    model = zoo_model("tiny-llama-random")
    counts = layer_programs(model, 2, 1, 8, lambda op, _: Variant.parse(KERNELS[op]))
    for item, _ in counts:
        inputs.runnable(item).call()
    assert len(seen) >= len(counts)
    return seen


def test_programs_behind_one_another_read_what_was_just_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = inputs_of(monkeypatch, Inputs("cpu", behind_one_another=True))
    own = inputs_of(monkeypatch, Inputs("cpu"))
    assert [x.shape for x in shared] == [x.shape for x in own]
    assert len({x.data_ptr() for x in shared}) == 1
    assert len({x.data_ptr() for x in own}) == len(own)


def test_an_activation_too_large_to_be_shared_has_memory_of_its_own() -> None:
    inputs = Inputs("cpu", behind_one_another=True)
    small, large = inputs._input(1024, 1024), inputs._input(1024, 1025)
    assert large.shape == (1024, 1025)
    assert large.untyped_storage().data_ptr() != small.untyped_storage().data_ptr()
