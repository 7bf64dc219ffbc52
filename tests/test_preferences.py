"""Preference pairs from files to DPO and reward models: against transformers, hand numbers and other layouts."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from datafiles import turn, write
from ranks import run_ranks
from test_data_prompts import dataset, rows_of
from toy_task import EOS, toy_overrides, toy_rows, toy_tokenizer

from tridentrl.algos.context import Denominators, MicroBatch
from tridentrl.algos.dpo import DPO, DPOConfig
from tridentrl.algos.reward_model import RewardModel, RewardModelConfig
from tridentrl.configs.convert import ConfigError
from tridentrl.configs.load import load_config
from tridentrl.trainer.rl_trainer import RLTrainer
from tridentrl.trainer.world import world_from_torchrun

# Files

KEYS = {"chosen_key": "chosen", "rejected_key": "rejected"}
ASK = [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]


def test_the_three_forms_of_a_pair_give_the_same_ids(tmp_path: Path) -> None:
    good, bad = turn("assistant", "d a"), turn("assistant", "b")
    rows = {
        "strings": {"prompt": ASK, "chosen": "d a", "rejected": "b"},
        "answers": {"prompt": ASK, "chosen": [good], "rejected": [bad]},
        "conversations": {"chosen": [*ASK, good], "rejected": [*ASK, bad]},
        "both": {"prompt": "c", "chosen": [*ASK, good], "rejected": [*ASK, bad]},
    }
    for name, row in rows.items():
        (pair,) = rows_of(dataset(write(tmp_path / f"{name}.parquet", [row]), **KEYS))
        # <user> a <end> <assistant> b <end> <user> c <end> <assistant>, then the words of an answer and </s>
        assert pair.prompt_ids == [3, 6, 5, 4, 7, 5, 3, 8, 5, 4], name
        assert pair.pair_ids == ([9, 6, 2], [7, 2]), name


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "row 1 of .*a response must have text, got ''"),
        ({"prompt": "a", "chosen": [], "rejected": [turn("assistant", "b")]}, "row 1 of .*a response is a string or a list of messages"),
        (
            {"prompt": "a", "chosen": [turn("user", "b")], "rejected": [turn("assistant", "b")]},
            "row 1 .*must be the assistant's, .* 'user'",
        ),
        ({"chosen": [turn("assistant", "b")], "rejected": [turn("assistant", "c")]}, "row 1 of .*there is no prompt"),
        (
            {"chosen": [turn("user", "a"), turn("assistant", "b")], "rejected": [turn("user", "b"), turn("assistant", "b")]},
            "row 1 of .*the messages before the two answers differ",
        ),
    ],
)
def test_a_pair_that_is_none_is_named_with_its_row(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    text = isinstance(row["chosen"], str)
    fine = (
        {"chosen": "b", "rejected": "c"} if text else {name: [turn("user", "a"), turn("assistant", "b")] for name in ("chosen", "rejected")}
    )
    path = write(tmp_path / "pairs.jsonl", [{**row, **fine}, row])
    with pytest.raises(ValueError, match=words):
        dataset(path, apply_chat_template=True, **KEYS)


# Losses by hand


def pairs_batch(fields: dict[str, torch.Tensor]) -> MicroBatch:
    """Two pairs, responses of 3 and 1, 2 and 2 tokens; of four pairs in all."""
    return MicroBatch(
        response_mask=torch.ones(8),
        lengths=torch.tensor([3, 1, 2, 2]),
        fields=fields,
        denominators=Denominators(tokens=16.0, sequences=8.0, longest=3),
    )


LOGPROBS = torch.tensor([-1.0, -2.0, -0.5, -4.0, -1.5, -0.25, -0.75, -2.0])
REFERENCE = torch.tensor([-4.0, -4.0, -4.0, -3.0, -2.0, -2.0, -1.0, -1.0])
"""Of the whole response, at each of its tokens."""
MARGINS = [0.5 * ((-3.5 + 4.0) - (-4.0 + 3.0)), 0.5 * ((-1.75 + 2.0) - (-2.75 + 1.0))]
"""beta 0.5 times the difference of log-ratios: 0.75 and 1.0."""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, sum(math.log(1 + math.exp(-h)) for h in MARGINS) / 4),
        ({"label_smoothing": 0.1}, sum(0.9 * math.log(1 + math.exp(-h)) + 0.1 * math.log(1 + math.exp(h)) for h in MARGINS) / 4),
        ({"loss_type": "ipo"}, sum((h / 0.5 - 1.0) ** 2 for h in MARGINS) / 4),
    ],
)
def test_dpo_losses_are_those_of_the_papers(changes: dict[str, Any], expected: float) -> None:
    logprobs = LOGPROBS.double().requires_grad_()
    loss, metrics = DPO(DPOConfig(beta=0.5, **changes)).loss(logprobs, torch.zeros(8), pairs_batch({"reference": REFERENCE.double()}))
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert metrics["reward_margin"].item() == pytest.approx(sum(MARGINS) / 4)
    assert metrics["reward_chosen"].item() == pytest.approx((0.25 + 0.125) / 4)
    assert metrics["reward_accuracy"].item() == 2 / 4
    assert metrics["logprob_chosen"].item() == pytest.approx((-3.5 - 1.75) / 4)
    loss.backward()
    assert logprobs.grad is not None
    if not changes:
        pull = [-0.5 / (1 + math.exp(h)) / 4 for h in MARGINS]  # eq. 7: the chosen up, the rejected down, by sigma(-h)
        assert logprobs.grad.tolist() == pytest.approx([pull[0]] * 3 + [-pull[0]] + [pull[1]] * 2 + [-pull[1]] * 2)


def test_without_a_reference_its_log_probs_count_as_zero() -> None:
    loss, _ = DPO(DPOConfig(beta=0.5, reference_free=True)).loss(LOGPROBS, torch.zeros(8), pairs_batch({}))
    assert loss.item() == pytest.approx(sum(math.log(1 + math.exp(-h)) for h in (0.25, 0.5)) / 4)


def test_three_tokens_of_a_flat_model_of_eight_words_and_an_untrained_policy() -> None:
    flat = torch.full((8,), -math.log(8))
    sums = torch.tensor([3.0, 3, 3, 1, 2, 2, 2, 2]) * -math.log(8)
    loss, metrics = DPO().loss(flat, torch.zeros(8), pairs_batch({"reference": sums}))
    assert metrics["logprob_chosen"].item() * 4 == pytest.approx(-6.238325 - 2 * math.log(8))
    assert (loss * 2).item() == pytest.approx(0.693147)
    assert metrics["reward_chosen"] == metrics["reward_rejected"] == 0


def test_reward_model_loss_by_hand() -> None:
    scores = torch.tensor([2.0, 1.0, -1.0, 0.5])
    batch = MicroBatch(torch.ones(4), torch.ones(4, dtype=torch.int64), {}, Denominators(tokens=8.0, sequences=8.0, longest=3))
    loss, metrics = RewardModel(RewardModelConfig(center_coef=0.01)).loss(scores, batch)
    expected = math.log(1 + math.exp(-1.0)) + math.log(1 + math.exp(1.5)) + 0.01 * (9 + 0.25)
    assert loss.item() == pytest.approx(expected / 4)
    assert {name: value.item() * 4 for name, value in metrics.items()} == pytest.approx(
        {"score_chosen": 1.0, "score_rejected": 1.5, "margin": -0.5, "accuracy": 1.0}
    )


# Runs


def overrides(folder: Path) -> list[str]:
    """Pairs of a right and a wrong sum."""
    rows = [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": str(sum(row["extra_info"]["terms"]) + 10 * (1 + number % 3))}
        for number, row in enumerate(toy_rows(8, seed=1))
    ]
    return [
        *[item for item in toy_overrides(folder) if not item.startswith(("data.train_files", "data.val_files", "data.answer_key"))],
        f"data.train_files={write(folder / 'pairs.arrow', rows)}",
        "data.chosen_key=chosen",
        "data.rejected_key=rejected",
        "data.shuffle=false",
        "trainer.save_interval=null",
        "trainer.eval_interval=null",
    ]


LAYOUTS = {"alone": (1, []), "tp2": (2, ["parallel.tensor=2"]), "pp2": (2, ["parallel.pipeline=2"]), "dp2": (2, ["parallel.tensor=1"])}


def train(settings: list[str]) -> None:
    RLTrainer(load_config(settings), world_from_torchrun(os.environ)).run()


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def pair_tokens(folder: Path, rows: range) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompt, chosen and rejected ids."""
    import pyarrow as pa

    tokenizer, table = toy_tokenizer(), pa.ipc.open_file(str(folder / "pairs.arrow")).read_all().to_pylist()
    encode = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
    return [(encode(table[i]["prompt"]), [*encode(table[i]["chosen"]), EOS], [*encode(table[i]["rejected"]), EOS]) for i in rows]


