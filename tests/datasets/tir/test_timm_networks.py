"""Tasks of timm's networks, with a timm of two small networks in place of the real one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foreplan.datasets.tir import toolchain
from foreplan.errors import MissingDataError, SpecError

torch = pytest.importorskip("torch")
try:
    toolchain.load_tvm()  # before torch's front ends are loaded
except (MissingDataError, SpecError) as error:
    pytest.skip(f"needs TVM: {error}", allow_module_level=True)

from foreplan.datasets.tir.synthetic import known_keys  # noqa: E402
from foreplan.datasets.tir.timm_networks import NETWORKS, main, timm_tasks  # noqa: E402
from foreplan.datasets.tir.tir_jsonl import read_tasks  # noqa: E402


def _network(name: str, *, pretrained: bool, num_classes: int) -> Any:
    assert not pretrained
    assert num_classes == 0
    if name == "dla34":
        raise RuntimeError("no such design")  # a network that this timm has no longer
    stem = torch.nn.Conv2d(3, 4, 3, stride=32, padding=1, bias=False)
    return torch.nn.Sequential(stem, torch.nn.BatchNorm2d(4), torch.nn.ReLU())


@pytest.fixture(scope="module", autouse=True)
def timm() -> Iterator[None]:
    package, layers = ModuleType("timm"), ModuleType("timm.layers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "create_model", _network, raising=False)
        for name in ("set_exportable", "set_fused_attn"):
            patch.setattr(layers, name, lambda _: None, raising=False)
        patch.setitem(sys.modules, "timm", package)
        patch.setitem(sys.modules, "timm.layers", layers)
        yield


@pytest.fixture(scope="module")
def every(timm: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("timm") / "tasks.jsonl.xz"
    main(["-o", str(file), "--networks", "vgg11_bn"])
    return file


def test_tasks_have_no_family_and_name_their_callers(every: Path) -> None:
    tasks = read_tasks(every)
    assert all(task.families == frozenset() for task in tasks)
    labels = {f"vgg11_bn/batch={b},height={s},width={s}" for b, s in NETWORKS["vgg11_bn"]}
    assert {label for task in tasks for label in task.calls} == labels
    assert any("conv2d" in task.name for task in tasks)


def test_some_of_the_tasks_can_be_asked_for(every: Path, tmp_path: Path) -> None:
    keys = {task.key for task in read_tasks(every)}
    file = tmp_path / "tasks.jsonl.xz"
    words = ["--networks", "vgg11_bn", "--named", "conv", "--most", "1"]
    main(["-o", str(file), *words])
    (task,) = read_tasks(file)
    assert "conv" in task.name
    assert task.key in keys
    left = timm_tasks(["vgg11_bn"], known=known_keys([file]))
    assert {task.key for task in left} == keys - {task.key}


def test_a_network_that_cannot_be_built_is_told_and_the_others_go_on() -> None:
    told: list[str] = []
    assert timm_tasks(["dla34", "vgg11_bn"], progress=told.append)
    assert "network dla34" in told[0]
    assert "no such design" in told[0]


def test_without_timm_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingDataError, match="pip install timm"):
        timm_tasks(["vgg11_bn"])


@pytest.mark.parametrize("words", [["--networks", "resnet50"], ["--most", "0"]])
def test_bad_input_ends_with_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["-o", str(tmp_path / "t"), *words])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert words[0] in said
    assert said.count("\n") == 1
    assert not (tmp_path / "t").exists()
