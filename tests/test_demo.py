"""The parts of examples/demo.py that need no training. The whole demo is `make demo`, which checks itself."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from reasoning_gym import get_score_answer_fn
from transformers import AutoTokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module", autouse=True)
def examples_on_path() -> object:
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    arithmetic = importlib.import_module("arithmetic")
    arithmetic.write_data(folder / "data", train_rows=3400, heldout_rows=500, seed=3)
    (folder / "parameters").write_text(str(arithmetic.write_model(folder / "model", seed=3)))
    return folder


def rows(path: Path) -> list[dict]:
    return pa.ipc.open_stream(path).read_all().to_pylist()


def test_training_and_heldout_problems_are_all_different_and_right(inputs: Path) -> None:
    train = [row for path in sorted((inputs / "data").glob("train-*")) for row in rows(path)]
    heldout = rows(inputs / "data" / "heldout.arrow")
    assert (len(train), len(heldout)) == (3400, 500)
    assert len({row["prompt"] for row in train + heldout}) == 3900
    for row in train + heldout:
        assert re.fullmatch(r"\d[+-]\d[+-]\d=", row["prompt"])
        assert str(eval(row["prompt"][:-1])) == row["answer"] == row["reward_model"]["ground_truth"]


def test_reasoning_gyms_own_verifier_accepts_the_rows(inputs: Path) -> None:
    row = rows(inputs / "data" / "heldout.arrow")[0]
    info = row["extra_info"]
    entry = {"question": info["question"], "answer": row["answer"], "metadata": json.loads(info["metadata"])}
    score = get_score_answer_fn(info["source_dataset"])
    assert score(row["answer"], entry) == 1.0
    assert score(str(int(row["answer"]) + 1), entry) < 1.0


def test_tokenizer_that_transformers_loads_has_one_token_per_character(inputs: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    ids = tokenizer("7+9-3=")["input_ids"]
    assert len(ids) == 6 and [tokenizer.decode([token]) for token in ids] == list("7+9-3=")
    for text in ("7+9-3=13", "any other text, ä too\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<eos>"


def test_model_has_one_to_five_million_parameters_and_heads_that_vllm_takes(inputs: Path) -> None:
    # by hand: 258 x 128 embeddings; a layer has q, k, v with biases, o, three matrices of the MLP, two norms; one norm at the end
    layer = (128 * 128 + 128) + 2 * (128 * 64 + 64) + 128 * 128 + 3 * 128 * 512 + 2 * 128
    assert int((inputs / "parameters").read_text()) == 258 * 128 + 4 * layer + 128
    config = json.loads((inputs / "model" / "config.json").read_text())
    assert config["hidden_size"] // config["num_attention_heads"] == 32


def fake_run(folder: Path) -> Path:
    """Evaluations at 0, 2 and 4 with accuracy 1/4, 2/4 and 3/4; rewards 0.1 to 0.4."""
    (folder / "rollouts").mkdir(parents=True)
    lines = [{"step": step, "reward/mean": step / 10} for step in range(1, 5)] + [{"step": 4, "val/reward/mean": 0.9}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, right in ((0, 1), (2, 2), (4, 3)):
        scores = [1.0] * right + [0.5] * (4 - right)
        (folder / "rollouts" / f"step_{step}.jsonl").write_text("".join(json.dumps({"reward": score}) + "\n" for score in scores))
    (folder / "config.yaml").write_text("parallel: {tensor: 2, pipeline: 1}\nrollout: {tensor: 1, backend: vllm}\n")
    return folder


def test_curves_count_only_full_scores_as_solved(tmp_path: Path) -> None:
    report = importlib.import_module("demo_report")
    curves = report.read_curves(fake_run(tmp_path / "run"))
    assert curves.reward == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}
    assert curves.accuracy == {0: 0.25, 2: 0.5, 4: 0.75}
    assert (curves.before, curves.after) == (0.25, 0.75)
    assert report.layouts(tmp_path / "run", processes=2) == ("tensor 2 x pipeline 1 x data 1", "2 vllm replicas of tensor 1")


def test_table_has_the_mean_reward_between_evaluations_and_the_gain(tmp_path: Path) -> None:
    report = importlib.import_module("demo_report")
    table = report.curve_table(report.read_curves(fake_run(tmp_path / "run")), title="x")
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["0", "2", "4"], ["-", "0.15", "0.35"], ["25.0%", "50.0%", "75.0%"], ["-", "+25.0 points", "+50.0 points"]]


def test_picture_is_a_png_of_readable_size(tmp_path: Path) -> None:
    report = importlib.import_module("demo_report")
    path = tmp_path / "demo.png"
    report.draw(report.read_curves(fake_run(tmp_path / "run")), path, title="t", subtitle="s", accuracy_hf_export=0.75)
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")) == (1200, 720)


def test_demo_fails_when_a_promise_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    demo = importlib.import_module("demo")
    assert demo.verdict(gain=0.31, export_error=0.02) == 0
    assert demo.verdict(gain=0.2, export_error=0.0) == 1
    assert "rose by 20.0 points, 25 were expected" in capsys.readouterr().out
    assert demo.verdict(gain=0.31, export_error=0.03) == 1


def transformers_accuracy(folder: Path, some: list[dict]) -> float:
    return importlib.import_module("hf_accuracy").hf_accuracy(folder, some, max_response_length=5)


def test_accuracy_by_transformers_counts_what_the_model_says(inputs: Path) -> None:
    """An untrained model repeats itself, so rows whose truth is its own answer are solved and others are not."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(inputs / "model"), AutoTokenizer.from_pretrained(inputs / "model")
    row = rows(inputs / "data" / "heldout.arrow")[0]
    prompt = tokenizer([row["prompt"]], return_tensors="pt")
    ids = prompt["input_ids"]
    for _ in range(5):  # greedy, without generate()
        ids = ids.new_tensor([[*ids[0].tolist(), int(model(ids).logits[0, -1].argmax())]])
    said = tokenizer.decode(ids[0, 6:]).split("<eos>")[0].strip()
    own = row | {"reward_model": {"ground_truth": said}}
    assert transformers_accuracy(inputs / "model", [own, row]) == (0.5 if said != row["answer"] else 1.0)
