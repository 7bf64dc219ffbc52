"""The command line: bad input ends in one message with the key and the fix, exit code 2 and nothing written; ranks fail together."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from toy_task import toy_overrides, toy_rows, write_arrow

from tridentrl.configs.load import load_config
from tridentrl.trainer.main_fastrl import main
from tridentrl.trainer.rl_trainer import RLTrainer, own_folder

REWARD = "reward.default=exact_match"


def refused(overrides: list[str], capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """The message of a run that must not start."""
    assert main(overrides) == 2
    errors = capsys.readouterr().err
    assert errors.count("error:") == 1
    assert not (folder / "outputs").exists()
    return errors


def changed_model(folder: Path, **changes: Any) -> None:
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*toy_overrides(tmp_path), REWARD, f"data.train_files={tmp_path}/nothing.arrow"]
    message = refused(overrides, capsys, tmp_path)
    assert "data.train_files" in message and "nothing.arrow" in message


def test_broken_arrow_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*toy_overrides(tmp_path), REWARD]
    (tmp_path / "train.arrow").write_bytes((tmp_path / "train.arrow").read_bytes()[:300])
    message = refused(overrides, capsys, tmp_path)
    assert "data.train_files" in message and "train.arrow" in message


def test_empty_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*toy_overrides(tmp_path), REWARD]
    (tmp_path / "empty.jsonl").write_text("")
    message = refused([*overrides, f"data.train_files={tmp_path}/empty.jsonl"], capsys, tmp_path)
    assert "data.train_files" in message and "empty.jsonl" in message


def test_fewer_rows_than_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*toy_overrides(tmp_path), REWARD, f"data.train_files={write_arrow(tmp_path / 'few.arrow', toy_rows(3, seed=1))}"]
    message = refused(overrides, capsys, tmp_path)
    assert "3 rows" in message and "data.train_batch_size=4" in message and "drop_last" in message


def test_unknown_model_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*toy_overrides(tmp_path), REWARD]
    changed_model(tmp_path, model_type="rwkv")
    message = refused(overrides, capsys, tmp_path)
    assert "'rwkv'" in message and "qwen2" in message and "docs/adding_a_family.md" in message


def test_model_that_is_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*toy_overrides(tmp_path), REWARD, f"model.actor_pretrained_model_name_or_path={tmp_path}/nowhere"]
    assert "model.actor_pretrained_model_name_or_path" in refused(overrides, capsys, tmp_path)


def test_every_wrong_size_is_listed_at_once_before_any_process_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*toy_overrides(tmp_path), REWARD, "--nproc_per_node=3", "parallel.tensor=3", "rollout.tensor=2", "rollout.temperature=0"]
    started = time.monotonic()
    message = refused(overrides, capsys, tmp_path)
    assert time.monotonic() - started < 5
    for part in ("parallel.tensor=3", "rollout.tensor=2", "rollout.temperature=0", "4 "):
        assert part in message, message


def test_unknown_keys_and_algorithms_name_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*toy_overrides(tmp_path), REWARD]
    assert "train_batch_size" in refused([*overrides, "data.train_batchsize=4"], capsys, tmp_path)
    assert "group_size" in refused([*overrides, "algorithm.groupsize=4"], capsys, tmp_path)
    assert "grpo" in refused([*overrides, "algorithm.name=gpro"], capsys, tmp_path)
    assert "group_size" in refused([*overrides, "algorithm.group_size=1"], capsys, tmp_path)


def test_data_source_without_a_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(toy_overrides(tmp_path), capsys, tmp_path)
    assert "'sums': 64 rows" in message and "reward.custom_fn.path" in message


def command(*overrides: str) -> list[str]:
    return [sys.executable, "-m", "tridentrl.trainer.main_fastrl", *overrides]


def test_a_reward_that_raises_ends_all_ranks_with_its_traceback(tmp_path: Path) -> None:
    reward = tmp_path / "mine.py"
    reward.write_text(
        "import pathlib\n"
        "def compute_score(response, ground_truth):\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'raised').touch()\n"
        "    return int(ground_truth) / 0\n"
    )
    overrides = [
        *toy_overrides(tmp_path),
        f"reward.custom_fn.path={reward}",
        "rollout.backend=hf",
        "parallel.tensor=2",
        "trainer.total_steps=2",
    ]
    run = subprocess.run(command(*overrides, "--nproc_per_node=2"), capture_output=True, text=True, timeout=240)
    assert time.time() - (tmp_path / "raised").stat().st_mtime < 60
    assert run.returncode not in (0, 2)
    end = run.stderr[-1500:]
    assert "ZeroDivisionError" in end and "mine.py" in end and "row" in end and "sums" in end
    assert not (tmp_path / "outputs" / "default" / "hf").exists()


def run_saved(config: Path) -> None:
    RLTrainer(load_config(["exp_name=again"], config_file=config)).run()


def test_two_ranks_from_the_command_line_and_the_saved_configuration_runs_again(tmp_path: Path) -> None:
    overrides = [
        *toy_overrides(tmp_path, val_rows=3),
        REWARD,
        "rollout.backend=hf",
        "parallel.tensor=2",
        "trainer.total_steps=1",
        "algorithm.group_size=2",
    ]
    first = subprocess.run(command(*overrides, "exp_name=first", "--nproc_per_node=2"), capture_output=True, text=True, timeout=240)
    assert first.returncode == 0, first.stderr
    runs = [tmp_path / "outputs" / name for name in ("first", "again")]
    run_ranks(2, run_saved, runs[0] / "config.yaml")
    records = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    for a, b in zip(*records, strict=True):
        for name in ("actor/loss", "actor/grad_norm", "reward/mean", "val/reward/mean", "rollout/length_mean"):
            assert a.get(name) == b.get(name)
    configs = [(run / "config.yaml").read_text() for run in runs]
    assert configs[0] == configs[1].replace("exp_name: again", "exp_name: first")
    weights = [(run / "hf" / "step_1" / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]
    assert (runs[0] / "hf" / "step_1" / "tokenizer.json").exists()
    line = next(line for line in (first.stdout + first.stderr).splitlines() if line.startswith("[Step 1] KL"))
    assert "Reward: " in line and "Loss: " in line and "tokens/s" in line


def test_settings_algorithm_and_model_are_refused_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*toy_overrides(tmp_path), REWARD, "algorithm.epochs=0", "parallel.tensor=3", "exp_name=../elsewhere"]
    message = refused([*overrides, f"model.tokenizer_name_or_path={tmp_path}/no-tokenizer"], capsys, tmp_path)
    for part in ("algorithm.epochs=0", "parallel.tensor=3", "exp_name=../elsewhere", "model.tokenizer_name_or_path"):
        assert part in message, message


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*toy_overrides(tmp_path), REWARD]
    foreign = tmp_path / "outputs" / "default" / "thesis.tex"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("years of work")
    assert main(overrides) == 2
    assert "is no run of ours" in capsys.readouterr().err
    assert foreign.read_text() == "years of work"


def test_two_runs_never_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*toy_overrides(tmp_path), REWARD]
    lock = own_folder(tmp_path / "outputs" / "default")
    assert main(overrides) == 2
    assert "another run writes to" in capsys.readouterr().err
    lock.release()


def test_weights_that_cannot_be_read_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*toy_overrides(tmp_path), REWARD, "rollout.backend=hf"]
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    (code,) = run_ranks(1, main, overrides)
    assert code == 2
    assert not (tmp_path / "outputs" / "default").exists()
