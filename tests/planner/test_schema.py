"""Packaged JSON Schemas equal what the code accepts, and a real plan is valid under its own."""

import json
from pathlib import Path

import pytest

import foreplan.planner.plan
from foreplan.planner.api import plan
from foreplan.planner.schema import json_schema, snapshots

FOLDER = Path(foreplan.planner.plan.__file__).parent / "schemas"


@pytest.mark.parametrize("name", sorted(snapshots()))
def test_snapshot_is_up_to_date(name):
    """After an intended change: python -m foreplan.planner.schema planner/schemas."""
    assert (FOLDER / name).read_text() == snapshots()[name]


def test_schema_names_every_field_of_a_plan():
    made = plan(
        "serving", "tiny-llama-random", "2xt4",
        {"batch": 4, "prompt_tokens": 16, "new_tokens": 8, "kv_bits": 8}, costs="roofline",
    )  # fmt: skip
    document, schema = json.loads(made.to_json()), json_schema("serving")
    assert set(document) == set(schema["properties"])
    decision = schema["$defs"][schema["properties"]["decision"]["$ref"].rsplit("/", 1)[1]]
    assert set(document["decision"]) == set(decision["properties"])


def test_schemas_tell_the_words_of_a_decision():
    def described(kind: str, name: str) -> str:
        return " ".join(json_schema(kind)["$defs"][name]["description"].split())

    orders = described("bubbles", "BubblesDecision")
    assert all(f"``{w}``" in orders for w in ("2F0", "2I0", "2F0:1", "e0.0-7F5", "e0.2f5"))
    assert "STORAGE/COMPUTE/KERNEL" in described("serving", "StageDecision")
    assert "fp32/int8/torch.int_mm+bf16" in described("precision", "WorkerDecision")
