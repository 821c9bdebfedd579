"""A byte-level Llama: schedules, interruption, and a folder that every command reads."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.datasets.graphs.causal_lm import causal_lm
from foreplan.datasets.models import byte_llama
from foreplan.datasets.models.byte_llama import ByteLlama, bits_per_byte, main, train_byte_llama
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model_zoo import pretrained_folders
from foreplan.datasets.models.weights import FolderWeights
from foreplan.errors import SpecError

TINY = ByteLlama(
    layers=2, hidden=32, heads=2, ffn=64, context=16, batch=2, steps=6, peak_rate=3e-3, seed=1
)


@pytest.fixture
def short_text(monkeypatch):
    """A few hundred bytes for each split."""
    text = {
        split: np.frombuffer(b"def f(x): pass\n" * lines, np.uint8)
        for split, lines in (("train", 60), ("validation", 20), ("test", 10))
    }
    monkeypatch.setattr(byte_llama, "standard_library_text", text.__getitem__)


@given(
    steps=st.integers(2, 5000), data=st.data(), early=st.booleans(),
    peak=st.floats(1e-5, 1e-1),
)  # fmt: skip
def test_rates_stay_within_the_peak_and_only_an_early_stop_changes_its_last_quarter(
    steps, data, early, peak
):
    plain = ByteLlama(steps=steps, peak_rate=peak)
    stop = data.draw(st.integers(1, steps)) if early else None
    made = ByteLlama(steps=steps, peak_rate=peak, stop=stop)
    rates = [made.rate(step) for step in range(made.last)]
    assert len(rates) == (stop or steps)
    assert min(rates) > 0
    assert max(rates) <= peak * (1 + 1e-12)
    for step in range(made.cool):
        assert rates[step] == plain.rate(step)


def test_an_interrupted_training_ends_in_the_same_weights(tmp_path, short_text):
    class Interrupted(Exception):
        pass

    def interrupt(text):
        if text.startswith("step 2"):
            raise Interrupted

    train_byte_llama(TINY, tmp_path / "whole", every=2)
    with pytest.raises(Interrupted):
        train_byte_llama(TINY, tmp_path / "parts", every=2, say=interrupt)
    assert (tmp_path / "parts" / "training.safetensors").is_file()
    card = train_byte_llama(TINY, tmp_path / "parts", every=2)
    names = sorted(path.name for path in (tmp_path / "parts").iterdir())
    assert names == ["card.json", "config.json", "model.safetensors"]
    assert json.loads((tmp_path / "parts" / "card.json").read_text()) == card
    whole, parts = (
        FolderWeights(load_model(tmp_path / name)).tensor(1, "down.weight")
        for name in ("whole", "parts")
    )
    assert whole.float().numpy() == pytest.approx(parts.float().numpy(), rel=1e-2, abs=1e-4)


def test_the_folder_is_a_trained_model_that_knows_more_than_nothing(tmp_path, short_text):
    longer = TINY.model_copy(update={"steps": 60})
    card = train_byte_llama(longer, tmp_path)
    model = load_model(tmp_path)
    assert (model.weights, model.dtype, model.tied, model.layers) == ("trained", "bf16", True, 2)
    assert model.parameters == card["parameters"]
    assert card["bytes_seen"] == 60 * 2 * 16
    assert 0 < card["bits_per_byte"]["validation"] < 7.9  # 8 is no knowledge at all


def test_an_early_stop_may_come_late_but_not_too_late(tmp_path, short_text):
    class Interrupted(Exception):
        pass

    def interrupt(text):
        if text.startswith("step 4"):
            raise Interrupted

    with pytest.raises(Interrupted):
        train_byte_llama(TINY, tmp_path, every=2, say=interrupt)
    late = TINY.model_copy(update={"stop": 4})  # would have cooled down from step 3 on
    with pytest.raises(SpecError, match="another folder"):
        train_byte_llama(late, tmp_path)
    wide = TINY.model_copy(update={"hidden": 64})
    with pytest.raises(SpecError, match="another folder"):
        train_byte_llama(wide, tmp_path)
    card = train_byte_llama(TINY.model_copy(update={"stop": 6}), tmp_path)
    assert card["settings"]["stop"] == 6


def test_wrong_settings_are_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "x"), "--layers", "0"]) == 2
    assert "layers" in capsys.readouterr().err


def test_the_model_that_comes_along_is_what_its_card_says():
    folder = pretrained_folders()["byte-llama"]
    card = json.loads((folder / "card.json").read_text())
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8 << 20
    model = load_model("byte-llama")
    assert (model.weights, model.vocab, model.parameters) == ("trained", 256, card["parameters"])
    assert set(card["settings"]) == set(ByteLlama.model_fields)
    # Other Pythons have other sources; four times as much text would be within 1 %.
    found = bits_per_byte(causal_lm(model), "test", model.max_sequence, most=32)
    assert found == pytest.approx(card["bits_per_byte"]["test"], rel=0.15)
