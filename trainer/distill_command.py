"""The command `tridentrl distill-rm`: a run of `algorithm.name=distill_rm`, then a report on how well student and teacher agree."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tridentrl.trainer.launcher import find_world, launch, split_launch_flags
from tridentrl.trainer.main_fastrl import check_input, quiet_libraries, refuse, train_on_this_rank
from tridentrl.trainer.world import World

if TYPE_CHECKING:
    from tridentrl.trainer.rl_trainer import RLTrainer

REPORT = "distill.json"


def main(argv: Sequence[str]) -> int:
    """Exit status as of `tridentrl train`."""
    quiet_libraries()
    try:
        launch_flags, rest = split_launch_flags(argv)
        if find_world(launch_flags, os.environ) is None:
            check_input(settings(parsed(rest)), world=launch_flags.world_size)
    except (ValueError, ImportError) as error:
        return refuse(error)
    return launch(argv, distill_on_this_rank, module="tridentrl.trainer.distill_command")


def distill_on_this_rank(argv: list[str], world: World) -> int:
    """The whole command on one rank."""
    try:
        with contextlib.ExitStack() as stack:
            flags = parsed(argv)
            if world.rank == 0:
                stack.enter_context(run_folder(flags.output_dir))
            return train_on_this_rank(settings(flags), world, lambda trainer: finish(trainer, flags.output_dir))
    except BadFolder as error:
        return refuse(error)


class BadFolder(ValueError):
    """The output folder cannot be written."""


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The flags. BadFolder when the output is there already."""
    parser = argparse.ArgumentParser(
        prog="tridentrl distill-rm",
        description="Distil a reward model (sequence classification, one label) into a smaller one, and report how well they agree.",
        epilog="Processes: --nproc_per_node N and so on, as for `tridentrl train`. Flags may be written with dashes.",
    )

    def add(name: str, **options: Any) -> None:
        parser.add_argument(f"--{name}", *([f"--{name.replace('_', '-')}"] if "_" in name else []), dest=name, **options)

    add("teacher_model", required=True, help="folder or hub name of the reward model to learn from")
    add("student_model", required=True, help="the model to train: a language model, or a reward model; with the teacher's tokenizer")
    add("output_dir", required=True, type=Path, help=f"new folder for the trained student and {REPORT}")
    add("train_files", required=True, action="append", help="texts: preference pairs, or prompts with one response; repeat it for several")
    add(
        "val_files",
        action="append",
        help="texts to compare the two models on, of the same form; without it some of the others are held out",
    )
    add("val_share", type=float, default=0.1, help="how many are held out then; 0.1")
    add("prompt_key", default="prompt", help="column of the prompts; prompt")
    add("chosen_key", default="chosen", help="column of one response of a pair; chosen")
    add("rejected_key", default="rejected", help="column of the other; rejected")
    add("response_key", help="column of the responses, where each row has one and is no pair")
    add("tensor", type=int, help="tensor-parallel ranks of both models (parallel.tensor)")
    add("pipeline", type=int, help="pipeline stages of both models (parallel.pipeline)")
    add("epochs", type=int, default=1, help="passes over the texts; 1")
    add("batch_size", type=int, default=32, help="rows of a step; 32")
    add("lr", type=float, default=1e-5, help="peak learning rate; 1e-5")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="further settings of `tridentrl train`")
    flags = parser.parse_intermixed_args(list(argv))
    if flags.output_dir.exists():
        raise BadFolder(f"--output_dir={flags.output_dir} exists already; give another folder, or remove it")
    return flags


def settings(flags: argparse.Namespace) -> list[str]:
    """What `tridentrl train` is told."""
    pairs = flags.response_key is None
    values = {
        "algorithm.name": "distill_rm",
        "algorithm.pairs": pairs,
        "model.teacher_pretrained_model_name_or_path": flags.teacher_model,
        "model.actor_pretrained_model_name_or_path": flags.student_model,
        "data.train_files": flags.train_files,
        "data.val_files": flags.val_files or [],
        "data.val_share": 0 if flags.val_files else flags.val_share,
        "data.prompt_key": flags.prompt_key,
        "data.chosen_key": flags.chosen_key if pairs else None,
        "data.rejected_key": flags.rejected_key if pairs else None,
        "data.response_key": flags.response_key,
        "data.train_batch_size": flags.batch_size,
        "data.drop_last": False,
        "parallel.tensor": flags.tensor or "auto",
        "parallel.pipeline": flags.pipeline or "auto",
        "optimizer.lr": flags.lr,
        "trainer.total_steps": None,
        "trainer.epochs": flags.epochs,
        "trainer.save_interval": None,
        "trainer.gradient_clip_val": 1.0,
        "trainer.loggers": ["jsonl"],
    }
    folder = scratch(flags.output_dir)
    place = {"output_dir": str(folder.parent), "exp_name": folder.name}
    return [*map(setting, values.items()), *flags.settings, *map(setting, place.items())]


