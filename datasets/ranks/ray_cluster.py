"""A Ray cluster to measure on: connect to it, and hold workers to its nodes.

Ray is an extra (``pip install foreplan[ray]``). On an existing cluster every node needs this
package, of the same version, where Ray's workers find it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

from foreplan.datasets.ranks.links import parse_endpoint
from foreplan.datasets.timing.child_process import module_environment
from foreplan.errors import MissingDataError, SpecError

#: Time for a cluster to answer at its address; Ray itself tries for minutes.
_ANSWER_S = 10.0
#: Time for a cluster to give a worker its processor or GPU.
_PLACE_S = 300.0


class Node(NamedTuple):
    """A machine of the cluster.

    Attributes:
        identifier: Ray's own.
        host: its name.
        cpus: processors that Ray counts on it.
        gpus: likewise GPUs.
    """

    identifier: str
    host: str
    cpus: int
    gpus: int


def load_ray() -> Any:
    """Import Ray; it has no complete type stubs, hence ``Any``.

    Raises:
        MissingDataError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingDataError("ray is not installed", fix='pip install "foreplan[ray]"') from error
    return ray


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Connect to a cluster for as long as the context lasts; gives the package ``ray``.

    Args:
        address: ``local`` starts one on this machine and ends it; ``auto`` or ``HOST:PORT`` is one
            that runs.

    Raises:
        SpecError: another form of address.
        MissingDataError: Ray is not installed, or there is no such cluster.
    """
    _answers(address)
    ray = load_ray()
    # Workers of a cluster of our own find the package that runs now, installed or not.
    variables = {"PYTHONPATH": module_environment()["PYTHONPATH"]} if address == "local" else {}
    try:
        ray.init(
            address=address, include_dashboard=False if address == "local" else None,
            log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": variables},
        )  # fmt: skip
    except (ConnectionError, ValueError, RuntimeError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise MissingDataError(
            f"no Ray cluster at {address}: {said[0][:160]}",
            fix="start one with 'ray start --head', or say local",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _answers(address: str) -> None:
    if address in ("local", "auto"):
        return
    try:
        where = parse_endpoint(address)
    except SpecError as error:
        raise SpecError("--ray", got=address, expected="HOST:PORT, auto or local") from error
    try:
        socket.create_connection(where, timeout=_ANSWER_S).close()
    except OSError as error:
        raise MissingDataError(
            f"no Ray cluster at {address}: {error.strerror or error}",
            fix="start one with 'ray start --head', or say local",
        ) from error


def nodes(ray: Any) -> list[Node]:
    """Nodes that are alive, by name."""
    found = [
        Node(
            item["NodeID"], item["NodeManagerHostname"], int(item["Resources"].get("CPU", 0)),
            int(item["Resources"].get("GPU", 0)),
        )
        for item in ray.nodes() if item["Alive"]
    ]  # fmt: skip
    return sorted(found, key=lambda node: (node.host, node.identifier))


def place(ray: Any, kind: type, node: Node, *arguments: Any, cpus: int = 1, gpus: int = 0) -> Any:
    """Start an actor of a class on a node, with processors and GPUs of its own.

    Raises:
        MissingDataError: the node has no room for it, or cannot import the class.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor = (
        ray.remote(kind)
        .options(
            num_cpus=cpus, num_gpus=gpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.identifier, soft=False),
        )
        .remote(*arguments)
    )  # fmt: skip
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=_PLACE_S)
    except ray.exceptions.RayError as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise MissingDataError(
            f"no worker on node {node.host} within {_PLACE_S:g} s: {said[-1][:160]}",
            fix="a free processor (and GPU) on it, and this package installed there",
        ) from error
    return actor
