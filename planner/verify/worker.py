"""The process of one device: ``python -m foreplan.planner.verify.worker``.

It imports torch once, runs nothing, and forks a child for every job that the leader names; the
children build their kernels side by side, each under its own memory cap. Forking is safe because
there is no thread and no CUDA context yet; where a library has started a thread all the same, the
child is a fresh process instead.

Three ways in:

- ``--leader HOST:PORT --member N``: started by `foreplan verify`, with the device's environment;
- ``plan.json [-o FILE] ...`` under torchrun: reads ``RANK``, sets the device's environment and
  starts itself again with it; rank 0 also starts the leader;
- ``--job``: the fresh process; everything it needs stands in one line of standard input.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foreplan.datasets.specs import validate
from foreplan.datasets.timing.host_memory import free_bytes
from foreplan.errors import ForeplanError, VerificationError
from foreplan.planner.plan import Plan
from foreplan.planner.verify.local import TOKEN_VARIABLE, WORKER_MODULE, describe_exit
from foreplan.planner.verify.placement import gpu_free_bytes
from foreplan.planner.verify.wire import Message, WireClosed, dial, parse_endpoint

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
#: Hosts are started by hand: how long one waits for its leader, and for the leader's word.
_PATIENCE_S = 120.0


class Supervisor:
    """Serves one leader: a child a job, until the leader hangs up.

    Args:
        endpoint: where the leader listens.
        member: rank of the cluster that this process is.
        token: word to greet with.
        folder: that the plan's relative paths start from on this host.
    """

    def __init__(
        self, endpoint: tuple[str, int], member: int, token: str, folder: str | Path = ""
    ) -> None:
        self._endpoint = endpoint
        self._member = member
        self._token = token
        self._children: dict[int, tuple[int, int]] = {}  # pidfd -> pid, job
        self._wire = dial(endpoint, _PATIENCE_S)
        self._wire.send({"hello": "member", "member": member, "token": token})
        told = self._wire.receive(_PATIENCE_S)
        if "unneeded" in told:
            raise SystemExit(0)
        if "plan" not in told:
            raise VerificationError(str(told.get("error", "the leader sent no plan")))
        self._plan = validate(Plan, told["plan"], "plan").read_from(folder)
        self._import()

    def _import(self) -> None:
        import torch.distributed  # noqa: F401  # before the fork, so that children share it

        from foreplan.planner.registry import planner
        from foreplan.planner.verify import session  # noqa: F401

        planner(self._plan.kind).preload()
        self._wire.send(
            {"loaded": os.getpid(), "free_bytes": free_bytes(), "gpu_free_bytes": gpu_free_bytes()}
        )

    def run(self) -> None:
        """Follow the leader's words; returns when it has hung up."""
        try:
            while self._turn():
                pass
        except WireClosed:
            pass
        finally:
            for pid, _ in self._children.values():
                os.kill(pid, signal.SIGKILL)
            for pid, _ in self._children.values():
                os.waitpid(pid, 0)

    def _turn(self) -> bool:
        line = self._wire.fileno()
        ready, _, _ = select.select([line, *self._children], [], [])
        for descriptor in ready:
            if descriptor != line:
                pid, job = self._children.pop(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                how = describe_exit(os.waitstatus_to_exitcode(status))
                self._wire.send({"exited": job, "how": how})
                continue
            for word in self._wire.pump():
                if "fork" in word:
                    self._fork(word)
                elif "kill" in word:
                    self._signal(int(word["kill"]), signal.SIGKILL)
                elif "rest" in word:
                    self._signal(int(word["rest"]), signal.SIGSTOP)
                elif "wake" in word:
                    self._signal(int(word["wake"]), signal.SIGCONT)
                else:
                    return False
        return True

    def _signal(self, job: int, number: signal.Signals) -> None:
        for pid, of in self._children.values():
            if of == job:
                os.kill(pid, number)

    def _fork(self, word: Message) -> None:
        number = int(word["fork"])
        if len(os.listdir("/proc/self/task")) > 1:
            pid = self._spawn(word)
        else:
            pid = os.fork()
            if pid == 0:
                self._child(word)
        self._children[os.pidfd_open(pid)] = pid, number

    def _child(self, word: Message) -> None:
        """Be the job's process; does not return."""
        code = 1
        try:
            die_with_parent()
            self._wire.close()
            for descriptor in self._children:
                os.close(descriptor)
            code = _work(self._endpoint, self._token, self._plan, word)
        finally:
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os._exit(code)  # no clean-up of what belongs to the parent

    def _spawn(self, word: Message) -> int:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER_MODULE, "--job"], stdin=subprocess.PIPE
        )
        order = {
            "endpoint": self._endpoint, "token": self._token, "word": word,
            "plan": self._plan.model_dump(mode="json", by_alias=True),
        }  # fmt: skip
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.close()
        process.returncode = 0  # reaped by us through its pidfd
        return process.pid


def _work(endpoint: tuple[str, int], token: str, plan: Plan, word: Message) -> int:
    """Do one job; the process's exit code."""
    from foreplan.planner.registry import planner
    from foreplan.planner.verify.session import Job, problem_of, serve

    wire = dial(endpoint, _PATIENCE_S)
    wire.send({"hello": "job", "job": word["fork"], "rank": word["rank"], "token": token})
    job = validate(Job, word["job"], "job")
    chosen = planner(plan.kind)
    return serve(wire, chosen, problem_of(plan, chosen), job)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died in between
        os._exit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker; see the module for the arguments."""
    parser = argparse.ArgumentParser(prog=f"python -m {WORKER_MODULE}")
    parser.add_argument("plan", nargs="?", help="plan.json, under torchrun")
    parser.add_argument("-o", "--output", default="verification.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tolerance", type=float)
    parser.add_argument(
        "--trust-paths", action="store_true", help="follow the plan's paths out of its own folder"
    )
    parser.add_argument("--leader", help=argparse.SUPPRESS)
    parser.add_argument("--member", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.job:
            return _job_from_input()
        if options.leader is not None:
            die_with_parent()
            token = os.environ.pop(TOKEN_VARIABLE, "")
            endpoint = parse_endpoint(options.leader)
            Supervisor(endpoint, options.member, token, options.folder).run()
            return 0
        if options.plan is None or "RANK" not in os.environ:
            parser.error("give a plan.json and start with torchrun, or use 'foreplan verify'")
        from foreplan.planner.verify.torchrun import run_under_torchrun

        code = run_under_torchrun(
            options.plan, output=options.output, rounds=options.rounds,
            tolerance=options.tolerance, trust_paths=options.trust_paths,
        )  # fmt: skip
    except ForeplanError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    if code and options.plan is not None and "TORCHELASTIC_RUN_ID" in os.environ:
        print(f"exit code {code}, in whose place torchrun's own is 1", file=sys.stderr)
    return code


def _job_from_input() -> int:
    die_with_parent()
    order: dict[str, Any] = json.loads(sys.stdin.readline() or "null")
    if not isinstance(order, dict):
        raise VerificationError("no job was given")
    host, port = order["endpoint"]
    return _work((host, port), order["token"], validate(Plan, order["plan"], "plan"), order["word"])


if __name__ == "__main__":
    sys.exit(main())
