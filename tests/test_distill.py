"""Distillation of reward models: the loss by hand, scores against transformers on every layout, the command from files to folder.

Not covered: real models, bf16, kills in the middle of a run.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from ranks import run_ranks
from test_preferences import pairs_batch
from test_resume import records, run
from toy_task import EOS, toy_folder, toy_tokenizer, write_arrow

from tridentrl.algos.context import Denominators, MicroBatch
from tridentrl.algos.distill_rm import DistillRM, DistillRMConfig
from tridentrl.trainer.distill_command import agreement, main

ROOT = Path(__file__).parent.parent
SHORT = ["data.max_prompt_length=8", "rollout.max_response_length=8"]
LAYOUTS = {"tp2": ["parallel.tensor=2"], "pp2": ["parallel.pipeline=2"], "dp2": ["parallel.tensor=1"]}


def reward_folder(folder: Path, *, likes_letters: bool = False, **changes: Any) -> str:
    """A reward model on the toy tokenizer. `likes_letters`: all heads read the mean of the text, so that some letters make it like it."""
    config = transformers.Qwen2Config.from_pretrained(toy_folder(folder, **changes), num_labels=1)
    torch.manual_seed(7)
    model = transformers.Qwen2ForSequenceClassification(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" in name:
                parameter.normal_()
            elif likes_letters and any(part in name for part in ("q_proj", "k_proj", "down_proj")):
                parameter.zero_()
            elif "proj" in name or "score" in name:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return str(folder)


def pairs(count: int, *, seed: int) -> list[dict[str, str]]:
    generator = random.Random(seed)
    word = lambda: "".join(generator.choices(string.ascii_lowercase[:8], k=generator.randint(3, 6)))  # noqa: E731
    return [{"prompt": f"{number % 10}=", "chosen": word(), "rejected": word()} for number in range(count)]


def scores(folder: str | Path, rows: list[dict[str, str]]) -> torch.Tensor:
    """By transformers, of the chosen and the rejected text of each row, [rows, 2]."""
    model, tokenizer = transformers.AutoModelForSequenceClassification.from_pretrained(folder), toy_tokenizer()
    texts = [[*tokenizer(row["prompt"] + row[side])["input_ids"], EOS] for row in rows for side in ("chosen", "rejected")]
    with torch.no_grad():
        return torch.stack([model(torch.tensor([ids])).logits[0, 0] for ids in texts]).view(-1, 2)


def spearman(a: list[float], b: list[float]) -> float:
    """A rank is one more than the number of smaller values, ties in the middle of theirs."""
    first, second = ([sum(y < x for y in values) + (values.count(x) + 1) / 2 for x in values] for values in (a, b))
    return statistics.correlation(first, second)


# Numbers by hand


def test_the_loss_of_two_pairs_by_hand() -> None:
    algorithm = DistillRM(DistillRMConfig(margin_coef=0.5))
    algorithm.load_state_dict({"teacher": {}, "std": 2.0})
    values = torch.tensor([1.0, 0.0, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    batch = MicroBatch(
        torch.ones(4),
        torch.ones(4, dtype=torch.int64),
        {"teacher": torch.tensor([3.0, 1.0, 0.0, -1.0], dtype=torch.float64)},
        Denominators(tokens=8.0, sequences=8.0, longest=3),
    )
    loss, metrics = algorithm.loss(values, batch)
    squared = (2**2 + 1**2 + 1**2 + 1.5**2) / 2.0**2 / 8

    def entropy(wanted: float, margin: float) -> float:
        p = 1 / (1 + math.exp(-wanted))
        return p * math.log(1 + math.exp(-margin)) + (1 - p) * math.log(1 + math.exp(margin))

    assert loss.item() == pytest.approx(squared + 0.5 * (entropy(2.0, 1.0) + entropy(1.0, -1.5)) / 4, abs=1e-12)
    assert metrics["score_error"].item() == pytest.approx(squared)
    assert metrics["agreement"].item() == 1 / 4  # one of the two, of four pairs in all
    assert metrics["margin_entropy"].item() == pytest.approx((entropy(2.0, 1.0) + entropy(1.0, -1.5)) / 4)
    loss.backward()
    assert values.grad is not None
    sigma = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    pull = [0.5 / 4 * (sigma(margin) - sigma(wanted)) for margin, wanted in ((1.0, 2.0), (-1.5, 1.0))]
    errors = [2 * e / 4 / 8 for e in (-2, -1, -1, 1.5)]
    assert values.grad.tolist() == pytest.approx([errors[0] + pull[0], errors[1] - pull[0], errors[2] + pull[1], errors[3] - pull[1]])


def test_single_texts_have_no_margins() -> None:
    batch = pairs_batch({"teacher": torch.tensor([1.0, 2.0, 4.0])})
    loss, metrics = DistillRM(DistillRMConfig(pairs=False)).loss(torch.tensor([2.0, 2.0, 1.0]), batch)
    assert loss.item() == pytest.approx((1 + 0 + 9) / 8) and set(metrics) == {"score_error", "score", "teacher_score"}


def test_agreement_by_hand() -> None:
    teacher, student = np.array([3.0, 1.0, 2.0, 2.0, 0.0, 5.0]), np.array([1.0, 0.0, 4.0, -4.0, 2.0, 0.0])
    report = agreement(student, teacher, pairs=True)
    assert report["pairs"] == 2 and report["pairs_ranked_alike"] == 0.5  # the second pair is a tie for the teacher
    assert report["pearson"] == pytest.approx(statistics.correlation(student, teacher))
    assert report["spearman"] == pytest.approx(spearman(student.tolist(), teacher.tolist()))
    assert (report["teacher_mean"], report["student_std"]) == (pytest.approx(13 / 6), pytest.approx(np.std(student)))
    flat = agreement(np.zeros(2), np.ones(2), pairs=True)
    assert flat["pearson"] is flat["spearman"] is flat["pairs_ranked_alike"] is None and flat["pairs"] == 0


# Runs


def test_scores_are_those_of_transformers_on_every_layout_and_the_teacher_is_asked_once(tmp_path: Path) -> None:
    rows = pairs(8, seed=1)
    student, teacher = reward_folder(tmp_path / "student"), reward_folder(tmp_path / "teacher", hidden_size=256, likes_letters=True)
    common = [
        "algorithm.name=distill_rm",
        f"model.actor_pretrained_model_name_or_path={student}",
        f"model.teacher_pretrained_model_name_or_path={teacher}",
        f"data.train_files={write_arrow(tmp_path / 'pairs.arrow', rows)}",
        *SHORT,
        "data.chosen_key=chosen",
        "data.rejected_key=rejected",
        "data.shuffle=false",
        "data.train_batch_size=4",
        f"output_dir={tmp_path / 'outputs'}",
        "trainer.total_steps=4",
        "trainer.save_interval=2",
        "trainer.loggers=[jsonl]",
        "optimizer.eps=1e-5",
        "optimizer.lr=1e-4",
    ]
    for name, layout in LAYOUTS.items():
        run_ranks(2, run, [*common, *layout, f"exp_name={name}"])
    for stop in (2, None):
        run_ranks(2, run, [*common, *LAYOUTS["dp2"], "exp_name=parts"], stop)
    mine, wanted = scores(student, rows).double(), scores(teacher, rows).double()
    lines = {name: records(tmp_path / "outputs" / name) for name in (*LAYOUTS, "parts")}
    first = lines["dp2"][0]
    assert first["reward_model/score_error"] == pytest.approx(((mine[:4] - wanted[:4]) / wanted[:4].std()).square().mean().item(), rel=1e-4)
    assert first["reward_model/score"] == pytest.approx(mine[:4].mean().item(), abs=1e-4)
    assert lines["dp2"][1]["reward_model/teacher_score"] == pytest.approx(wanted[4:].mean().item(), abs=1e-4)
    state = torch.load(tmp_path / "outputs" / "dp2" / "checkpoints" / "step_4" / "trainer.pt", weights_only=True)["algorithm_state"]
    assert state["std"] == pytest.approx(wanted.std().item(), rel=1e-5)  # of all sixteen texts, each counted once
    assert state["teacher"][5] == pytest.approx(wanted[5].tolist(), abs=1e-4)
    raw = [json.loads(line) for line in (tmp_path / "outputs" / "dp2" / "metrics.jsonl").read_text().splitlines()]
    assert ["timing_s/values" in line for line in raw] == [True, True, False, False]
    compared = ["reward_model/loss", "reward_model/score_error", "reward_model/margin_entropy", "reward_model/grad_norm"]
    for name in ("tp2", "pp2"):
        for line, expected in zip(lines[name], lines["dp2"], strict=True):
            assert [line[key] for key in compared] == pytest.approx([expected[key] for key in compared], rel=1e-3), name
    assert lines["parts"] == lines["dp2"]


def test_a_student_a_quarter_of_the_size_ranks_held_out_pairs_as_its_teacher(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    teacher = reward_folder(tmp_path / "teacher", likes_letters=True)
    student = toy_folder(tmp_path / "student", hidden_size=64, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)
    config = transformers.Qwen2Config.from_pretrained(student)
    transformers.Qwen2ForCausalLM(config).float().save_pretrained(student)  # weights of the usual size learn faster than the toy's
    held_out, output = pairs(100, seed=2), tmp_path / "new" / "small"
    argv = [
        *("--teacher_model", teacher, "--student-model", student, "--output_dir", str(output)),
        *("--train_files", write_arrow(tmp_path / "train.arrow", pairs(600, seed=1))),
        *("--val-files", write_arrow(tmp_path / "val.arrow", held_out)),
        *("--lr", "2e-3", "trainer.epochs=null", "trainer.total_steps=100", "optimizer.schedule=linear", *SHORT),
    ]
    assert run_ranks(1, main, argv) == [0]
    report = json.loads((output / "distill.json").read_text())
    theirs, mine = scores(teacher, held_out).double(), scores(output, held_out).double()
    alike = ((theirs[:, 0] > theirs[:, 1]) == (mine[:, 0] > mine[:, 1])).double().mean().item()
    assert alike == report["pairs_ranked_alike"] >= 0.9 and report["pairs"] == 100 and report["texts"] == 200
    assert report["pearson"] == pytest.approx(statistics.correlation(mine.flatten().tolist(), theirs.flatten().tolist()), abs=1e-4)
    assert report["spearman"] == pytest.approx(spearman(mine.flatten().tolist(), theirs.flatten().tolist()), abs=1e-3)
    assert report["student_mean"] == pytest.approx(mine.mean().item(), abs=1e-4)
    assert report["student_mean"] == pytest.approx(report["teacher_mean"], abs=0.1 * report["teacher_std"])
    assert f"pairs ranked alike   {alike:.3f} of 100" in capfd.readouterr().out
    assert [path.name for path in output.parent.iterdir()] == ["small"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "distill.json", "metrics.jsonl"} <= {p.name for p in output.iterdir()}


def test_texts_without_a_partner_and_a_held_out_share_of_them(tmp_path: Path) -> None:
    rows = [{"question": row["prompt"], "answer": row["chosen"], "n": number} for number, row in enumerate(pairs(21, seed=1))]
    argv = [
        *("--teacher_model", reward_folder(tmp_path / "teacher"), "--student_model", toy_folder(tmp_path / "student", num_hidden_layers=2)),
        *("--output_dir", str(tmp_path / "out"), "--train_files", write_arrow(tmp_path / "train.arrow", rows)),
        *("--prompt_key", "question", "--response_key", "answer", "--val_share", "0.2", "--batch_size", "8", "--pipeline", "2", *SHORT),
    ]
    assert run_ranks(2, main, argv) == [0, 0]
    report = json.loads((tmp_path / "out" / "distill.json").read_text())
    assert report["texts"] == 5 and report["steps"] == 2 and "pairs" not in report  # ceil(0.2 x 21), and 16 rows in batches of 8


# What is refused


def test_what_cannot_be_distilled_is_one_message_and_leaves_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    teacher, student = reward_folder(tmp_path / "teacher"), toy_folder(tmp_path / "student")
    words = reward_folder(tmp_path / "words")
    tokenizer = json.loads((tmp_path / "words" / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["3"], vocab["4"] = vocab["4"], vocab["3"]
    (tmp_path / "words" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "there").mkdir()
    good = {
        "teacher_model": teacher,
        "student_model": student,
        "output_dir": str(tmp_path / "out"),
        "train_files": write_arrow(tmp_path / "train.arrow", pairs(8, seed=1)),
        "val_share": "0",
    }
    before = sorted(tmp_path.iterdir())
    for changes, message in [
        ({"teacher_model": student}, f"the pretrained teacher: {student} has no head that scores (score.weight)"),
        ({"teacher_model": words}, f"the teacher {words} has another tokenizer than the student"),
        ({"output_dir": str(tmp_path / "there")}, f"--output_dir={tmp_path / 'there'} exists already"),
        ({"train_files": str(tmp_path / "none.arrow")}, "data.train_files"),
        ({"rejected_key": "worse"}, "data.rejected_key"),
        ({"tensor": "3"}, "parallel.tensor=3"),
    ]:
        argv = [text for name, value in {**good, **changes}.items() for text in (f"--{name}", value)] + SHORT
        assert run_ranks(1, main, argv) == [2]
        errors = capfd.readouterr().err
        assert errors.count("error:") == 1 and message in errors, errors
        assert sorted(tmp_path.iterdir()) == before
    (tmp_path / ".out.incomplete").mkdir()
    assert run_ranks(1, main, [text for name, value in good.items() for text in (f"--{name}", value)] + SHORT) == [2]
    assert "another distillation writes there now" in capfd.readouterr().err


def test_the_tool_is_the_command(tmp_path: Path) -> None:
    flags = ["--teacher-model=t", "--student_model=s", f"--output-dir={tmp_path}", "--train-files=f"]
    done = subprocess.run([sys.executable, ROOT / "tools" / "rm_distill.py", *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr == f"error: --output_dir={tmp_path} exists already; give another folder, or remove it\n"
