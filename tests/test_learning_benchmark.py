"""The parts of benchmarks/learning.py that need no training. The whole of it is `make test-learning`, which checks itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers

from tridentrl.algos import get_algorithm_registry
from tridentrl.configs.load import load_config
from tridentrl.trainer.phases import planned_phases

ROOT = Path(__file__).parents[1]
FOLDERS = [str(ROOT / "examples"), str(ROOT / "benchmarks")]
sys.path[:0] = FOLDERS
try:
    from arithmetic import problems, write_model
    from learning import COST, COST_LIMIT, MARGIN, Result, broken_promises, error_of_gain, run_names, settings_of
    from learning_pairs import pair_log_ratios, pair_scores, write_pairs
    from learning_report import table
    from learning_scores import coin, forbidden_digit
finally:
    del sys.path[: len(FOLDERS)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = problems(seed=3)
    write_pairs(path, [next(rows) for _ in range(40)], seed=3)
    return path


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def result(name: str, start: float, end: float, *, error: float = 0.02, **extra: list[float]) -> Result:
    return Result(name=name, accuracy={0: start, 30: end}, error=error, seconds=1.0, extra=extra)


@pytest.mark.parametrize("name", run_names())
def test_every_run_has_settings_that_its_algorithm_takes_and_the_same_sizes(name: str) -> None:
    config = load_config([*settings_of(name), "output_dir=x"], ROOT / "benchmarks" / "learning.yaml")
    (phase,) = planned_phases(config.algorithm)
    algorithm = phase.algorithm
    assert type(algorithm) is get_algorithm_registry()["grpo" if name == "coin" else name]
    steps = 200 if name == "reward_model" else 30
    assert (config.data.train_batch_size, config.trainer.total_steps, algorithm.config.mini_batch_size) == (128, steps, 256)
    assert algorithm.samples_per_prompt == (4 if algorithm.online else 2)


def test_pairs_are_a_right_and_a_near_sum(pairs: Path) -> None:
    for row in rows_of(pairs):
        assert int(row["chosen"]) == eval(row["prompt"][:-1])
        assert 1 <= abs(int(row["rejected"]) - int(row["chosen"])) <= 3


def test_log_ratios_are_those_of_single_rows_without_padding(tmp_path: Path, pairs: Path) -> None:
    write_model(tmp_path / "model", seed=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")

    def logprob(prompt: str, response: str) -> float:
        start, ids = tokenizer(prompt)["input_ids"], [*tokenizer(prompt + response)["input_ids"], tokenizer.eos_token_id]
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(logprobs[place - 1, ids[place]].item() for place in range(len(start), len(ids)))

    expected = [logprob(row["prompt"], row["chosen"]) - logprob(row["prompt"], row["rejected"]) for row in rows_of(pairs)]
    assert len({len(row["chosen"]) for row in rows_of(pairs)}) > 1  # so that something is padded
    assert pair_log_ratios(tmp_path / "model", pairs) == pytest.approx(expected, abs=1e-4)


def test_scores_are_those_of_the_last_token_without_padding(tmp_path: Path, pairs: Path) -> None:
    write_model(tmp_path / "model", seed=3)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")

    def score(text: str) -> float:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        return model.score(model.model(ids).last_hidden_state[0, -1]).item()

    expected = [score(row["prompt"] + row["chosen"]) - score(row["prompt"] + row["rejected"]) for row in rows_of(pairs)]
    assert pair_scores(tmp_path / "model", pairs) == pytest.approx(expected, abs=1e-5)


def test_standard_error_of_a_gain_by_hand() -> None:
    """Gains 1, 1, 0, 0: mean 1/2, variance 1/3, over 4 rows 1/12. Equal gains have none, however large."""
    assert error_of_gain([0, 0, 1, 0], [1, 1, 1, 0]) == pytest.approx((1 / 12) ** 0.5)
    assert error_of_gain([0, 0, 0], [1, 1, 1]) == 0


def test_what_counts_as_learning() -> None:
    assert not broken_promises(result("grpo", 0.4, 0.6))
    assert broken_promises(result("grpo", 0.4, 0.49)) == ["grpo: rose by 9.0%, at least 15.0% was expected"]
    assert broken_promises(result("grpo", 0.4, 0.56, error=0.05)) == ["grpo: rose by 16.0%, at least 20.0% was expected"]
    assert not broken_promises(result("coin", 0.4, 0.45))
    assert broken_promises(result("coin", 0.4, 0.6)) == ["coin: rose by 20.0% although its reward is a coin; below 15.0% was expected"]
    assert broken_promises(result("reward_model", 0.5, 0.8)) == [
        "reward_model: ranks 80.0% of held-out pairs right, at least 90% was expected"
    ]
    assert not broken_promises(result("dpo", 0.8, 0.9, **{MARGIN: [1.0, 2.0]}))
    assert broken_promises(result("dpo", 0.8, 0.9, **{MARGIN: [2.0, 2.0]})) == ["dpo: the margin of held-out pairs did not rise"]
    assert not broken_promises(result("safe_rlhf", 0.4, 0.6, **{COST: [0.2, COST_LIMIT]}))
    assert broken_promises(result("safe_rlhf", 0.4, 0.6, **{COST: [0.2, 0.1]})) == [
        "safe_rlhf: held-out cost ended at 0.100, its limit is 0.05"
    ]


def test_a_line_of_the_table() -> None:
    last = table([result("grpo", 0.426, 0.75, error=0.0243, **{"held-out cost": [0.2, 0.1]})]).splitlines()[-1]
    assert last == "| grpo | 42.6% | 75.0% | +32.4 | 2.4 | 30 | 1 | held-out cost 0.200 to 0.100 |"


def test_scores_by_hand() -> None:
    assert [forbidden_digit(text) for text in ("12", "-2", "11", "")] == [1.0, 1.0, 0.0, 0.0]
    tosses = [coin(f"{a}+{b}=", str(answer)) for a in range(10) for b in range(10) for answer in range(10)]
    assert set(tosses) == {0.0, 1.0} and 450 < sum(tosses) < 550
