"""From one command to one process per rank: torchrun in this process, or nothing where torchrun or srun has already done it."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tridentrl.rewards.worker import die_with_parent
from tridentrl.trainer.world import (
    ALONE,
    World,
    in_slurm_step,
    slurm_master_addr,
    slurm_master_port,
    world_from_slurm,
    world_from_torchrun,
)

RUN_ID = "TRIDENTRL_RUN_ID"
_LAUNCHER = "TRIDENTRL_LAUNCHER_PID"
_ERRORS = "TRIDENTRL_LAUNCHER_ERRORS"

Worker = Callable[[list[str], World], int]
"""What runs on every rank: gets the command line without the launch flags, returns the exit code."""


@dataclass(frozen=True, kw_only=True)
class LaunchFlags:
    """torchrun's flags of that name; None where the command line has none."""

    nnodes: int | None = None
    nproc_per_node: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None

    @property
    def world_size(self) -> int:
        """Ranks asked for."""
        return (self.nnodes or 1) * (self.nproc_per_node or 1)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def split_launch_flags(argv: Sequence[str]) -> tuple[LaunchFlags, list[str]]:
    """Take the launch flags (`--x=1` or `--x 1`, dashes or underscores) out of a command line; the rest keeps its order."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in ("nnodes", "nproc_per_node", "node_rank", "master_port"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, type=int)
    parser.add_argument("--master_addr", "--master-addr", dest="master_addr")
    known, rest = parser.parse_known_args(list(argv))
    flags = LaunchFlags(**vars(known))
    for name, value, lowest in (
        ("nnodes", flags.nnodes, 1),
        ("nproc_per_node", flags.nproc_per_node, 1),
        ("node_rank", flags.node_rank, 0),
    ):
        if value is not None and value < lowest:
            raise ValueError(f"--{name}={value}: must be at least {lowest}")
    if flags.node_rank is not None and flags.node_rank >= (flags.nnodes or 1):
        raise ValueError(f"--node_rank={flags.node_rank} must be below --nnodes={flags.nnodes or 1}; nodes count from 0")
    if flags.master_port is not None and not 0 < flags.master_port < 65536:
        raise ValueError(f"--master_port={flags.master_port}: must be between 1 and 65535")
    return flags, rest


def launch(argv: Sequence[str], worker: Worker, *, module: str = "tridentrl.trainer.main_fastrl") -> int:
    """Run `worker` as one rank here, or start `python -m module` once per rank and wait. Returns the exit code.

    Raises ValueError for launch flags or environment variables that make no sense. A rank's own exception propagates.
    """
    flags, rest = split_launch_flags(argv)
    world = find_world(flags, os.environ)
    if world is not None:
        return _run_rank(worker, rest, world)
    return _run_torchrun(flags, rest, module)


def find_world(flags: LaunchFlags, environ: Mapping[str, str]) -> World | None:
    """This process's place when it is a rank already, None when the ranks are still to be started. torchrun goes before srun."""
    world = world_from_torchrun(environ)
    if world is None and in_slurm_step(environ):
        tasks = environ.get("SLURM_NTASKS", "1")
        if flags.nproc_per_node is None or flags.world_size == int(tasks):
            world = world_from_slurm(environ)
        elif int(tasks) not in (1, flags.nnodes or 1):
            raise ValueError(
                f"srun started SLURM_NTASKS={tasks} tasks, the flags ask for {flags.nnodes or 1} nodes x {flags.nproc_per_node} processes; "
                "start one task per node (srun --ntasks-per-node=1) with the flags, or one task per rank without them"
            )
    if world is not None and (flags.nnodes or flags.nproc_per_node) and flags.world_size != world.world_size:
        raise ValueError(
            f"--nnodes={flags.nnodes or 1} x --nproc_per_node={flags.nproc_per_node or 1} asks for {flags.world_size} ranks, but the"
            f" launcher around this process started WORLD_SIZE={world.world_size}; leave the flags out"
        )
    return ALONE if world is None and flags.world_size == 1 else world


def run_ident() -> str:
    """An id of this run, the same on every rank and never seen before. Where our launcher did not start all ranks it is broadcast,
    so torch.distributed must be initialised by then."""
    if RUN_ID not in os.environ:
        import torch.distributed as dist

        ident = [uuid.uuid4().hex]
        if dist.is_initialized():
            dist.broadcast_object_list(ident, src=0)
        else:
            assert int(os.environ.get("WORLD_SIZE", "1")) == 1, "run_ident() needs torch.distributed on several ranks"
        os.environ[RUN_ID] = ident[0]
    return os.environ[RUN_ID]