def setting(item: tuple[str, Any]) -> str:
    key, value = item
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def scratch(output: Path) -> Path:
    """Where the run lies until it is over."""
    return output.with_name(f".{output.name}.incomplete") / "run"


@contextlib.contextmanager
def run_folder(output: Path) -> Iterator[None]:
    """Inside, there is a folder for the run, which is gone afterwards however it ends. BadFolder when another run has it."""
    folder = scratch(output).parent
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise BadFolder(
            f"--output_dir={output}: {folder} is there, so another distillation writes there now, or one was killed; "
            "wait for it to end, or remove that folder"
        ) from None
    except OSError as error:
        raise BadFolder(f"--output_dir={output} cannot be made: {error}") from None
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # torchrun's, when another rank fails first
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def finish(trainer: RLTrainer, output: Path) -> None:
    """Compare the two models on the held-out texts, and give the student its place. Collective over the world."""
    from tridentrl.weights.folders import complete_folder

    report = compared(trainer)
    if trainer.leads:
        student = trainer.run_folder / "hf" / f"step_{trainer.total_steps}"
        (student / REPORT).write_text(json.dumps(report, indent=2) + "\n")
        for name in ("metrics.jsonl", "config.yaml"):
            shutil.move(trainer.run_folder / name, student / name)
        complete_folder(student, output)
        print(described(report), f"wrote {output}", sep="\n")


def compared(trainer: RLTrainer) -> dict[str, Any]:
    """What `distill.json` says."""
    from tridentrl.algos import DistillRM

    algorithm, rows = trainer.phase.algorithm, trainer.val_data
    assert isinstance(algorithm, DistillRM)
    report = {
        "teacher": trainer.config.model.teacher_pretrained_model_name_or_path,
        "student": trainer.config.model.actor_pretrained_model_name_or_path,
        "steps": trainer.total_steps,
        "texts": 0,
    }
    if not rows:
        return report
    texts = algorithm.texts(trainer.context, rows[range(len(rows))])
    student, teacher = (algorithm.scores(trainer.context, texts, role).double().cpu().numpy() for role in ("reward_model", "teacher"))
    return report | agreement(student, teacher, pairs=algorithm.config.pairs)


def agreement(student: np.ndarray, teacher: np.ndarray, *, pairs: bool) -> dict[str, Any]:
    """Of two models' scores [N]. With `pairs` they are in twos; pairs that the teacher scores alike do not count.

    A value is None where it is not defined: no pair counts, or all scores are equal.
    """
    report: dict[str, Any] = {"texts": len(teacher)}
    if pairs:
        margins, wanted = student[::2] - student[1::2], teacher[::2] - teacher[1::2]
        counted = wanted != 0
        report["pairs"] = int(counted.sum())
        report["pairs_ranked_alike"] = float((np.sign(margins) == np.sign(wanted))[counted].mean()) if counted.any() else None
    return report | {
        "pearson": correlation(student, teacher),
        "spearman": correlation(ranks(student), ranks(teacher)),
        "teacher_mean": float(teacher.mean()),
        "teacher_std": float(teacher.std()),
        "student_mean": float(student.mean()),
        "student_std": float(student.std()),
    }


def correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Pearson's."""
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else None


def ranks(scores: np.ndarray) -> np.ndarray:
    """From 1; equal scores share the mean of their ranks."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[place]


def described(report: dict[str, Any]) -> str:
    """The report in words."""
    if not report["texts"]:
        return "no texts were held out, so student and teacher were not compared"
    number = lambda value: "undefined" if value is None else f"{value:.3f}"  # noqa: E731
    lines = [f"student and teacher on {report['texts']} held-out texts:"]
    if "pairs" in report:
        lines.append(f"  pairs ranked alike   {number(report['pairs_ranked_alike'])} of {report['pairs']}")
    return "\n".join(
        [
            *lines,
            f"  correlation          Pearson {number(report['pearson'])}, Spearman {number(report['spearman'])}",
            f"  mean and spread      teacher {report['teacher_mean']:.3f} +- {report['teacher_std']:.3f}, "
            f"student {report['student_mean']:.3f} +- {report['student_std']:.3f}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
