"""Who this process is among the ranks of a run, read from what torchrun or srun put into the environment. No torch here."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class World:
    """Place of this process. Consecutive ranks share a node; `master_port` 0 (world of one only) means any free port."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Set torchrun's variables, which torch.distributed, Megatron-Core and vLLM read."""
        values = (self.rank, self.world_size, self.local_rank, self.local_world_size, self.master_addr, self.master_port)
        environ.update({name: str(value) for name, value in zip(_TORCHRUN, values, strict=True)})


ALONE = World(rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="127.0.0.1", master_port=0)


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process. A batch script has SLURM_PROCID too, but belongs to no step."""
    return "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ


def world_from_torchrun(environ: Mapping[str, str]) -> World | None:
    """What torchrun says; None where it did not start this process. Raises ValueError that lists variables that disagree or lack."""
    given = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environ]
    if not given:
        return None
    missing = [name for name in _TORCHRUN if name not in environ]
    if missing:
        raise ValueError(
            f"the environment has {_listed(environ, given)} but not {', '.join(missing)}: start with torchrun, or unset the former"
        )
    rank, world_size, local_rank, local_world_size = (_number(environ, name) for name in _TORCHRUN[:4])
    if not (0 <= local_rank < local_world_size <= world_size and local_rank <= rank < world_size):
        raise ValueError(f"the environment contradicts itself: {_listed(environ, _TORCHRUN[:4])}")
    agents = int(environ.get("GROUP_WORLD_SIZE", "1"))
    if in_slurm_step(environ) and _number(environ, "SLURM_NTASKS") not in (1, agents):
        raise ValueError(
            f"srun started {environ['SLURM_NTASKS']} torchruns, each of which thinks that there are {agents}: "
            f"{_listed(environ, ('SLURM_NTASKS', 'GROUP_WORLD_SIZE', 'WORLD_SIZE'))}; use srun --ntasks-per-node=1 and torchrun --nnodes"
        )
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT"),
    )


def world_from_slurm(environ: Mapping[str, str]) -> World | None:
    """One rank per task of an srun step; None outside of one. Raises ValueError that lists variables which disagree."""
    if not in_slurm_step(environ):
        return None
    rank, world_size, local_rank = (_number(environ, name) for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
    per_node = _tasks_per_node(environ, world_size)
    node = _number(environ, "SLURM_NODEID")
    used = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", *_PER_NODE, *_NODE_LISTS)
    if sum(per_node) != world_size or node >= len(per_node) or local_rank >= per_node[node]:
        raise ValueError(f"Slurm's variables contradict each other: {_listed(environ, used)}")
    if rank != sum(per_node[:node]) + local_rank:
        raise ValueError(f"ranks must fill one node after the other, use srun --distribution=block: {_listed(environ, used)}")
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=per_node[node],
        master_addr=slurm_master_addr(environ),
        master_port=slurm_master_port(environ),
    )


_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")


def slurm_master_addr(environ: Mapping[str, str]) -> str:
    """MASTER_ADDR where the user set it, else the first host of the node list."""
    if preset := environ.get("MASTER_ADDR"):
        logger.info("MASTER_ADDR=%s was set before the run and is kept", preset)
        return preset
    nodes = next((environ[name] for name in _NODE_LISTS if environ.get(name)), None)
    if nodes is None:
        raise ValueError(f"Slurm gives no node list ({', '.join(_NODE_LISTS)}): set MASTER_ADDR to the host of rank 0")
    return first_host(nodes)


def slurm_master_port(environ: Mapping[str, str]) -> int:
    """MASTER_PORT where the user set it, else one that follows from the job and step, below the ports that the kernel hands out itself."""
    if preset := environ.get("MASTER_PORT"):
        logger.info("MASTER_PORT=%s was set before the run and is kept", preset)
        return _number(environ, "MASTER_PORT")
    job = _number(environ, "SLURM_JOB_ID")
    step = int(environ.get("SLURM_STEP_ID", "0"))
    return 10_000 + (job + 101 * step) % 20_000


def first_host(nodes: str) -> str:
    """First name of a Slurm host list: 'n[01-03,7]' gives n01, 'a[1-2],b7' gives a1, 'r[1-2]n[3-4]' gives r1n3."""
    name = ""
    for text, ranges in re.findall(r"([^\[,]+)|\[([^\]]+)\]|,", nodes):
        if not text and not ranges:
            break
        name += text or re.split("[-,]", ranges)[0]
    if not name:
        raise ValueError(f"{nodes!r} is not a Slurm host list")
    return name


def tasks_per_node(text: str) -> list[int]:
    """Slurm's short form spelled out: '2(x3),1' gives [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a Slurm list of tasks per node such as '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _tasks_per_node(environ: Mapping[str, str], world_size: int) -> list[int]:
    nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    for name in _PER_NODE:
        if environ.get(name):
            counts = tasks_per_node(environ[name])
            return counts * nodes if name == "SLURM_NTASKS_PER_NODE" else counts
    share, rest = divmod(world_size, nodes)  # Slurm gives the first nodes one more
    return [share + (node < rest) for node in range(nodes)]


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name)
    if value is None or not value.isdecimal():
        raise ValueError(f"the environment variable {name} must be a number, it is {'not set' if value is None else repr(value)}")
    return int(value)


def _listed(environ: Mapping[str, str], names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
