"""Starting ranks: launch flags, what torchrun and Slurm put into the environment, and real processes that succeed, fail and die."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tridentrl.trainer.launcher import LaunchFlags, _rendezvous, find_world, first_failure, launch, run_ident, split_launch_flags
from tridentrl.trainer.world import ALONE, World, first_host, tasks_per_node, world_from_slurm, world_from_torchrun

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "1234",
    "GROUP_WORLD_SIZE": "2",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
    "SLURM_NNODES": "3",
    "SLURM_JOB_NODELIST": "n[01-03]",
    "SLURM_TASKS_PER_NODE": "2(x3)",
}


# Launch flags


def test_launch_flags_are_taken_out_in_both_forms_and_the_rest_keeps_its_order() -> None:
    flags, rest = split_launch_flags(
        ["data.train_files=[a,b]", "--nnodes=2", "--config", "x.yaml", "--nproc_per_node", "4", "a=-1", "--node-rank=1", "--master_addr=h"]
    )
    assert flags == LaunchFlags(nnodes=2, nproc_per_node=4, node_rank=1, master_addr="h", master_port=None)
    assert rest == ["data.train_files=[a,b]", "--config", "x.yaml", "a=-1"]
    assert split_launch_flags(["--nproc=2", "--node=1"]) == (LaunchFlags(), ["--nproc=2", "--node=1"])  # no abbreviations


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--nproc_per_node=0", "--nproc_per_node=0: must be at least 1"),
        ("--nproc_per_node=two", "--nproc_per_node.*'two'"),
        ("--node_rank=1", "--node_rank=1 must be below --nnodes=1"),
        ("--master_port=70000", "--master_port=70000: must be between 1 and 65535"),
    ],
)
def test_wrong_launch_flags_name_the_flag_and_the_rule(argument: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_launch_flags([argument])


# Environment of torchrun


def test_torchruns_environment_makes_a_world_and_back() -> None:
    world = world_from_torchrun(TORCHRUN)
    assert world == World(rank=5, world_size=8, local_rank=1, local_world_size=4, master_addr="head", master_port=1234)
    exported: dict[str, str] = {}
    world.export(exported)
    assert exported == {name: value for name, value in TORCHRUN.items() if name != "GROUP_WORLD_SIZE"}
    assert world_from_torchrun({"MASTER_ADDR": "head"}) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, "contradicts itself: RANK=8, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_RANK": "4"}, "contradicts itself"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE must be a number, it is 'many'"),
        ({"MASTER_PORT": None}, "has RANK=5, WORLD_SIZE=8, LOCAL_RANK=1 but not MASTER_PORT"),
    ],
)
def test_contradicting_or_missing_variables_are_listed(changes: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in (TORCHRUN | changes).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        world_from_torchrun(environ)


def test_flags_must_agree_with_the_launcher_around() -> None:
    assert find_world(LaunchFlags(nnodes=2, nproc_per_node=4), TORCHRUN) == world_from_torchrun(TORCHRUN)
    with pytest.raises(ValueError, match=r"--nnodes=1 x --nproc_per_node=4 asks for 4 ranks, .*WORLD_SIZE=8"):
        find_world(LaunchFlags(nproc_per_node=4), TORCHRUN)


# Environment of Slurm


@pytest.mark.parametrize(
    ("nodes", "host"), [("n1", "n1"), ("n[01-03]", "n01"), ("a[1-2],b7", "a1"), ("b7,a[1-2]", "b7"), ("r[2-3]n[10,12]", "r2n10")]
)
def test_first_host_of_a_slurm_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_slurms_short_form_of_tasks_per_node() -> None:
    assert [tasks_per_node(text) for text in ("4", "2(x3)", "2(x2),1")] == [[4], [2, 2, 2], [2, 2, 1]]
    with pytest.raises(ValueError, match=r"'2x3' is not a Slurm list"):
        tasks_per_node("2x3")


def test_one_rank_per_srun_task() -> None:
    expected = World(rank=3, world_size=6, local_rank=1, local_world_size=2, master_addr="n01", master_port=14711)
    assert world_from_slurm(SRUN) == expected
    without = {name: value for name, value in SRUN.items() if name != "SLURM_TASKS_PER_NODE"}
    assert world_from_slurm(without) == expected  # from the number of nodes
    assert world_from_slurm(without | {"SLURM_NTASKS_PER_NODE": "2"}) == expected
    uneven = {"SLURM_NTASKS": "5", "SLURM_PROCID": "4", "SLURM_NODEID": "2", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert world_from_slurm(SRUN | uneven) == World(
        rank=4, world_size=5, local_rank=0, local_world_size=1, master_addr="n01", master_port=14711
    )


def test_two_steps_of_a_job_get_different_ports() -> None:
    ports = {world_from_slurm(SRUN | {"SLURM_STEP_ID": step}).master_port for step in ("0", "1", "2")}  # type: ignore[union-attr]
    assert len(ports) == 3
    assert all(10_000 <= port < 30_000 for port in ports)  # Linux hands out ports from 32768 by itself


def test_a_preset_address_and_port_win_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        world = world_from_slurm(SRUN | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "2345"})
    assert world is not None
    assert (world.master_addr, world.master_port) == ("10.0.0.9", 2345)
    assert "MASTER_ADDR=10.0.0.9 was set before the run" in caplog.text and "MASTER_PORT=2345 was set" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_NTASKS": "7"}, r"contradict each other: .*SLURM_NTASKS=7.*SLURM_TASKS_PER_NODE=2\(x3\)"),
        ({"SLURM_LOCALID": "2"}, "contradict each other: .*SLURM_LOCALID=2"),
        ({"SLURM_PROCID": "4"}, "use srun --distribution=block: SLURM_PROCID=4"),
    ],
)
def test_contradicting_slurm_variables_are_listed(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        world_from_slurm(SRUN | changes)


def test_torchrun_inside_of_srun_goes_first_but_must_know_of_the_other_nodes() -> None:
    one_per_node = SRUN | {"SLURM_NTASKS": "2"}
    assert find_world(LaunchFlags(), one_per_node | TORCHRUN) == world_from_torchrun(TORCHRUN)
    with pytest.raises(ValueError, match=r"srun started 6 torchruns, .* SLURM_NTASKS=6, GROUP_WORLD_SIZE=2, WORLD_SIZE=8"):
        find_world(LaunchFlags(), SRUN | TORCHRUN)


def test_a_batch_script_without_srun_is_no_rank() -> None:
    script = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert find_world(LaunchFlags(), script) == ALONE
    assert find_world(LaunchFlags(nproc_per_node=2), script) is None


def test_under_srun_the_flags_start_torchrun_on_each_node_or_must_fit_the_tasks() -> None:
    one_per_node = SRUN | {"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    flags = LaunchFlags(nnodes=3, nproc_per_node=8)
    assert find_world(flags, one_per_node) is None
    assert _rendezvous(flags, one_per_node) == ["--nnodes=3", "--node_rank=1", "--master_addr=n01", "--master_port=14711"]
    assert find_world(LaunchFlags(nnodes=3, nproc_per_node=2), SRUN) == world_from_slurm(SRUN)
    with pytest.raises(ValueError, match=r"SLURM_NTASKS=6 tasks, the flags ask for 3 nodes x 8 processes"):
        find_world(flags, SRUN)


# Rendezvous


def test_several_nodes_need_a_rank_and_an_address() -> None:
    with pytest.raises(ValueError, match="--nnodes=2 needs --node_rank and --master_addr too"):
        _rendezvous(LaunchFlags(nnodes=2), {})
    assert _rendezvous(LaunchFlags(nnodes=2, node_rank=1, master_addr="head"), {})[-2:] == ["--master_addr=head", "--master_port=29500"]


def test_a_port_of_the_users_that_is_busy_is_an_error_and_never_moved() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"--master_port={port} cannot be used on this host .*choose another"):
            launch(["--nproc_per_node=2", f"--master_port={port}"], lambda rest, world: 0)
    assert _rendezvous(LaunchFlags(master_port=port), {}) == [
        "--nnodes=1",
        "--node_rank=0",
        "--master_addr=127.0.0.1",
        f"--master_port={port}",
    ]


# Whom to blame


def test_a_killed_rank_is_blamed_before_the_connections_it_broke_and_then_the_earliest_error() -> None:
    notes = [
        {"rank": 0, "time_ns": 2_000, "traceback": "ConnectionError: peer closed\n"},
        {"rank": 2, "time_ns": 1_000, "traceback": "KeyError: 'x'\n"},
    ]
    assert first_failure({0: (1, 50.0), 3: (-9, 50.0), 1: (-15, 51.0)}, notes) == (137, "rank 3 was killed by signal 9 (SIGKILL)")
    ended_by_agent = {0: (1, 50.0), 2: (5, 50.0), 1: (-15, 51.0), 3: (-9, 81.0)}
    assert first_failure(ended_by_agent, notes) == (5, "rank 2 failed first:\nKeyError: 'x'")
    aborted_at_exit = {0: (-6, 50.0), 2: (-6, 50.0)}
    assert first_failure(aborted_at_exit, notes) == (1, "rank 2 failed first:\nKeyError: 'x'")
    assert first_failure({1: (7, 50.0), 0: (-15, 50.0)}, []) == (7, "rank 1 ended with exit code 7")
    assert first_failure({1: (-15, 50.0), 0: (-15, 50.0)}, []) == (143, "rank 1 was killed by signal 15 (SIGTERM)")


# Real processes

PROBE = """
import json, os, signal, sys, time
from tridentrl.trainer.launcher import launch, run_ident

