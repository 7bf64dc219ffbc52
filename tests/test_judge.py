"""Models that score: against transformers on every layout, beside functions, scaled and clipped, and what is refused."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks import run_ranks
from test_per_task import refused
from test_resume import common, records, run
from toy_task import EOS, toy_folder, toy_rows, toy_tokenizer, write_arrow

from tridentrl.configs.schema import RewardConfig
from tridentrl.trainer.judge import Judge, RunningScale

GRPO = ["algorithm.name=grpo", "algorithm.group_size=2", "algorithm.beta=0"]


def scoring_folder(folder: Path, *, labels: int = 1, seed: int = 3) -> str:
    """A sequence classification model of the toy task's family, its head far from zero."""
    config = transformers.Qwen2Config.from_pretrained(toy_folder(folder), num_labels=labels)
    torch.manual_seed(seed)
    model = transformers.Qwen2ForSequenceClassification(config).float()
    with torch.no_grad():
        model.score.weight.mul_(20)
    model.save_pretrained(folder)
    return str(folder)


def base(folder: Path) -> list[str]:
    """Two sources: a model scores `math`, the function of `common` scores `sums`."""
    settings = [item for item in common(folder) if not item.startswith(("data.train_files", "data.val_files", "reward."))]
    files = {}
    for split, count in (("train", 12), ("val", 6)):
        rows = [{**row, "data_source": "math" if number % 2 else "sums"} for number, row in enumerate(toy_rows(count, seed=len(split)))]
        files[split] = write_arrow(folder / f"two-{split}.arrow", rows)
    return [
        *settings,
        *GRPO,
        f"data.train_files={files['train']}",
        f"data.val_files={files['val']}",
        "reward.workers=1",
        "reward.by_source={sums: exact_match}",
        f"reward.models={{math: {scoring_folder(folder / 'scores')}}}",
        "trainer.eval_at_start=true",
        "trainer.total_steps=2",
    ]


def scores(folder: Path, rows: list[dict[str, Any]]) -> list[float]:
    """What transformers says of prompt and response, end-of-sequence token included."""
    model, tokenizer = transformers.AutoModelForSequenceClassification.from_pretrained(folder), toy_tokenizer()
    result = []
    for row in rows:
        ids = tokenizer(row["prompt"] + row["response"])["input_ids"] + ([] if row["truncated"] else [EOS])
        with torch.no_grad():
            result.append(model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1]).item())
    return result


def test_a_model_scores_its_source_as_transformers_does_and_functions_the_others(tmp_path: Path) -> None:
    settings, outputs = base(tmp_path), tmp_path / "outputs"
    layouts = {"tp2": ["parallel.tensor=2"], "pp2": ["parallel.pipeline=2"], "dp2": ["parallel.tensor=1"]}
    for name, layout in layouts.items():
        run_ranks(2, run, [*settings, *layout, "parallel.offload=all", f"exp_name={name}"])
    rows = [json.loads(line) for line in (outputs / "dp2" / "rollouts" / "step_0.jsonl").read_text().splitlines()]
    math_rows = [row for row in rows if row["data_source"] == "math"]
    assert [row["reward"] for row in math_rows] == pytest.approx(scores(tmp_path / "scores", math_rows), abs=1e-4)
    assert {row["reward"] for row in rows if row["data_source"] == "sums"} <= {0.0, 1.0}
    assert statistics.pstdev(row["reward"] for row in math_rows) > 0.1
    lines = {name: records(outputs / name) for name in layouts}
    assert lines["dp2"][0]["val/reward/math"] == pytest.approx(statistics.mean(row["reward"] for row in math_rows))
    assert "timing_s/reward_model" in json.loads((outputs / "dp2" / "metrics.jsonl").read_text().splitlines()[1])
    for name in ("tp2", "pp2"):
        for one, other in zip(lines[name], lines["dp2"], strict=True):
            names = [key for key in ("reward/mean", "reward/std", "val/reward/mean", "actor/grad_norm") if key in other]
            assert [one[key] for key in names] == pytest.approx([other[key] for key in names], rel=1e-3), name