def _run_rank(worker: Worker, rest: list[str], world: World) -> int:
    """Run the worker; under our launcher, leave a note of how it failed."""
    launched = os.environ.get(_LAUNCHER) == str(os.getppid())
    if launched:
        die_with_parent(os.getppid())
    else:
        os.environ.pop(RUN_ID, None)  # an id that an outer run left behind
    world.export(os.environ)
    atexit.register(_leave_process_groups)  # the first to be registered runs last, after vLLM has left its groups
    try:
        return worker(rest, world)
    except Exception:
        atexit.unregister(_leave_process_groups)  # the others may still wait for this rank; it must not wait for them
        if launched:
            note = {"rank": world.rank, "time_ns": time.time_ns(), "traceback": traceback.format_exc()}
            Path(os.environ[_ERRORS], f"{world.rank}.json").write_text(json.dumps(note))
        raise


def _leave_process_groups() -> None:
    """gloo's threads must be joined before the interpreter is torn down, or now and then a good run ends with SIGABRT."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def _run_torchrun(flags: LaunchFlags, rest: list[str], module: str) -> int:
    """Start torchrun's agent here. When a rank fails it ends the others (SIGTERM, then SIGKILL after 30 s)."""
    rendezvous = _rendezvous(flags, os.environ)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    ranks = flags.nproc_per_node or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ[_LAUNCHER] = str(os.getpid())
    os.environ.pop(RUN_ID, None)
    if (flags.nnodes or 1) == 1:
        os.environ[RUN_ID] = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="tridentrl-errors-") as errors:
        os.environ[_ERRORS] = errors
        try:
            run(parse_args([f"--nproc_per_node={ranks}", *rendezvous, "-m", module, *rest]))
        except ChildFailedError as error:
            ended = {rank: (failure.exitcode, float(failure.timestamp)) for rank, failure in error.failures.items()}
            code, text = first_failure(ended, [json.loads(path.read_text()) for path in Path(errors).glob("*.json")])
            print(f"\n{text}", file=sys.stderr, flush=True)
            return code
        except SignalException as error:
            return 128 + int(error.sigval)
    return 0


def first_failure(ended: Mapping[int, tuple[int, float]], notes: Sequence[Mapping[str, object]]) -> tuple[int, str]:
    """Exit code and text for the rank to blame.

    `ended` maps the ranks that did not end well to exit code and the second in which the agent saw it, in the order in which it saw
    them; `notes` come from the ranks that raised. A rank killed by a signal goes first: the errors of the others are lost connections
    to it. The signals of the agent itself do not count, SIGTERM at once and SIGKILL 30 s later, nor an abort of a rank that had already
    raised. Then the earliest exception.
    """
    began = min(second for _, second in ended.values())
    raised = {int(str(note["rank"])) for note in notes}
    for rank, (code, second) in ended.items():
        if rank not in raised and code < 0 and code != -signal.SIGTERM and second < began + 20:
            return _ended(rank, code)
    if notes:
        note = min(notes, key=lambda note: int(str(note["time_ns"])))
        rank = int(str(note["rank"]))
        code, _ = ended.get(rank, (1, 0.0))
        return max(code, 1), f"rank {rank} failed first:\n{str(note['traceback']).rstrip()}"
    rank, (code, _) = next(iter(ended.items()))
    return _ended(rank, code)


def _ended(rank: int, code: int) -> tuple[int, str]:
    if code < 0:
        return 128 - code, f"rank {rank} was killed by signal {-code} ({signal.Signals(-code).name})"
    return code, f"rank {rank} ended with exit code {code}"


def _rendezvous(flags: LaunchFlags, environ: Mapping[str, str]) -> list[str]:
    """torchrun's arguments that bring the nodes together. One node without a port of the user's takes any free one, race-free."""
    nnodes = flags.nnodes or 1
    if nnodes == 1 and flags.master_port is None:
        return ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", f"--rdzv_id={uuid.uuid4().hex}", "--local_addr=localhost"]
    node_rank, addr, port = flags.node_rank, flags.master_addr, flags.master_port
    if nnodes == 1:
        node_rank, addr = 0, addr or "127.0.0.1"
    elif in_slurm_step(environ):
        node_rank = int(environ["SLURM_NODEID"]) if node_rank is None else node_rank
        addr, port = addr or slurm_master_addr(environ), port or slurm_master_port(environ)
    else:
        addr = addr or environ.get("MASTER_ADDR")
    missing = [f"--{name}" for name, value in (("node_rank", node_rank), ("master_addr", addr)) if value is None]
    if missing:
        raise ValueError(f"--nnodes={nnodes} needs {' and '.join(missing)} too (the same address on every node, ranks from 0)")
    port = port or int(environ.get("MASTER_PORT", "29500"))
    if node_rank == 0:
        _require_free(port)
    return [f"--nnodes={nnodes}", f"--node_rank={node_rank}", f"--master_addr={addr}", f"--master_port={port}"]


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection of an earlier run does not count
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            hint = "choose another" if error.errno != 13 else "ports below 1024 need privileges"
            raise ValueError(f"--master_port={port} cannot be used on this host ({error.strerror}); {hint}") from None