def test_dpo_is_that_of_transformers_on_every_layout_and_asks_the_reference_once(tmp_path: Path) -> None:
    common = [*overrides(tmp_path), "algorithm.name=dpo", "trainer.total_steps=4", "trainer.gradient_clip_val=1e9"]
    for name, (world, layout) in LAYOUTS.items():
        run_ranks(world, train, [*common, *layout, f"exp_name={name}"])
    run_ranks(1, train, [*common, "trainer.micro_batch_tokens=24", "exp_name=small"])
    alone = records(tmp_path / "outputs" / "alone")

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").double()
    sums = []
    for prompt, *responses in pair_tokens(tmp_path, range(4)):
        for response in responses:
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
            sums.append(logits.log_softmax(-1)[range(len(response)), response].sum())
    chosen, rejected = torch.stack(sums).view(-1, 2).unbind(1)
    margins = 0.1 * ((chosen - chosen.detach()) - (rejected - rejected.detach()))
    (-F.logsigmoid(margins).mean()).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert alone[0]["actor/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert alone[0]["actor/reward_margin"] == pytest.approx(0, abs=1e-6)
    assert alone[0]["actor/logprob_chosen"] == pytest.approx(chosen.mean().item(), abs=1e-4)
    assert alone[0]["actor/logprob_rejected"] == pytest.approx(rejected.mean().item(), abs=1e-4)
    assert alone[0]["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)

    # The rows come round in steps 3 and 4; by then they have been learned from.
    assert [("timing_s/ref" in record) for record in alone] == [True, True, False, False]
    assert alone[2]["actor/reward_margin"] > 0.01 and alone[3]["actor/loss"] < alone[1]["actor/loss"] < math.log(2) + 1e-6
    compared = ["actor/loss", "actor/reward_margin", "actor/reward_accuracy", "actor/logprob_rejected", "actor/grad_norm"]
    for name in (*list(LAYOUTS)[1:], "small"):
        for record, expected in zip(records(tmp_path / "outputs" / name), alone, strict=True):
            assert {key: record[key] for key in compared} == pytest.approx({key: expected[key] for key in compared}, rel=2e-4, abs=1e-5), (
                name
            )


def test_a_reward_model_learns_to_rank_and_is_saved_as_transformers_reads_it(tmp_path: Path) -> None:
    common = [*overrides(tmp_path), "algorithm.name=reward_model", "trainer.total_steps=12", "optimizer.lr=1e-3"]
    for name in ("alone", "pp2"):
        world, layout = LAYOUTS[name]
        run_ranks(world, train, [*common, *layout, f"exp_name={name}"])
    alone = records(tmp_path / "outputs" / "alone")

    def scores(folder: Path) -> torch.Tensor:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
        with torch.no_grad():
            return torch.stack(
                [
                    model(torch.tensor([[*prompt, *response]])).logits[0, 0]
                    for prompt, *responses in pair_tokens(tmp_path, range(8))
                    for response in responses
                ]
            ).view(-1, 2)

    trained = tmp_path / "outputs" / "alone" / "hf" / "step_12"
    config = json.loads((trained / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    ranked = scores(trained)
    assert alone[-1]["reward_model/loss"] < 0.5 * alone[0]["reward_model/loss"]
    assert (ranked[:, 0] > ranked[:, 1]).float().mean() == 1.0

    # One more step from there: the numbers it reports are those of the folder.
    again = [*overrides(tmp_path), "algorithm.name=reward_model", "trainer.total_steps=1", "exp_name=again"]
    run_ranks(2, train, [*again, f"model.reward_model_pretrained_model_name_or_path={trained}", "parallel.tensor=1"])
    (record,) = records(tmp_path / "outputs" / "again")
    first = ranked[:4]
    assert record["reward_model/score_chosen"] == pytest.approx(first[:, 0].mean().item(), abs=1e-4)
    assert record["reward_model/loss"] == pytest.approx(-F.logsigmoid(first[:, 0] - first[:, 1]).mean().item(), abs=1e-4)
    for one, other in zip(records(tmp_path / "outputs" / "pp2")[:4], alone[:4], strict=True):
        assert one["reward_model/loss"] == pytest.approx(other["reward_model/loss"], rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["algorithm.name=dpo"], "algorithm.name=dpo learns from data.chosen_key and data.rejected_key"),
        (["algorithm.name=sft"], "algorithm.name=sft learns from data.response_key"),
        (["data.chosen_key=good"], "data.chosen_key=good without data.rejected_key: a pair has two responses"),
        (["algorithm.name=dpo", "algorithm.mini_batch_size=3"], "algorithm.mini_batch_size=3: it counts responses, two to a pair"),
        (["algorithm.name=dpo", "algorithm.label_smoothing=0.5"], "algorithm.label_smoothing=0.5: from 0.5 on"),
        (["algorithm.name=dpo", "algorithm.loss_type=ipo", "algorithm.label_smoothing=0.1"], "ipo has no such term"),
        (["algorithm.name=distill_rm", "algorithm.mini_batch_size=3"], "algorithm.mini_batch_size=3: it counts responses, two to a pair"),
        (["algorithm.name=distill_rm"], "model.teacher_pretrained_model_name_or_path=null: there is no reward model to learn from"),
        (["algorithm.name=distill_rm", "algorithm.pairs=false"], "algorithm.name=distill_rm learns from data.response_key"),
        (["algorithm.name=distill_rm", "algorithm.margin_coef=-1"], "algorithm.margin_coef=-1"),
        (["algorithm.name=dpo", "algorithm.gamma=1"], "unknown key algorithm.gamma"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RLTrainer(load_config([*toy_overrides(tmp_path), *settings]))