def test_scores_are_scaled_by_all_so_far_then_clipped_and_a_resume_goes_on_with_that(tmp_path: Path) -> None:
    settings, outputs = [*base(tmp_path), "reward.normalize=true", "reward.clip=[-0.5,0.75]", "trainer.total_steps=4"], tmp_path / "outputs"
    settings.append("data.shuffle=false")
    dp2 = "parallel.tensor=1"
    run_ranks(2, run, [*settings, dp2, "exp_name=straight"])
    run_ranks(2, run, [*settings, dp2, "exp_name=parts"], 3)
    run_ranks(2, run, [*settings, dp2, "exp_name=parts"])
    straight, parts = records(outputs / "straight"), records(outputs / "parts")
    assert straight == parts
    assert straight[0]["val/reward/math"] != 0 and max(line.get("reward/max", 0.0) for line in straight) > 0.75  # as they were given
    state = torch.load(outputs / "straight" / "checkpoints" / "step_4" / "trainer.pt", weights_only=True)
    assert state["context"]["scales"]["reward"]["math"]["count"] == 4 * 2 * 2


def test_running_scale_is_that_of_all_scores_together() -> None:
    parts = [torch.tensor([3.0]), torch.tensor([]), torch.tensor([4.0, 10.0, -2.5]), torch.tensor([100.0, 7.0])]
    scale = RunningScale()
    assert scale.scaled(torch.tensor([5.0])).tolist() == [5.0]
    scale.add(parts[0])
    assert scale.scaled(torch.tensor([5.0])).tolist() == [2.0]
    for part in parts[1:]:
        scale.add(part)
    every = torch.cat(parts).double()
    assert scale.mean == pytest.approx(every.mean().item()) and scale.count == 6
    assert scale.scaled(torch.tensor([9.0])).item() == pytest.approx((9 - every.mean().item()) / every.std().item())
    assert math.isnan(scale.scaled(torch.tensor([torch.nan])).item())


def test_what_training_sees_of_scores() -> None:
    rewards, sources = torch.tensor([4.0, 1.0, 8.0, torch.nan, -3.0]), ["math", "sums", "math", "math", "sums"]
    judge = Judge("reward", RewardConfig(normalize=True, clip=(-0.5, 0.9)), None, {"math": None})  # type: ignore[arg-type,dict-item]
    seen = judge.adjusted(rewards, sources)
    # Of the model: mean 6 and standard deviation sqrt(8), so -0.7071 and 0.7071; then all within -0.5 and 0.9.
    assert seen.tolist() == pytest.approx([-0.5, 0.9, 0.7071068, math.nan, -0.5], nan_ok=True)
    assert rewards[0] == 4.0
    # The next batch is scaled by all three.
    assert judge.adjusted(torch.tensor([7.0]), ["math"]).item() == pytest.approx((7 - 19 / 3) / statistics.stdev([4, 8, 7]))


def test_models_that_cannot_score_are_refused_by_name(tmp_path: Path) -> None:
    settings = base(tmp_path)
    others = {
        "two": scoring_folder(tmp_path / "two", labels=2),
        "language": toy_folder(tmp_path / "language"),
        "words": scoring_folder(tmp_path / "words"),
    }
    tokenizer = json.loads((tmp_path / "words" / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["3"], vocab["4"] = vocab["4"], vocab["3"]
    (tmp_path / "words" / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name, words in {
        "two": "score.weight",
        "language": "it has no head that scores (score.weight); give a sequence classification model with one label",
        "words": "has another tokenizer than the policy",
    }.items():
        message = run_ranks(1, refused, [*settings, f"reward.models={{math: {others[name]}}}"])[0]
        assert others[name] in message and words in message, message
    for changes, words in [
        (["reward.models={math: /no/such}"], "reward.models.math=/no/such: no such folder"),
        (["reward.models={}"], "no reward function for these values"),
        (["reward.clip=[1,0]"], "reward.clip=[1.0, 0.0]: the first is the lowest score"),
        (
            ["parallel.tensor=1", f"reward.models={{math: {toy_folder(tmp_path / 'deep', num_hidden_layers=3)}}}", "parallel.pipeline=2"],
            "3 layers",
        ),
    ]:
        settings_now = [item for item in settings if not (changes[0].startswith("reward.models") and item.startswith("reward.models"))]
        assert words in run_ranks(1, refused, [*settings_now, *changes])[0]
