"""`foreplan cluster merge` reads its files before and after it writes another."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreplan.cli import app
from foreplan.datasets.cluster import Cluster
from foreplan.errors import SpecError
from foreplan.planner.merge_command import merge_files


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for file in files:
        file.write_text(f"devices:\n- name: t4\n  host: {file.stem}\n")
    return files


def test_hosts_are_merged_into_another_file(hosts: list[Path], tmp_path: Path) -> None:
    merged, _ = merge_files(hosts, tmp_path / "both.yaml")
    assert merged.hosts() == ("a", "b")
    again, _ = merge_files([tmp_path / "both.yaml", hosts[0]], tmp_path / "again.yaml")
    assert again == merged


@pytest.mark.parametrize("output", ["a.yaml", "../{folder}/b.yaml", "link.yaml"])
def test_no_input_is_written_over(hosts: list[Path], tmp_path: Path, output: str) -> None:
    (tmp_path / "link.yaml").symlink_to(hosts[0])
    before = [file.read_text() for file in hosts]
    with pytest.raises(SpecError, match=r"a file that is read here.*, expected another to write"):
        merge_files(hosts, tmp_path / output.format(folder=tmp_path.name))
    assert [file.read_text() for file in hosts] == before


def link(path: Path, group: str, bandwidth: float = 1e9) -> Path:
    path.write_text(
        f"tiers:\n- group: [{group}]\n  scope: network\n  latency_s: 1.0e-5\n"
        f"  bandwidth_bytes_per_s: {bandwidth}\n  backend: gloo\n  source: measured, {group}\n"
    )
    return path


def test_both_hosts_files_of_one_measurement_are_one_link(hosts: list[Path]) -> None:
    folder = hosts[0].parent
    links = [link(folder / "link-a-b.yaml", "a, b"), link(folder / "link-b-a.yaml", "b, a")]
    merged, notes = merge_files([*hosts, *links], folder / "both.yaml")
    assert [tier.group for tier in merged.tiers] == [("a", "b")]
    assert notes == []


@pytest.mark.parametrize("group", ["b, a", "all"])
def test_the_last_of_two_measurements_of_a_link_counts(hosts: list[Path], group: str) -> None:
    folder = hosts[0].parent
    links = [link(folder / "old.yaml", "a, b", 1e9), link(folder / "new.yaml", group, 2e9)]
    merged, notes = merge_files([*hosts, *links], folder / "both.yaml")
    assert [tier.bandwidth_bytes_per_s for tier in merged.tiers] == [2e9]
    (note,) = notes
    assert "new.yaml" in note
    assert "takes the place of" in note
    assert "old.yaml" in note
    again, notes = merge_files([folder / "both.yaml", links[0]], folder / "again.yaml")
    assert [tier.bandwidth_bytes_per_s for tier in again.tiers] == [1e9]
    assert len(notes) == 1


def test_hosts_that_no_link_joins_are_named(hosts: list[Path]) -> None:
    folder = hosts[0].parent
    third = folder / "c.yaml"
    third.write_text("devices:\n- name: t4\n  host: c\n")
    joined = link(folder / "link-a-b.yaml", "a, b")
    _, (note,) = merge_files([*hosts, third, joined], folder / "both.yaml")
    assert "no link joins a and c; b and c:" in note
    assert "--serve" in note


def test_the_command_says_on_stderr_what_stays_apart(hosts: list[Path]) -> None:
    command = [
        "cluster",
        "merge",
        *map(str, hosts),
        "-o",
        str(hosts[0].parent / "m.yaml"),
        "--json",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert len(json.loads(result.stdout)["devices"]) == 2
    assert "no link joins a and b" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tiers: 5", "tiers: got 5, expected a list"),
        ("tiers:", "tiers: got nothing, expected a list"),
        ("tiers: []", "tiers: got .*expected at least 1 item"),
        ("tiers: [5]", r"tiers\[0\]: got 5, expected a mapping of fields"),
    ],
)
def test_a_link_file_of_something_else_is_one_line(hosts: list[Path], text: str, told: str) -> None:
    wrong = hosts[0].parent / "link.yaml"
    wrong.write_text(text)
    with pytest.raises(SpecError, match=rf"link\.yaml: {told}"):
        merge_files([*hosts, wrong], hosts[0].parent / "both.yaml")


def test_a_cluster_named_json_is_json(hosts: list[Path]) -> None:
    output = hosts[0].parent / "both.json"
    merged, _ = merge_files(hosts, output)
    assert json.loads(output.read_text())["devices"][1]["host"] == "b"
    assert Cluster.load(output) == merged
