"""Networks and samples to train on: equal everywhere, and nobody's random state is touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foreplan.datasets.models.byte_text import standard_library_text, windows
from foreplan.datasets.models.digits import digits
from foreplan.datasets.models.networks import (
    ByteLMConfig,
    DigitsCNNConfig,
    DigitsMLPConfig,
    NetworkConfig,
    build,
)
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError

CONFIGS = [
    ByteLMConfig(width=32, layers=2, heads=2, context=16),
    DigitsMLPConfig(width=32),
    DigitsCNNConfig(width=8),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_a_seed_is_a_network(config: NetworkConfig) -> None:
    before = torch.random.get_rng_state()
    first, again, other = (build(config, seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert all(bool(value.isfinite().all()) for value in first.values())
    with torch.device("meta"):
        empty = build(config, 0)
    assert {n: p.shape for n, p in empty.named_parameters()} == {
        n: p.shape for n, p in build(config, 0).named_parameters()
    }
    assert all(p.is_meta for p in empty.parameters())


def test_the_language_model_starts_without_an_opinion_and_looks_only_back() -> None:
    model = build(CONFIGS[0], 0)
    ids = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids)
        later = ids.clone()
        later[:, 10:] = 0
        changed = model(later)
    entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    assert float(entropy) == pytest.approx(np.log(256), rel=0.02)
    assert torch.equal(changed[:, :10], logits[:, :10])
    assert not torch.equal(changed[:, 10:], logits[:, 10:])


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(SpecError, match="a width that 3 heads divide"):
        validate(ByteLMConfig, {"width": 32, "heads": 3}, "network")


def test_texts_are_of_different_files() -> None:
    texts = {split: standard_library_text(split) for split in ("train", "validation", "test")}
    assert all(len(text) > 100_000 and not text.flags.writeable for text in texts.values())
    assert len(texts["train"]) > 4 * len(texts["validation"])
    # A line of a validation file that is long enough to be its own.
    line = max(texts["validation"].tobytes().split(b"\n"), key=len)
    assert line not in texts["train"].tobytes()


def test_windows_are_a_function_of_their_key() -> None:
    text = standard_library_text("train")
    one, again, other = (windows(text, 4, 32, key) for key in ((0, 1, 2), (0, 1, 2), (0, 2, 1)))
    assert one.shape == (4, 32)
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert one[0].tobytes() in text.tobytes()


def test_digits_are_split_and_normalised_by_the_training_images() -> None:
    (train, labels), (test, _) = digits("train"), digits("test")
    assert (len(train), len(test)) == (1437, 360)
    assert train.shape[1:] == (1, 8, 8)
    assert set(labels.tolist()) == set(range(10))
    assert float(train.mean()) == pytest.approx(0, abs=1e-4)
    assert float(train.std()) == pytest.approx(1, abs=1e-4)
