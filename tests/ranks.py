"""Runs a function on n gloo ranks forked from the warm test process, so that a multi-rank test costs milliseconds, not imports.

The parent must not have initialised CUDA, a process group or a thread pool that the function needs; torch's forward on CPU is fine.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist

GRACE_S = 1.0
"""Seconds that the other ranks get to end by themselves after one has failed, so that their tracebacks can be read too."""


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Fork `n` children, give each its rank in a gloo process group, return what `fn(*args)` returned there, in rank order.

    `fn` and `args` need not be picklable (they travel by fork), the results must be. Raises RuntimeError with the traceback of the
    rank that failed first, or TimeoutError after `timeout_s` seconds; no child survives either.
    """
    port = free_port()
    sys.stdout.flush()
    sys.stderr.flush()
    pids: list[int] = []
    pipes: list[Connection] = []
    for rank in range(n):
        receiving, sending = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            _child(rank, n, port, fn, args, sending)
        sending.close()
        pids.append(pid)
        pipes.append(receiving)
    try:
        return _collect(pipes, time.monotonic() + timeout_s, timeout_s)
    finally:
        for pid, pipe in zip(pids, pipes, strict=True):
            pipe.close()
            os.kill(pid, signal.SIGKILL)  # a child that has ended is a zombie until waitpid, so the pid cannot be someone else's
            os.waitpid(pid, 0)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _child(rank: int, n: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...], pipe: Connection) -> NoReturn:
    """Body of one rank; leaves by `os._exit` so that the parent's pytest, exit hooks and buffers are not run twice."""
    try:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        torch.set_num_threads(1)  # an OpenMP pool does not survive a fork; one thread needs none
        dist.init_process_group("gloo", rank=rank, world_size=n)
        result = fn(*args)
        dist.barrier()  # nobody takes its sockets away while another rank still talks
        message = pickle.dumps((True, result))
    except BaseException:
        trace = io.StringIO()
        traceback.print_exc(file=trace)
        message = pickle.dumps((False, trace.getvalue()))
    pipe.send_bytes(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _collect(pipes: list[Connection], deadline: float, timeout_s: float) -> list[Any]:
    """Results in rank order. The first failure shortens the deadline to the grace period and is raised at its end."""
    results: dict[int, Any] = {}
    failures: list[str] = []
    pending = {pipe: rank for rank, pipe in enumerate(pipes)}
    while pending and (ready := wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pending.pop(pipe)
            try:
                succeeded, payload = pickle.loads(pipe.recv_bytes())
            except EOFError:
                succeeded, payload = False, "ended without a result: killed, or it called os._exit\n"
            if succeeded:
                results[rank] = payload
            else:
                failures.append(f"rank {rank} of {len(pipes)}:\n{payload}")
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        raise RuntimeError("\n".join(failures))
    if pending:
        raise TimeoutError(f"ranks {sorted(pending.values())} of {len(pipes)} did not end within {timeout_s:g} s")
    return [results[rank] for rank in range(len(pipes))]
