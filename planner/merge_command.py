"""What ``foreplan cluster merge`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foreplan.datasets.cluster import Cluster
from foreplan.datasets.cluster_merge import merge
from foreplan.datasets.specs import load_document, validate
from foreplan.datasets.storage import refuse_overwriting, write_atomically
from foreplan.datasets.tier import Tier
from foreplan.errors import SpecError


def merge_files(files: Sequence[Path], output: Path) -> Cluster:
    """Join clusters of several hosts, and the links measured between them, and write the result.

    Args:
        files: clusters, and link files (documents with ``tiers`` and nothing else).
        output: where the merged cluster goes; profile paths become relative to its folder.

    Raises:
        SpecError: fewer than two files, a file that is wrong or the output, clusters that
            contradict each other.
    """
    refuse_overwriting(output, *files)
    clusters: list[Cluster] = []
    links: list[Any] = []
    for file in files:
        document = load_document(file)
        if set(document) == {"tiers"}:
            links += [validate(Tier, tier, f"{file}: tiers[{i}]")
                      for i, tier in enumerate(document["tiers"])]  # fmt: skip
        else:
            cluster = validate(Cluster, document, str(file))
            clusters.append(cluster.rebase(file.parent, output.parent))
    if len(files) < 2 or not clusters:
        raise SpecError(
            "cluster merge", got=[str(f) for f in files], expected="two or more, one a cluster"
        )
    merged = merge(*clusters)
    if links:
        document = merged.model_dump(mode="json", exclude_defaults=True)
        known = [tier.model_dump(mode="json", exclude_defaults=True) for tier in links]
        document["tiers"] = [*document.get("tiers", []), *known]
        merged = validate(Cluster, document, "merged cluster")
    write_atomically(output, merged.to_yaml())
    return merged
