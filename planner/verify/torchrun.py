"""`run_under_torchrun`: the same verification with processes that torchrun has started.

torchrun gives every rank one environment, but a rank's instruction set and threads are read when
torch loads. So each process reads ``RANK`` and the plan, starts itself anew with the environment of
its device (the process number stays, so torchrun does not notice), and only then loads torch. The
process of rank 0 forks the leader, whose address the others find in torchrun's own store.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

from foreplan.errors import ForeplanError, SpecError
from foreplan.planner.plan import Plan, load_plan
from foreplan.planner.plan_paths import folder_of

_SEATED = "FOREPLAN_VERIFY_SEATED"
_KEY = "foreplan/leader"


def run_under_torchrun(
    path: str, *, output: str, rounds: int, tolerance: float | None, trust_paths: bool
) -> int:
    """Be one rank of a verification; rank 0 also leads it and writes the document.

    Returns:
        Exit code: that of the leader on rank 0, 0 elsewhere.

    Raises:
        SpecError: the plan is wrong or leaves its folder, or torchrun started another number of
            processes.
    """
    from foreplan.planner.verify.local import rank_environment
    from foreplan.planner.verify.paths import check_paths
    from foreplan.planner.verify.verify import plan_ranks
    from foreplan.planner.verify.worker import Supervisor

    plan = load_plan(path)
    if not trust_paths:
        check_paths(plan, folder_of(path), profiles=False)
    rank, world = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    members = plan_ranks(plan)
    if world != len(members):
        raise SpecError(
            "torchrun", got=f"{world} processes",
            expected=f"{len(members)}, one a rank of the plan",
            fix=f"torchrun --nproc-per-node {len(members)} on one host",
        )  # fmt: skip
    token = plan.digest
    if os.environ.get(_SEATED) is None:
        environment = rank_environment(members[rank], token, base=dict(os.environ))
        environment[_SEATED] = "1"
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    one_host = int(os.environ.get("LOCAL_WORLD_SIZE", world)) == world
    leader, port = (0, 0) if rank else _fork_leader(plan, path, output, one_host, rounds, tolerance)
    host = "127.0.0.1" if one_host else os.environ["MASTER_ADDR"]
    endpoint = _agree_on_endpoint(rank, world, (host, port))
    try:
        Supervisor(endpoint, members[rank].index, token, folder_of(path)).run()
    except BaseException:
        if leader:
            os.kill(leader, signal.SIGKILL)
            os.waitpid(leader, 0)
        raise
    return os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1]) if leader else 0


def _fork_leader(
    plan: Plan, path: str, output: str, one_host: bool, rounds: int, tolerance: float | None
) -> tuple[int, int]:
    """Start the leader; its process number and its port. Torch is not loaded yet."""
    from foreplan.planner.verify.verify import verify
    from foreplan.planner.verify.worker import die_with_parent

    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        with open(read, encoding="ascii") as stream:
            told = stream.readline()
        if not told:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            raise SpecError("leader", got=f"exit code {code}", expected="a leader")
        return child, int(told)
    code = 1
    try:
        die_with_parent()
        os.close(read)

        def listening(port: int) -> None:
            with open(write, "w", encoding="ascii") as stream:
                stream.write(f"{port}\n")

        run = verify(
            plan, rounds=rounds, tolerance=tolerance, progress=_say, folder=folder_of(path),
            trust_paths=True,  # checked
            started_by_torchrun=("127.0.0.1" if one_host else "", listening),
        )  # fmt: skip
        if run.document is not None:
            run.document.save(output)
            _say(run.document.summary)
            code = 0 if run.document.passed else 5
    except ForeplanError as error:
        _say(f"error: {error}")
        code = error.exit_code
    finally:
        sys.stderr.flush()
        os._exit(code)


def _agree_on_endpoint(rank: int, world: int, mine: tuple[str, int]) -> tuple[str, int]:
    """Rank 0's endpoint, through torchrun's store."""
    from torch._C._distributed_c10d import TCPStore

    keeps_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, keeps_store,
        timeout=timedelta(seconds=120), wait_for_workers=False,
    )  # fmt: skip
    if rank == 0:
        store.set(_KEY, f"{mine[0]} {mine[1]}")
        return mine
    host, port = store.get(_KEY).decode().split()
    return host, int(port)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
