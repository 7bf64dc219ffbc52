"""Supervised fine-tuning: maximum likelihood of the rows' own responses.

Loss: -sum_t w_t log pi(y_t | x, y_<t), with w by `loss_aggregation` (default: the mean over all response tokens of the batch).
Prompt tokens are not trained. Log-probabilities are taken at the temperature the context uses for its actor.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tridentrl.algos.algorithm import Algorithm, BaseConfig
from tridentrl.algos.context import Context, MicroBatch, Prompt
from tridentrl.algos.registry import register
from tridentrl.kernels.losses import mean_over_batch
from tridentrl.kernels.masks import neutralise


@register("sft")
class SFT(Algorithm):
    Config = BaseConfig
    config: BaseConfig
    online = False
    data_keys = ("response_key",)

    def roles(self, *, kl_coef: float) -> tuple[str, ...]:
        return ("actor",)

    def step(self, ctx: Context, prompts: Sequence[Prompt]) -> None:
        demonstrations = ctx.demonstrations(prompts)
        ctx.update_actor(demonstrations, self.loss, epochs=self.config.epochs, mini_batch_size=self.config.mini_batch_size)

    def loss(self, logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mask, tokens = batch.response_mask, batch.denominators.tokens
        (trained_logprobs,) = neutralise(mask, logprobs)
        loss = -(self.weights(batch) * trained_logprobs).sum()
        return loss, {"nll": mean_over_batch(-logprobs, mask, tokens=tokens), "entropy": mean_over_batch(entropy, mask, tokens=tokens)}