def worker(rest, world):
    what = rest[0]
    if what == "sum":
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([world.rank + 1])
        dist.all_reduce(total)
        report = {"rank": world.rank, "sum": total.item(), "rest": rest, "id": run_ident(), "omp": os.environ["OMP_NUM_THREADS"]}
        print(json.dumps(report) + "\\n", end="", flush=True)
    elif what != "alone" and world.rank == 0:
        time.sleep(60)
    elif what == "raise":
        raise KeyError("the culprit")
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "code":
        return 7
    elif what == "orphan":
        print(os.getpid(), flush=True)
        time.sleep(60)
    return 0

if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:], worker, module="probe"))
"""


class Job:
    """`python -m probe` in a process of its own, forked from here so that the launcher's half need not import torch again."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._out, self._err = (Path(tempfile.mkstemp(dir=folder, suffix=suffix)[1]) for suffix in (".out", ".err"))
        self.process = multiprocessing.get_context("fork").Process(target=self._run, args=(folder, arguments))
        self.process.start()

    def _run(self, folder: Path, arguments: tuple[str, ...]) -> None:
        for path, fd in ((self._out, 1), (self._err, 2)):
            os.dup2(os.open(path, os.O_WRONLY), fd)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # pytest has replaced it
        os.environ.pop("OMP_NUM_THREADS")
        os.environ["PYTHONPATH"] = str(folder)
        sys.exit(launch(arguments, lambda rest, world: 99, module="probe"))

    def wait(self) -> tuple[int | None, list[str], list[str]]:
        """Exit code, lines of stdout, lines of stderr."""
        self.process.join(60)
        assert self.process.exitcode is not None, "still running"
        return self.process.exitcode, self._out.read_text().splitlines(), self._err.read_text().splitlines()

    def first_line(self) -> str:
        deadline = time.monotonic() + 60
        while "\n" not in (text := self._out.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return text.splitlines()[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "probe.py").write_text(PROBE)
    return tmp_path


def test_two_jobs_at_once_each_with_two_ranks(folder: Path) -> None:
    idents = set()
    for number, job in enumerate([Job(folder, "--nproc_per_node=2", "sum", f"exp_name=job{number}") for number in range(2)]):
        code, output, errors = job.wait()
        assert code == 0, errors
        reports = sorted((json.loads(line) for line in output), key=lambda report: report["rank"])
        assert [report["rank"] for report in reports] == [0, 1]
        assert {report["sum"] for report in reports} == {3}
        assert all(report["rest"] == ["sum", f"exp_name=job{number}"] for report in reports)
        assert all(report["omp"] == str(max(1, (os.cpu_count() or 1) // 2)) for report in reports)
        idents |= {report["id"] for report in reports}
    assert len(idents) == 2


def test_a_failing_rank_ends_all_with_its_error_last(folder: Path) -> None:
    """Rank 0 sleeps for a minute while rank 1 raises, is killed, or returns a code."""
    began = time.monotonic()
    jobs = {what: Job(folder, "--nproc_per_node=2", what) for what in ("raise", "kill", "code")}
    results = {what: job.wait() for what, job in jobs.items()}
    assert time.monotonic() - began < 60
    assert {what: code for what, (code, _, _) in results.items()} == {"raise": 1, "kill": 137, "code": 7}
    errors = {what: lines for what, (_, _, lines) in results.items()}
    assert errors["raise"][-1] == "KeyError: 'the culprit'"
    assert "rank 1 failed first:" in errors["raise"]
    assert errors["kill"][-1] == "rank 1 was killed by signal 9 (SIGKILL)"
    assert errors["code"][-1] == "rank 1 ended with exit code 7"


def test_a_killed_launcher_leaves_no_rank_behind(folder: Path) -> None:
    job = Job(folder, "--nproc_per_node=2", "orphan")
    rank = psutil.Process(int(job.first_line()))
    job.process.kill()
    _, alive = psutil.wait_procs([rank], timeout=5)
    assert not alive
    assert job.wait()[0] == -9


def test_a_world_of_one_runs_here_and_its_exception_propagates(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRIDENTRL_RUN_ID", "of an earlier run")
    seen = []

    def worker(rest: list[str], world: World) -> int:
        seen.append((rest, world, os.environ["RANK"], run_ident()))
        return 3

    def failing(rest: list[str], world: World) -> int:
        raise KeyError("mine")

    assert launch(["a=1", "--nproc_per_node=1"], worker) == 3
    assert seen[0][:3] == (["a=1"], ALONE, "0")
    assert seen[0][3] not in ("", "of an earlier run")
    assert run_ident() == seen[0][3]
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(KeyError, match="mine"):
        launch([], failing)
