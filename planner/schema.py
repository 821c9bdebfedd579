"""JSON Schemas of every document, for launchers and editors that do not run Python.

Snapshots lie in ``planner/schemas`` and are packaged; a test holds them equal to what this module
makes. ``python -m foreplan.planner.schema FOLDER`` writes them anew after an intended change.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from foreplan.datasets.cluster import Cluster
from foreplan.datasets.models.model import Model
from foreplan.datasets.specs import StrictModel
from foreplan.datasets.storage import write_atomically
from foreplan.planner.plan import Plan
from foreplan.planner.registry import kinds, planner

#: Documents that do not depend on the kind of plan.
COMMON = ("cluster", "model", "traffic", "verification")


def json_schema(name: str) -> dict[str, Any]:
    """The schema of one of `COMMON`, or of the plans of a kind.

    The schema of a kind's plan has the kind's own workload and decision in their places.

    Raises:
        SpecError: no such planner.
    """
    if name in COMMON:
        from foreplan.planner.traffic_verification import TrafficVerification
        from foreplan.planner.verify.verification import Verification

        known: dict[str, type[StrictModel]] = {
            "cluster": Cluster, "model": Model, "traffic": TrafficVerification,
            "verification": Verification,
        }  # fmt: skip
        return known[name].model_json_schema(by_alias=True)
    chosen = planner(name)
    schema = Plan.model_json_schema(by_alias=True)
    definitions = schema["$defs"]
    for part, described in (
        ("workload", chosen.workload_type), ("decision", chosen.decision_type)
    ):  # fmt: skip
        own = described.model_json_schema(by_alias=True, mode="serialization")
        definitions.update(own.pop("$defs", {}))
        definitions[described.__name__] = own
        schema["properties"][part] = {"$ref": f"#/$defs/{described.__name__}"}
    schema["properties"]["kind"] = {"const": name, "title": "Kind", "type": "string"}
    return schema


def snapshots() -> dict[str, str]:
    """File name and text of every packaged schema."""
    names = (*COMMON, *(kind for kind in kinds()))
    return {
        f"{name}.schema.json": json.dumps(json_schema(name), indent=1, sort_keys=True) + "\n"
        for name in names
    }


def main(folder: Path) -> None:
    """Write the snapshots into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in snapshots().items():
        write_atomically(folder / name, text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
