import gzip
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from foreplan.datasets._document_text import MAX_JSON_BYTES
from foreplan.datasets.specs import (
    StrictModel,
    dump_document,
    load_document,
    nearest,
    validate,
)
from foreplan.errors import SpecError


class Item(StrictModel):
    count: Annotated[int, Field(gt=0)]
    size: float = 1.0
    words: tuple[str, ...] = ()


class Document(StrictModel):
    items: Annotated[tuple[Item, ...], Field(min_length=1)]
    by_number: dict[int, float] = Field(default_factory=dict)
    one: Item | None = None
    named: Annotated[str, Field(pattern=r"^[a-z]+$")] = "a"


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (
            {"items": [{"cuont": 2}]},
            "f.yaml: items[0].cuont: got 2, expected no such field; did you mean 'count'? "
            "(1 more error in this document)",
        ),
        ({"items": [{"count": True}]}, "f.yaml: items[0].count: got True, expected a whole number"),
        ({"items": [{"count": "2"}]}, "f.yaml: items[0].count: got '2', expected a whole number"),
        ({"items": [{"count": 1.5}]}, "f.yaml: items[0].count: got 1.5, expected a whole number"),
        ({"items": [{"count": -1}]}, "f.yaml: items[0].count: got -1, expected greater than 0"),
        (
            {"items": [{"count": 1, "size": float("nan")}]},
            "f.yaml: items[0].size: got nan, expected a finite number",
        ),
        ({"items": []}, "f.yaml: items: got [], expected at least 1 item"),
        ({"items": {}}, "f.yaml: items: got {}, expected a list"),
        ({"items": [{}]}, "f.yaml: items[0].count: got nothing, expected a value"),
        (
            {"items": [{"count": 1}], "one": {"count": 1, "zzz": 1}},
            "f.yaml: one.zzz: got 1, expected one of the fields count, size, words",
        ),
        (7, "f.yaml: got 7, expected a mapping of fields"),
        (
            {"items": [{"count": 1}], "named": "bäx"},
            "f.yaml: named: got 'bäx', expected a text that matches ^[a-z]+$",
        ),
    ],
)
def test_validation_errors_are_one_line(data: object, line: str) -> None:
    with pytest.raises(SpecError) as caught:
        validate(Document, data, "f.yaml")
    assert str(caught.value) == line


