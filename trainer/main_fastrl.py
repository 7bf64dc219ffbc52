"""`python -m tridentrl.trainer.main_fastrl key=value ...`, the same as `tridentrl train ...`: one command for a laptop and a cluster."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tridentrl.configs.load import load_config
from tridentrl.configs.schema import Config
from tridentrl.trainer.launcher import find_world, launch, split_launch_flags
from tridentrl.trainer.world import World

if TYPE_CHECKING:
    from tridentrl.trainer.rl_trainer import RLTrainer

BAD_INPUT = 2
"""Exit code for settings, files or data that cannot be used."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit code. Bad input is one message, before any process is started."""
    argv = list(sys.argv[1:] if argv is None else argv)
    quiet_libraries()
    try:
        flags, rest = split_launch_flags(argv)
        if find_world(flags, os.environ) is None:
            check_input(rest, world=flags.world_size)
    except (ValueError, ImportError) as error:
        return refuse(error)
    return launch(argv, train_on_this_rank)


def check_input(argv: Sequence[str], *, world: int) -> None:
    """Everything that can be refused without data and weights."""
    from tridentrl.trainer.prepare import prepare

    prepare(config_from(argv), world=world)


def config_from(argv: Sequence[str]) -> Config:
    """`--config`, `--config-name`, `--config-dir` and overrides as one configuration."""
    parser = argparse.ArgumentParser(
        prog="tridentrl train",
        description="Train a language model with RL. Settings are key=value; docs/config.md lists them.",
        epilog="Processes: --nproc_per_node N, and on several machines --nnodes, --node_rank, --master_addr, --master_port.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, for example algorithm.name=ppo")
    parser.add_argument("--config", metavar="FILE", help="a YAML file laid over the defaults")
    parser.add_argument("--config-name", metavar="NAME", help="the same by name, NAME.yaml in --config-dir or among the presets")
    parser.add_argument("--config-dir", metavar="DIR", help="where --config-name is looked for")
    known = parser.parse_args(list(argv))
    return load_config(known.overrides, known.config, known.config_name, known.config_dir)


def quiet_libraries() -> None:
    """Their warnings about GPU packages that a machine lacks say nothing that our own log line does not."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and the forks of other libraries do not mix
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
    warnings.simplefilter("ignore")


def train_on_this_rank(argv: list[str], world: World, then: Callable[[RLTrainer], None] | None = None) -> int:
    """The whole run on one rank. `then`: what is done with the trained models."""
    quiet_libraries()
    # What all ranks would say alike, rank 0 says.
    logging.basicConfig(level=logging.WARNING if world.rank == 0 else logging.ERROR, format="%(message)s")
    logging.getLogger("tridentrl").setLevel(logging.INFO if world.rank == 0 else logging.ERROR)
    try:
        config = config_from(argv)
        if config.trainer.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that no library here chooses the GPU by itself
        from tridentrl.trainer.rl_trainer import RLTrainer

        trainer = RLTrainer(config, world)
    except ValueError as error:
        # Every rank finds the same; one of each machine says it.
        return refuse(error) if world.local_rank == 0 else BAD_INPUT
    trainer.run()
    if then:
        then(trainer)
    return 0


def refuse(error: Exception) -> int:
    """One message of bad input; returns the exit code."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
