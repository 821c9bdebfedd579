"""Which tasks a folder of an earlier run goes on with."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from foreplan.datasets.tir import toolchain
from foreplan.datasets.tir.build_dataset import TASKS_FILE, build_dataset
from foreplan.datasets.tir.measure import MeasureOptions
from foreplan.datasets.tir.task import Task
from foreplan.datasets.tir.tir_jsonl import write_tasks
from foreplan.errors import MissingDataError, SpecError

try:
    toolchain.require_tvm()
except (MissingDataError, SpecError) as error:
    pytest.skip(f"needs TVM: {error}", allow_module_level=True)


def test_a_folder_of_other_networks_is_not_continued(tmp_path: Path) -> None:
    calls = {"resnet-18/batch=1,height=8,width=8": 1}
    write_tasks([Task("0" * 16, "add", "{}", calls, frozenset({"resnet"}))], tmp_path / TASKS_FILE)
    asked = partial(
        build_dataset, tmp_path, devices=["cpu:threads=1"], options=MeasureOptions(minutes=0)
    )
    with pytest.raises(SpecError, match=r"network: got 'nonet', expected one of"):
        asked(networks=["nonet"])
    with pytest.raises(SpecError, match=r"--network: got 'bert-base', .*resnet-18; measure others"):
        asked(networks=["bert-base"])
    told: list[str] = []
    with pytest.raises(MissingDataError, match=r"no program was timed within 0 minutes; .*more"):
        asked(networks=["resnet-18", "bert-base"], progress=told.append)
    assert told[0].startswith("no tasks of bert-base in ")
