"""An update that is not finite is skipped, counted, and its batch lies in the run folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from toy_task import toy_overrides, toy_tokenizer

from tridentrl.configs.load import load_config
from tridentrl.trainer.rl_trainer import RLTrainer

SPOILED = '''
from tridentrl.algos import SFT, register


@register("spoiled")
class Spoiled(SFT):
    """Its second step divides by nothing."""

    def step(self, ctx, prompts):
        self.steps = getattr(self, "steps", 0) + 1
        super().step(ctx, prompts)

    def loss(self, logprobs, entropy, batch):
        loss, metrics = super().loss(logprobs, entropy, batch)
        return loss / (self.steps != 2), metrics
'''


def run(overrides: list[str]) -> dict[str, float]:
    return RLTrainer(load_config(overrides)).run()


def test_the_batch_of_a_skipped_update_is_kept(tmp_path: Path) -> None:
    (tmp_path / "spoiled.py").write_text(SPOILED)
    overrides = [*toy_overrides(tmp_path, rows=8), f"algorithm.path={tmp_path / 'spoiled.py'}", "algorithm.name=spoiled"]
    overrides += ["data.response_key=answer", "parallel.tensor=1", "trainer.total_steps=2", "data.shuffle=false"]
    for metrics in run_ranks(2, run, overrides):
        assert metrics["actor/skipped_steps"] == 1
    files = sorted((tmp_path / "outputs" / "default" / "nonfinite").iterdir())
    assert [file.name for file in files] == ["step_2-actor-0.pt", "step_2-actor-1.pt"]
    saved = [torch.load(file) for file in files]
    tokenizer, tokens = toy_tokenizer(), {}
    for part in saved:
        batch = part["batch"]
        lengths = (batch["prompt_lengths_N"] + batch["response_lengths_N"])[batch["rows_n"]].tolist()
        tokens |= dict(zip(batch["rows_n"].tolist(), batch["tokens_T"].split(lengths), strict=True))
        assert not torch.tensor(part["metrics"]["loss"]).isfinite()
    texts = [tokenizer.decode(tokens[row], skip_special_tokens=True) for row in range(4)]
    sums = [text.replace("=", "+").split("+") for text in texts]
    assert all(int(a) + int(b) == int(c) for a, b, c in sums)


def test_five_skipped_updates_in_a_row_end_the_run_and_name_the_metrics(tmp_path: Path) -> None:
    (tmp_path / "spoiled.py").write_text(SPOILED.replace("self.steps != 2", "self.steps < 2"))
    overrides = [*toy_overrides(tmp_path), f"algorithm.path={tmp_path / 'spoiled.py'}", "algorithm.name=spoiled"]
    overrides += ["data.response_key=answer", "trainer.total_steps=9", "trainer.save_interval=null"]
    with pytest.raises(RuntimeError, match="5 updates in a row"):
        run_ranks(1, run, overrides)
    files = {file.name for file in (tmp_path / "outputs" / "default" / "nonfinite").iterdir()}
    assert files == {f"step_{step}-actor-0.pt" for step in range(2, 7)}
