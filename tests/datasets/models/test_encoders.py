"""Vision encoders from the zoo and from Hugging Face folders."""

import json

import pytest

from foreplan.datasets.models.encoders import load_encoder
from foreplan.errors import SpecError

SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27,
    "num_attention_heads": 16, "intermediate_size": 4304, "image_size": 384, "patch_size": 14,
}  # fmt: skip


@pytest.mark.parametrize("nested", [False, True])
def test_folder_with_a_vision_configuration(tmp_path, nested):
    config = {"model_type": "llava", "vision_config": SIGLIP} if nested else SIGLIP
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_encoder(tmp_path)
    assert (found.layers, found.hidden, found.heads, found.head_dim) == (27, 1152, 16, 72)
    assert found.ffn == 4304
    assert found.patch_features == 3 * 14 * 14
    assert found.tokens == 27 * 27


def test_zoo_and_wrong_names(tmp_path):
    assert load_encoder("vit-22b").hidden == 6144
    with pytest.raises(SpecError, match="did you mean 'vit-22b'"):
        load_encoder("vit-22")
    (tmp_path / "config.json").write_text(json.dumps({**SIGLIP, "patch_size": 0}))
    with pytest.raises(SpecError, match="patch_size"):
        load_encoder(tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_heads_that_do_not_divide_are_refused(tmp_path, nested):
    """Cut off, their features would be fewer than the width says."""
    odd = {**SIGLIP, "num_attention_heads": 15}
    config = {"model_type": "llava", "vision_config": odd} if nested else odd
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match="heads that divide hidden = 1152, not 15"):
        load_encoder(tmp_path)
