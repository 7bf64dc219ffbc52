"""The command `tridentrl`."""

from __future__ import annotations

import sys

import tridentrl

USAGE = """usage: tridentrl train [--config FILE] [--nproc_per_node N] key=value ...
       tridentrl convert hf-to-megatron|megatron-to-hf|verify ...
       tridentrl distill-rm --teacher_model T --student_model S --output_dir O --train_files F ...
       tridentrl --version

train        train a language model with RL; `tridentrl train --help` says more
convert      between Hugging Face folders and Megatron-LM's checkpoints; `tridentrl convert --help` says more
distill-rm   a reward model into a smaller one; `tridentrl distill-rm --help` says more"""


def main() -> int:
    """Entry point of the console script."""
    command, *rest = sys.argv[1:] or ["--help"]
    if command == "train":
        from tridentrl.trainer.main_fastrl import main as train

        return train(rest)
    if command == "convert":
        from tridentrl.trainer.convert_command import main as convert

        return convert(rest)
    if command == "distill-rm":
        from tridentrl.trainer.distill_command import main as distill

        return distill(rest)
    if command == "--version":
        print(f"tridentrl {tridentrl.__version__}")
        return 0
    print(USAGE, file=sys.stdout if command in ("--help", "-h") else sys.stderr)
    return 0 if command in ("--help", "-h") else 2
