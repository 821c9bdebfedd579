"""`foreplan cluster merge` reads its files before and after it writes another."""

from pathlib import Path

import pytest

from foreplan.errors import SpecError
from foreplan.planner.merge_command import merge_files


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for file in files:
        file.write_text(f"devices:\n- name: t4\n  host: {file.stem}\n")
    return files


def test_hosts_are_merged_into_another_file(hosts: list[Path], tmp_path: Path) -> None:
    merged = merge_files(hosts, tmp_path / "both.yaml")
    assert merged.hosts() == ("a", "b")
    assert merge_files([tmp_path / "both.yaml", hosts[0]], tmp_path / "again.yaml") == merged


@pytest.mark.parametrize("output", ["a.yaml", "../{folder}/b.yaml", "link.yaml"])
def test_no_input_is_written_over(hosts: list[Path], tmp_path: Path, output: str) -> None:
    (tmp_path / "link.yaml").symlink_to(hosts[0])
    before = [file.read_text() for file in hosts]
    with pytest.raises(SpecError, match=r"a file that is read here.*, expected another to write"):
        merge_files(hosts, tmp_path / output.format(folder=tmp_path.name))
    assert [file.read_text() for file in hosts] == before
