"""The network zoo: every entry is built and counted, and found by all that it is called."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers

from foreplan.cost_models.ranking import rank_devices
from foreplan.datasets.graphs.transformers_network import (
    TransformersNetwork,
    network_module,
    network_or_model,
)
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model_zoo import zoo_names
from foreplan.datasets.models.network_zoo import (
    network_aliases,
    network_documents,
    zoo_network,
    zoo_networks,
)
from foreplan.datasets.tir.networks import network as workload
from foreplan.datasets.tir.networks import zoo
from foreplan.errors import SpecError


def test_one_number_is_the_side_of_a_square() -> None:
    square = network_or_model("resnet-18", image_size=64)
    assert square == network_or_model("resnet-18", image_size=(64, 64))
    numpys = (np.int64(64), np.int64(64))
    assert square == network_or_model("resnet-18", image_size=numpys)  # type: ignore[arg-type]
    for wrong in (0, (64,), (64, -1), (64.0, 64), "64x64", True, (True, 64)):
        with pytest.raises(SpecError, match=r"image size: got .*, expected pixels, or"):
            network_or_model("resnet-18", image_size=wrong)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="got '64 x 64', expected none: gpt2 takes no images"):
        network_or_model("gpt2", image_size=64)


def _network(name: str) -> TransformersNetwork:
    found = network_or_model(name)
    assert isinstance(found, TransformersNetwork)
    return found


@pytest.mark.parametrize("name", zoo_networks())
def test_what_is_built_has_the_published_parameters_and_takes_what_it_says(name: str) -> None:
    entry, network = zoo_networks()[name], _network(name)
    module, inputs = network_module(network, batch=2, tokens=16)
    assert sum(p.numel() for p in module.parameters()) == entry.parameters == network.parameters
    assert type(module).__name__ == entry.class_
    assert {p.device.type for p in module.parameters()} == {"meta"}
    if entry.image is not None:
        assert inputs["pixel_values"].shape == (2, 3, entry.image, entry.image)
    both = {"on both sides": "input_ids", "and 3000 frames": "input_features"}
    assert module.main_input_name == both.get(
        entry.beside, "input_ids" if entry.image is None else "pixel_values"
    )
    assert ("decoder_input_ids" in inputs) == bool(entry.beside)
    if "input_features" in inputs:
        assert inputs["input_features"].shape[-1] == 3000


@pytest.mark.parametrize(
    ("called", "name"),
    [("ResNet50", "resnet-50"), ("vit_b_16", "vit-base"), ("swin_t", "swin-tiny"),
     ("bert-base-uncased", "bert-base"), ("google/vit-base-patch16-224", "vit-base"),
     ("openai/whisper-tiny", "whisper-tiny"), ("mobilenet_v2_1.0_224", "mobilenet-v2"),
     ("MobileNetV2", "mobilenet-v2")],
)  # fmt: skip
def test_a_network_is_found_by_all_that_it_is_called(called: str, name: str) -> None:
    assert _network(called).name == name


def test_no_name_is_that_of_two() -> None:
    """Nor that of a decoder, which would never be reached."""
    assert not {name for name in zoo_names() if zoo_network(name) is not None}
    for called, name in network_aliases().items():
        found = zoo_network(called)
        assert found is not None
        assert found.name == name
    assert zoo_network("resnet-51") is None


@pytest.mark.parametrize(
    ("called", "guess"),
    [("resnet-51", "resnet-50"), ("whisper-tinny", "whisper-tiny"),
     ("bert-base-uncase", "bert-base"), ("llama-3.1-8", "llama-3.1-8b"), ("gpt3", "gpt2")],
)  # fmt: skip
def test_a_misspelt_name_gets_the_nearest_of_both_zoos(called: str, guess: str) -> None:
    with pytest.raises(SpecError, match=f"did you mean '{guess}'"):
        network_or_model(called)


def test_plans_say_who_takes_a_network() -> None:
    with pytest.raises(SpecError, match="'foreplan predict resnet-50' prices a pass of it"):
        load_model("resnet50")


def test_the_workload_zoo_has_no_sizes_of_its_own_for_these() -> None:
    """One list: where both have a name, one configuration decides."""
    shared = [name for name in zoo() if zoo_network(name) is not None]
    assert len(shared) >= 10
    for name in ("vit-small", "bert-tiny", "t5-small"):
        module, _ = workload(name).build(workload(name).shapes[0], 1)
        entry = zoo_networks()[name]
        config: Any = module.model.config  # type: ignore[union-attr]
        assert workload(name).family == entry.family
        for field, value in entry.config.items():
            if field not in ("num_labels", "num_hidden_layers", "num_layers"):
                assert getattr(config, field) == value


def test_parts_of_images_follow_the_size_that_is_asked_for() -> None:
    small, large = (
        rank_devices("vit-small", "t4", costs="roofline", image_size=size, batch=2)
        for size in ((224, 224), (224, 448))
    )
    assert repr(large).startswith("<Ranking: vit-small, 2 images of 224 x 448, inference: t4")
    assert large.fastest.device_s > 1.8 * small.fastest.device_s


def test_documents_say_what_a_network_takes() -> None:
    takes = {document["name"]: document["takes"] for document in network_documents()}
    assert takes["resnet-50"] == "images, 224 x 224"
    assert takes["bert-base"] == "tokens"
    assert takes["t5-small"] == "tokens on both sides"
    assert all(type(document["parameters"]) is int for document in network_documents())


def test_a_pass_of_the_zoo_is_that_of_the_published_folder(tmp_path: Any) -> None:
    """The same programs, whether the configuration is ours or a ``config.json``."""
    entry = zoo_networks()["bert-tiny"]
    config = transformers.AutoConfig.for_model(entry.model_type, **entry.config)
    config.architectures = [entry.class_]
    config.save_pretrained(tmp_path)
    ours, folder = (
        rank_devices(model, "t4", costs="roofline", sequence_length=16).fastest
        for model in ("bert-tiny", str(tmp_path))
    )
    assert ours.latency_s == folder.latency_s
