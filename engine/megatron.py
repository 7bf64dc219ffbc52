"""One model on Megatron-Core: scores sequences, and is trained when it has an optimizer. Actor, critic and reference are all this.

Shape legend as in engine.packing; every [R] result is known on all ranks of the pipeline and tensor-parallel groups.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from torch import Tensor

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.engine.packing import PackedMicroBatch, Sequences, pack
from tridentrl.kernels.logprob import vocab_parallel_logprobs
from tridentrl.parallel.cpu import megatron_facade
from tridentrl.parallel.grid import Grid, padded_vocab
from tridentrl.parallel.model import Head, Recompute, build_chunks, transformer_config, uses_transformer_engine
from tridentrl.parallel.offload import OFFLOADED, Offload
from tridentrl.parallel.optimizer import OptimizerSettings, Training, make_trainable
from tridentrl.weights.hf_io import load_pieces
from tridentrl.weights.layouts import megatron_layout
from tridentrl.weights.pieces import Piece

# Gets the outputs for the response tokens of a micro-batch, ([r] log-probs, [r] entropies) or ([r] values,), and that micro-batch.
# Returns its share of the loss and of the metrics: sums over micro-batches and data-parallel ranks give the whole.
MicroLoss = Callable[[tuple[Tensor, ...], PackedMicroBatch], tuple[Tensor, dict[str, Tensor]]]


class MegatronEngine:
    """The chunks of one model that this rank holds.

    `max_tokens` bounds the tokens of a micro-batch. Give `optimizer` for a model that trains; without it the model is frozen. `offload`
    (a key of OFFLOADED) says what leaves the device between one `at_work` and the next.
    """

    def __init__(
        self,
        spec: ModelSpec,
        grid: Grid,
        *,
        head: Head = "lm",
        bf16: bool = False,
        max_tokens: int,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
        optimizer: OptimizerSettings | None = None,
        offload: str = "none",
        device: torch.device | None = None,
    ) -> None:
        self.spec, self.grid, self.head, self.max_tokens = spec, grid, head, max_tokens
        self.device = device or torch.device("cpu")
        self.config = transformer_config(spec, grid, bf16=bf16, sequence_parallel=sequence_parallel, recompute=recompute)
        self.chunks = build_chunks(spec, self.config, grid, head=head)
        self.training: Training | None = make_trainable(self.config, self.chunks, optimizer) if optimizer else None
        self.offload = Offload(OFFLOADED[offload], self.chunks, self.training)

    @contextlib.contextmanager
    def at_work(self, *, training: bool = False) -> Iterator[None]:
        """Inside, the weights are on the device, and with `training` gradients and optimizer too. After it, all that may leave has left."""
        self.offload.bring_back(("weights", "gradients", "optimizer") if training else ("weights",))
        yield
        self.offload.park()

    # Weights

    def layouts(self) -> dict[int, list[Piece]]:
        """By rank, where the tensors of the Hugging Face model lie in that rank's `tensors()`."""
        # Ranks that hold the same part of the model, of possibly a thousand, share one list.
        parts: dict[tuple[int, ...], list[Piece]] = {}
        layouts = {}
        for rank in range(self.grid.world):
            coord = self.grid.coord(rank)
            part = (coord.tp_rank, coord.pp_rank, self.grid.ep_rank(rank), self.grid.etp_rank(rank))
            if part not in parts:
                parts[part] = self._layout(rank)
            layouts[rank] = parts[part]
        return layouts

    def _layout(self, rank: int) -> list[Piece]:
        return megatron_layout(self.spec, self.grid, rank, head=self.head, fused_norms=uses_transformer_engine())

    def tensors(self) -> dict[str, Tensor]:
        """The live parameters of this rank, named `<chunk>.<Megatron parameter name>`."""
        assert "weights" not in self.offload.away, "offloaded: use at_work"
        return {
            f"{number}.{name}": parameter.data
            for number, chunk in enumerate(unwrap_model(self.chunks))
            for name, parameter in chunk.named_parameters()
        }

    def load(self, folder: str) -> None:
        """Fill the weights from a Hugging Face folder of the same kind of model."""
        absent = self._fill(folder)
        assert not absent, "only a value model may lack its head"

    def load_value_model(self, folder: str, *, seed: int) -> bool:
        """Fill a value model from a folder of one, or of a language model; that has no value head, which is then drawn from `seed`.

        Returns whether it was drawn: normal with standard deviation 1 / sqrt(hidden size), the same on every rank and layout.
        """
        fresh = bool(self._fill(folder))
        for name, tensor in self.tensors().items():
            if fresh and name.endswith("output_layer.weight"):
                head = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) / math.sqrt(self.spec.hidden_size)
                tensor.copy_(head)
        self._weights_replaced()
        return fresh

    def _fill(self, folder: str) -> list[str]:
        """Returns the tensors that the folder does not have and need not have."""
        tensors = self.tensors()
        absent = load_pieces(folder, self._layout(dist.get_rank()), tensors, head=self.head)
        for name, tensor in tensors.items():
            if name.endswith("word_embeddings.weight") or (self.head == "lm" and name.endswith("output_layer.weight")):
                self._zero_padding(tensor)
        self._weights_replaced()
        return absent

    def _weights_replaced(self) -> None:
        """The optimizer's own copies follow the model's weights."""
        if self.training:
            with megatron_facade():
                self.training.optimizer.reload_model_params()

    def _zero_padding(self, rows: Tensor) -> None:
        first = parallel_state.get_tensor_model_parallel_rank() * len(rows)
        rows[max(0, self.spec.vocab_size - first) :].zero_()

    # Forward only

    def logprobs(self, sequences: Sequences, *, temperature: float) -> tuple[Tensor, Tensor]:
        """log-probabilities and entropies [R] (nats) of the response tokens under softmax(logits / temperature), fp32, no gradient."""
        logprobs_R, entropy_R = self._score(sequences, lambda output, batch: self._token_logprobs(output, batch, temperature), width=2)
        return logprobs_R, entropy_R

    def values(self, sequences: Sequences) -> Tensor:
        """Value [R] of the state in which each response token was chosen, fp32, no gradient."""
        (values_R,) = self._score(sequences, self._token_values, width=1)
        return values_R

    def _score(self, sequences: Sequences, read: Callable[[Tensor, PackedMicroBatch], tuple[Tensor, ...]], *, width: int) -> Tensor:
        batches = self._pack(sequences)
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            outputs = self._run(batches, lambda output, batch: torch.stack(read(output, batch)), forward_only=True)
        scores = torch.zeros(width, sum(sequences.response_lengths), device=self.device)
        for output, batch in zip(outputs, batches, strict=False):
            scores[:, batch.rows_r] = output
        if self.grid.pp > 1:
            dist.broadcast(
                scores, parallel_state.get_pipeline_model_parallel_last_rank(), group=parallel_state.get_pipeline_model_parallel_group()
            )
        return scores

    # Training

    def update(self, sequences: Sequences, loss: MicroLoss, *, temperature: float = 1.0) -> dict[str, float]:
        """One optimizer step over `sequences` of all data-parallel ranks. Returns the metrics, equal on every rank.

        A gradient that is not finite on any rank leaves the weights of all ranks as they were and counts as `skipped_steps` 1.
        """
        assert self.training, "this model is frozen"
        batches = self._pack(sequences)

        def micro_loss(output: Tensor, batch: PackedMicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            read = self._token_logprobs(output, batch, temperature) if self.head == "lm" else self._token_values(output, batch)
            if not batch.lengths:
                # A filler of the pipeline schedule: part of the graph, no part of the loss.
                return output.sum() * 0.0, torch.tensor(1, dtype=torch.int), {}
            value, metrics = loss(read, batch)
            metrics = {**metrics, "loss": value}
            # The schedule changes the loss in place; the count is unused, denominators are in the loss.
            return value.clone(), torch.tensor(1, dtype=torch.int), {name: metric.detach().clone() for name, metric in metrics.items()}

        for chunk in self.training.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.training.optimizer.zero_grad()
        reports = self._run(batches, micro_loss, forward_only=False)
        metrics = self._reduce_metrics(reports)
        finite = math.isfinite(metrics.get("loss", 0.0)) and self._gradients_are_finite()
        metrics["skipped_steps"] = 0.0 if finite else 1.0
        if finite:
            with megatron_facade():
                self.training.scheduler.step(1)
                _, grad_norm, _ = self.training.optimizer.step()
            metrics["grad_norm"] = float(grad_norm)
        metrics["lr"] = self.training.optimizer.param_groups[0]["lr"]
        return metrics

    def _gradients_are_finite(self) -> bool:
        assert self.training
        finite = torch.tensor(1.0, device=self.device)
        for chunk in self.training.chunks:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                finite = finite * buffer.grad_data.isfinite().all()
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return bool(finite.item())

    def _reduce_metrics(self, reports: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sum over micro-batches and data-parallel ranks, or the maximum for a name that ends in `_max`."""
        mine: list[dict[str, float]] = []
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True) and parallel_state.get_tensor_model_parallel_rank() == 0:
            mine = [{name: value.item() for name, value in report.items()} for report in reports]
        gathered: list[list[dict[str, float]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, mine)
        metrics: dict[str, float] = {}
        for report in (report for rank in gathered for report in rank):
            for name, value in report.items():
                if name.endswith("_max"):
                    metrics[name] = max(metrics.get(name, -math.inf), value)
                else:
                    metrics[name] = metrics.get(name, 0.0) + value
        return metrics

    # Shared

    def _pack(self, sequences: Sequences) -> list[PackedMicroBatch]:
        multiple = self.grid.tp if self.config.sequence_parallel else 1
        count_multiple = self.grid.pp if self.grid.vpp > 1 else 1
        cut = functools.partial(pack, sequences, max_tokens=self.max_tokens, multiple=multiple, device=self.device)
        batches = cut(count_multiple=count_multiple)
        if self.grid.sharing > 1:
            # Ranks that share experts exchange tokens in every layer, so they must run equally many micro-batches.
            most = torch.tensor(len(batches), device=self.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            batches = cut(count_multiple=int(most))
        return batches

    def _run(self, batches: list[PackedMicroBatch], finish: Callable[[Tensor, PackedMicroBatch], Any], *, forward_only: bool) -> list[Any]:
        """Megatron's pipeline schedule. `finish` sees the last stage's outputs; its results, in order, are returned there, [] elsewhere."""

        def forward_step(batches: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(batches)
            output = model(batch.tokens, None, None, packed_seq_params=batch.packing)
            return output, lambda output, non_loss_data=False: finish(output, batch)

        assert not self.offload.away & ({"weights"} if forward_only else {"weights", "gradients", "optimizer"}), "offloaded: use at_work"
        chunks = self.chunks if forward_only or not self.training else self.training.chunks
        with megatron_facade():
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(batches) for _ in chunks],
                model=chunks,
                num_microbatches=len(batches),
                seq_length=max(batch.tokens.shape[1] for batch in batches),
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def _token_logprobs(self, logits: Tensor, batch: PackedMicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """logits [1, t, vocab / tp] -> log-probs and entropies [r]."""
        vocab_start = parallel_state.get_tensor_model_parallel_rank() * (padded_vocab(self.spec.vocab_size, self.grid.tp) // self.grid.tp)
        return vocab_parallel_logprobs(
            logits[0, batch.scored_r],
            batch.targets_r,
            vocab_start=vocab_start,
            vocab_size=self.spec.vocab_size,
            temperature=temperature,
            group=parallel_state.get_tensor_model_parallel_group() if self.grid.tp > 1 else None,
        )

    @staticmethod
    def _token_values(values: Tensor, batch: PackedMicroBatch) -> tuple[Tensor]:
        """values [1, t, 1] -> [r]."""
        return (values[0, batch.scored_r, 0],)
