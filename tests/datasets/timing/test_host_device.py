"""This host's processor by figures that are read off it."""

from __future__ import annotations

import pytest

from foreplan.cost_models.pass_arguments import named_devices
from foreplan.cost_models.replay import predict_latency
from foreplan.datasets.device import Device
from foreplan.datasets.timing.host_device import host_device, is_host_processor
from foreplan.errors import SpecError


@pytest.fixture(scope="module")
def host() -> Device:
    return host_device("cpu:threads=1")


def test_figures_are_measured_and_enough_for_a_price(host: Device) -> None:
    assert (host.name, host.kind, host.units) == ("cpu:threads=1", "cpu", 1)
    assert host.peak("fp32") > 1e9
    assert host.memory_bandwidth > 1e9
    assert host.reread_bandwidth is not None
    assert host.sources["memory_bandwidth"] == "measured"
    found = predict_latency("bert-tiny", host, sequence_length=16)
    assert found.low_s < found.latency_s < found.high_s
    assert set(found.document()["by_source_s"]) == {"predicted"}


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("cpu", True), ("CPU:threads=2", True), (" cpu ", True), ("cpux", False),
     ("xeon_8480+", False)],
)  # fmt: skip
def test_the_processor_is_known_by_its_word(name: str, is_one: bool) -> None:
    assert is_host_processor(name) == is_one


@pytest.mark.parametrize(
    ("name", "told"),
    [("cpu:threads=9999", "at most the"), ("cpu:thread=1", "expected a device such as cpu"),
     ("cpu:isa=avx3", "isa as one of")],
)  # fmt: skip
def test_a_processor_that_is_not_here_is_refused(name: str, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        host_device(name)


def test_options_of_a_processor_keep_their_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def read(name: str, where: str) -> Device:
        asked.append(name)
        return Device(name=name, chip="c", vendor="v", kind="cpu")

    monkeypatch.setattr("foreplan.cost_models.pass_arguments.host_device", read)
    found = named_devices(["cpu:threads=1,isa=avx2,t4,cpu:isa=sse41,threads=2,l4"], where="d")
    assert asked == ["cpu:threads=1,isa=avx2", "cpu:isa=sse41,threads=2"]
    assert [device.name for device in found] == [asked[0], "t4", asked[1], "l4"]


@pytest.mark.parametrize("name", ["cpuu", "cpus:threads=1", "cp"])
def test_a_misspelt_processor_gets_its_word(name: str) -> None:
    with pytest.raises(SpecError, match=r"did you mean 'cpu'\?"):
        named_devices([name], where="--devices")


def test_a_misspelt_device_of_the_users_own_gets_its_name() -> None:
    own = Device(name="our-box", chip="c", vendor="v", kind="cpu")
    with pytest.raises(SpecError, match=r"did you mean 'our-box'\?"):
        named_devices(["ourbix"], {"our-box": own}, where="--devices")


def test_a_gpu_of_the_host_is_named_by_the_zoo() -> None:
    with pytest.raises(SpecError, match="expected a device of the zoo, or cpu"):
        named_devices(["cuda:0"], where="--devices")