def test_lists_fill_tuples_and_texts_fill_integer_keys() -> None:
    data = {"items": [{"count": 1, "words": ["a"], "size": 2}], "by_number": {"2": 1.5}}
    document = validate(Document, data, "f.json")
    assert document.items[0].words == ("a",)
    assert document.by_number == {2: 1.5}


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.yaml", "a: 1\nb:\n  c: 1\n  c: 2\n", "a.yaml: line 4: got the key 'c' twice"),
        ("a.yaml", "a: [1,\nb: 2\n c", "a.yaml: line 4: got a syntax error (did not find expected"),
        ("a.yaml", "", "a.yaml: got nothing"),
        ("a.yaml", "# only words\n", "a.yaml: got nothing"),
        ("a.yaml", "- a\n", "a.yaml: got ['a'], expected a mapping"),
        ("a.yaml", "a: !!python/object:os.system 1", "a.yaml: line 1: got could not determine"),
        ("a.yaml", "a: 1\n---\nb: 2", "a.yaml: line 2:"),
        ("a.yaml", "{[1]: 2}", "a.yaml: line 1: got a list or mapping as a key"),
        ("a.yaml", "a: " + "[" * 5000 + "]" * 5000, "a.yaml: got 'brackets nested too deeply'"),
        ("a.json", '{"a": ' + "[" * 100_000, "a.json: got 'brackets nested too deeply'"),
        ("a.json", '{"a": 1,\n "b": {"c": 1,\n "c": 2}}', "a.json: line 3: got the key 'c' twice"),
        ("a.json", '{"a": NaN}', "a.json: got NaN, expected finite numbers"),
        ("a.json", '{"a": 1,}', "a.json: line 1: got a syntax error"),
        ("a.json", " ", "a.json: got nothing"),
    ],
)
def test_documents_that_cannot_be_read(tmp_path: Path, name: str, text: str, line: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError) as caught:
        load_document(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / line))
    assert "\n" not in str(caught.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        load_document(tmp_path / "no.yaml")
    with pytest.raises(SpecError, match="Is a directory"):
        load_document(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not UTF-8"):
        load_document(tmp_path / "b.yaml")


def test_documents_may_be_compressed(tmp_path: Path) -> None:
    for name, text in (("a.json.gz", '{"a": 1}'), ("a.yaml.gz", "a: 1")):
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
        assert load_document(tmp_path / name) == {"a": 1}
    whole = gzip.compress(b'{"a": "' + b" " * MAX_JSON_BYTES + b'"}')
    (tmp_path / "large.json.gz").write_bytes(whole)
    with pytest.raises(SpecError, match="got more than"):
        load_document(tmp_path / "large.json.gz")
    for name, data in (("plain.json.gz", b"{}"), ("cut.json.gz", whole[:200]),
                       ("broken.json.gz", whole[:10] + b"\xff" * 50)):  # fmt: skip
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SpecError, match="expected a readable file"):
            load_document(tmp_path / name)


def test_yaml_scalars_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: 1e9\nb: no\nc: 2024-01-01\nd: 010\ne: 0x1F\nf: ~\ng: true\nh: 12:30\n")
    assert load_document(path) == {
        "a": 1e9, "b": "no", "c": "2024-01-01", "d": 10, "e": 31, "f": None, "g": True, "h": "12:30"
    }  # fmt: skip


def test_yaml_merge_keys_give_way_to_a_mappings_own(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "a: &a {name: t4, host: a}\nb: {<<: *a, host: b}\n"
        "c: {count: 2, <<: [{host: c}, *a]}\nd: <<\n"
    )
    assert load_document(path) == {
        "a": {"name": "t4", "host": "a"}, "b": {"name": "t4", "host": "b"},
        "c": {"name": "t4", "host": "c", "count": 2}, "d": "<<",
    }  # fmt: skip
    for broken, said in (
        ("a: &a {x: 1}\nb: {<<: *a, y: 1, y: 2}\n", "line 2: got the key 'y' twice"),
        ("b: {<<: 5}\n", "line 1: got expected a mapping or list of mappings"),
    ):
        path.write_text(broken)
        with pytest.raises(SpecError, match=said):
            load_document(path)


_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), _plain, min_size=1, max_size=4))
def test_a_dumped_document_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, data: dict[str, object]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_text(dump_document(data), encoding="utf-8", newline="")
    assert load_document(path) == data
    assert dump_document(load_document(path)) == dump_document(data)


def test_nearest_ignores_case() -> None:
    assert nearest("COUNT", ["count", "size"]) == "count"
    assert nearest("xyz", ["count", "size"]) is None


def test_numbers_of_numpy_are_numbers() -> None:
    found = validate(Item, {"count": np.int64(3), "size": np.float32(0.5)}, "f")
    assert (found.count, found.size) == (3, 0.5)
    assert validate(Item, {"count": 1, "words": np.array(["a", "b"])}, "f").words == ("a", "b")
    with pytest.raises(SpecError, match=r"f: count: got 3\.0, expected a whole number"):
        validate(Item, {"count": np.float32(3)}, "f")
    with pytest.raises(SpecError, match=r"f: got what JSON cannot say .*unknown type object"):
        validate(Item, {"count": np.array([object()])}, "f")


def test_records_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Item(count=1).count = 2


def test_every_missing_field_is_named() -> None:
    class Shape(StrictModel):
        rows: int
        columns: int
        depth: int

    with pytest.raises(SpecError, match=r"^job: rows, columns: got nothing, expected a value of e"):
        validate(Shape, {"depth": 1}, "job")
    with pytest.raises(SpecError, match=r"rows, depth: .*; 1 more error in this document"):
        validate(Shape, {"columns": "x"}, "job")


def test_a_folder_in_place_of_its_document(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("devices: []\n")
    with pytest.raises(SpecError, match=r"did you mean .*cluster\.yaml\?"):
        load_document(tmp_path)
