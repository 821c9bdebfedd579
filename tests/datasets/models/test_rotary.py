"""The order of a head's features, and what the tables of its rotation then say."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.rotary import Rotary
from foreplan.datasets.models.tensor_change import TensorChange
from foreplan.planner.verify.rotation import rotation


def test_whole_heads_in_halves_stay_as_they_are() -> None:
    assert Rotary().order(8) == Rotary(width=8).order(8) == ()


def test_pairs_come_half_a_head_apart_and_the_rest_behind_them() -> None:
    assert Rotary(width=4).order(8) == (0, 1, 4, 5, 2, 3, 6, 7)
    assert Rotary(pairs="neighbours").order(8) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert Rotary(width=4, pairs="neighbours").order(8) == (0, 2, 4, 5, 1, 3, 6, 7)


def test_features_that_are_not_turned_keep_their_bits() -> None:
    model = load_model("llama-3-8b").model_copy(update={"rotary": Rotary(width=32)})
    cos, sin = rotation(model, 5)
    assert cos.shape == sin.shape == (5, 128)
    for half in (0, 64):
        assert (cos[:, half + 16 : half + 64] == 1).all()
        assert (sin[:, half + 16 : half + 64] == 0).all()
    assert (sin[1:, :16] != 0).all()


@pytest.mark.parametrize(
    "rotary",
    [{"width": 3}, {"width": 256}, {"local_theta": 1e4}, {"local_layers": [1]}],
)
def test_a_rotation_that_no_head_has(rotary: dict[str, object]) -> None:
    facts = load_model("llama-3-8b").model_dump()
    with pytest.raises(ValidationError):
        Model.model_validate(facts | {"rotary": rotary})


def test_a_change_touches_what_it_names() -> None:
    stored = torch.arange(8, dtype=torch.bfloat16)[:, None].expand(8, 2).clone()
    same = TensorChange()(stored)
    assert same is stored
    made = TensorChange(offset=1.0, factor=2.0, rows=4, order=(1, 0), heads=3)(stored)
    assert made.dtype == torch.float32
    assert made[:, 0].tolist() == [4.0, 2.0, 8.0, 6.0, 6.0, 5.0, 7.0, 8.0]
    assert stored[:, 0].tolist() == list(range(8))
