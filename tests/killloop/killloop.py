"""Runs killed with SIGKILL at random moments and resumed until they end: each must end with the weights of the run that nobody killed.

    make test-kill            25 runs of two ranks
    python tests/killloop/killloop.py --runs 3 --seed 7

Half of the kills hit one rank alone, the others both at once. A checkpoint is written after each step, in every second run beside
training, so that most kills fall into a save (or leave a rank alone that begins one). Not covered: power loss, where what the operating
system had not written is gone.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import conftest  # noqa: F401  # settings made before anything heavy is imported

# isort: split
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from toy_task import toy_overrides

from tridentrl.configs.load import load_config
from tridentrl.trainer.rl_trainer import RLTrainer
from tridentrl.trainer.world import world_from_torchrun

STEPS = 4
HERE = Path(__file__).parent


def overrides(folder: Path) -> list[str]:
    return [
        *toy_overrides(folder, val_rows=1),
        f"reward.custom_fn.path={HERE.parent / 'closeness_reward.py'}",
        "data.val_files=[]",
        "data.train_batch_size=2",
        "rollout.backend=hf",
        "rollout.max_response_length=3",
        "parallel.tensor=2",
        "algorithm.name=ppo",
        "algorithm.samples_per_prompt=2",
        "trainer.eval_at_start=false",
        "trainer.eval_interval=null",
        "trainer.save_interval=1",
        f"trainer.total_steps={STEPS}",
        "optimizer.warmup_steps=3",
    ]


def train(settings: list[str], die_after_s: float | None, victims: tuple[int, ...]) -> list[str]:
    """One attempt on this rank, which kills itself after so many seconds if it is a victim; what it logged about checkpoints."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tridentrl").addHandler(handler)
    logging.getLogger("tridentrl").setLevel(logging.INFO)
    world = world_from_torchrun(os.environ)
    if die_after_s is not None and world and world.rank in victims:
        timer = threading.Timer(die_after_s, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    RLTrainer(load_config(settings), world).run()
    return lines


def attempt(settings: list[str], die_after_s: float | None, victims: tuple[int, ...]) -> bool:
    """Whether the run ended by itself. An error that no kill explains is raised."""
    try:
        run_ranks(2, train, settings, die_after_s, victims, timeout_s=600)
    except RuntimeError as error:
        if die_after_s is None or "ended without a result: killed" not in str(error):
            raise
        return False
    return True


def begun_saves(run: Path) -> set[tuple[str, int]]:
    """Saves and deletions that were begun and have not ended."""
    return {(path.name, path.stat().st_ino) for path in (run / "checkpoints").glob(".step_*")}


def weights(run: Path) -> dict[str, torch.Tensor]:
    folders = (run / "hf" / f"step_{STEPS}{role}" for role in ("", "-critic"))
    return {f"{folder.name}/{name}": t for folder in folders for name, t in load_file(folder / "model.safetensors").items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=3, help="at most, for each run")
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="killloop-"))
    base, outputs = overrides(folder), folder / "outputs"
    attempt([*base, "exp_name=straight"], None, ())
    start = time.monotonic()
    attempt([*base, "exp_name=straight", "trainer.resume=never"], None, ())  # the first one read files that are cached now
    seconds = time.monotonic() - start
    expected = weights(outputs / "straight")
    kills: dict[str, int] = {"between saves": 0, "in a save": 0}
    print(f"an uninterrupted run of {STEPS} steps takes {seconds:.1f} s", flush=True)
    for number in range(arguments.runs):
        run = outputs / f"run-{number}"
        settings = [*base, f"exp_name={run.name}", f"trainer.async_save={'true' if number % 2 else 'false'}"]
        done, killed = False, []
        while not done:
            limit = generator.uniform(0.2, 1.0) * seconds if len(killed) < arguments.kills else None
            victims: Any = generator.choice([(0, 1), (0,), (1,), (0, 1)])
            before, start = begun_saves(run), time.monotonic()
            done = attempt(settings, limit, victims)
            if done and not killed and limit is not None:
                # It ended before its time came: this machine has less to do than when the time was taken. Once more, and sooner.
                seconds, done = min(seconds, time.monotonic() - start) * 0.9, False
                shutil.rmtree(run)
            elif not done:
                saving = bool(begun_saves(run) - before)
                kills["in a save" if saving else "between saves"] += 1
                killed.append(f"{limit:.1f} s, rank {' and '.join(map(str, victims))}{' in a save' if saving else ''}")
        got = weights(run)
        if got.keys() != expected.keys() or not all(torch.equal(got[name], tensor) for name, tensor in expected.items()):
            print(f"run {number}: DIFFERENT weights after the kills {killed}; see {folder}")
            return 1
        print(f"run {number}: equal after {len(killed)} kills ({'; '.join(killed)})", flush=True)
        shutil.rmtree(run)
    print(f"{arguments.runs} runs ended with the weights of the uninterrupted one; kills: {kills}")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
