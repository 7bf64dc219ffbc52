"""Vocabulary-parallel log-probabilities and entropies against float64 torch on the whole vocabulary.

Not covered here: CUDA and other kernels than the plain one.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from tridentrl.kernels import logprob
from tridentrl.kernels.logprob import vocab_parallel_logprobs

VOCABS = [97, 128, 129, 1000, 1025]
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = 2e-6
"""Absolute and relative, of log-probs and entropies in nats: the math is fp32 for both dtypes."""
GRADIENT_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Relative to the largest entry: a bf16 gradient is rounded to 8 bits."""


def reference(logits: Tensor, targets: Tensor, temperature: float, grads: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and the gradient of the logits in float64, by autograd through torch's own log_softmax."""
    logits = logits.double().requires_grad_()
    logp = (logits / temperature).log_softmax(-1)
    entropy = torch.special.entr(logp.exp()).sum(-1)
    chosen = logp.gather(-1, targets[:, None])[:, 0]
    (grad,) = torch.autograd.grad([chosen, entropy], logits, [g.double() for g in grads])
    return chosen.detach(), entropy.detach(), grad


def one_rank(
    logits: Tensor, targets: Tensor, temperature: float, grads: tuple[Tensor, Tensor], *, vocab: int, tp: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The same from this rank's slice of the logits padded to a multiple of 128 tp columns. The padding holds a huge value."""
    padded = torch.full((len(logits), -(-vocab // (128 * tp)) * 128 * tp), 1e5, dtype=logits.dtype)
    padded[:, :vocab] = logits
    rank = dist.get_rank() if tp > 1 else 0
    local = padded.chunk(tp, dim=1)[rank].clone().requires_grad_()
    before = local.detach().clone()
    start = rank * local.shape[1]
    group = dist.group.WORLD if tp > 1 else None
    chosen, entropy = vocab_parallel_logprobs(local, targets, vocab_start=start, vocab_size=vocab, temperature=temperature, group=group)
    (grad,) = torch.autograd.grad([chosen, entropy], local, list(grads))
    assert torch.equal(local.detach(), before)
    assert grad.dtype == logits.dtype and chosen.dtype == entropy.dtype == torch.float32
    assert not grad[:, max(0, vocab - start) :].any()
    return chosen.detach(), entropy.detach(), grad


def samples(vocab: int, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(7, vocab, generator=generator) * scale).to(dtype)
    targets = torch.randint(vocab, (7,), generator=generator)
    targets[0], targets[1] = vocab - 1, 0
    return logits, targets, (torch.randn(7, generator=generator), torch.randn(7, generator=generator))


TWO_RANK_CASES = [(v, t, d) for v in [*VOCABS, 40] for t in (0.5, 1.0) for d in DTYPES]
"""Vocabulary, temperature, dtype. With 40 ids the second rank has padding only."""


def assert_equal_to_reference(result: tuple[Tensor, Tensor, Tensor], expected: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> None:
    for got, want in zip(result[:2], expected[:2], strict=True):
        torch.testing.assert_close(got.double(), want, atol=TOLERANCE, rtol=TOLERANCE)
    grad, want = result[2][:, : expected[2].shape[1]].double(), expected[2]
    assert (grad - want).abs().max() <= GRADIENT_TOLERANCE[dtype] * want.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("vocab", VOCABS)
def test_one_rank_equals_float64(vocab: int, temperature: float, dtype: torch.dtype) -> None:
    for scale in (0.0, 3.0):
        logits, targets, grads = samples(vocab, dtype, scale)
        result = one_rank(logits, targets, temperature, grads, vocab=vocab)
        assert_equal_to_reference(result, reference(logits, targets, temperature, grads), dtype)
        chosen, entropy, _ = result
        assert (chosen <= 0).all() and (entropy >= 0).all() and (entropy <= math.log(vocab) + 1e-6).all()


def _every_case() -> list[tuple[Tensor, Tensor, Tensor]]:
    results = []
    for vocab, temperature, dtype in TWO_RANK_CASES:
        logits, targets, grads = samples(vocab, dtype, 3.0)
        results.append(one_rank(logits, targets, temperature, grads, vocab=vocab, tp=2))
    return results


def test_two_ranks_equal_float64_also_when_one_holds_only_padding() -> None:
    first, second = run_ranks(2, _every_case)
    for (vocab, temperature, dtype), left, right in zip(TWO_RANK_CASES, first, second, strict=True):
        assert torch.equal(left[0], right[0]) and torch.equal(left[1], right[1])
        logits, targets, grads = samples(vocab, dtype, 3.0)
        result = (left[0], left[1], torch.cat([left[2], right[2]], dim=1))
        assert_equal_to_reference(result, reference(logits, targets, temperature, grads), dtype)


def test_flat_logits_over_a_padded_vocabulary() -> None:
    chosen, entropy = vocab_parallel_logprobs(
        torch.zeros(2, 128), torch.tensor([0, 96]), vocab_start=0, vocab_size=97, temperature=1.0, group=None
    )
    assert chosen.tolist() == pytest.approx([-4.574711] * 2, abs=1e-6)
    assert entropy.tolist() == pytest.approx([4.574711] * 2, abs=1e-6)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.126928), (0.5, -0.018150)])
def test_temperature_divides_the_logits(temperature: float, expected: float) -> None:
    chosen, _ = vocab_parallel_logprobs(
        torch.tensor([[2.0, 0.0]]), torch.tensor([0]), vocab_start=0, vocab_size=2, temperature=temperature, group=None
    )
    assert chosen.item() == pytest.approx(expected, abs=1e-6)


def _extreme() -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Logits of +-1e4; columns ruled out by -inf, in row 2 the whole first half, in row 3 all but the target."""
    logits = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    logits[0] *= 1e4
    logits[1] = 1e4
    logits[1, 7] = -1e4
    logits[2, :128] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 200] = 5.0
    logits[4, 10] = -torch.inf
    return logits, torch.tensor([int(logits[0].argmax()), 7, 250, 200, 11]), (torch.ones(5), torch.full((5,), 2.0))


def _extreme_case(tp: int) -> tuple[Tensor, Tensor, Tensor]:
    logits, targets, grads = _extreme()
    return one_rank(logits, targets, 1.0, grads, vocab=256, tp=tp)


def test_huge_and_infinite_logits_stay_finite_on_one_and_two_ranks() -> None:
    logits, targets, _ = _extreme()
    logits64 = logits.double()
    expected_logp = logits64.log_softmax(-1)
    probs = expected_logp.exp()
    entropy = torch.special.entr(probs).sum(-1)
    # By hand, since autograd through -inf gives NaN: dlogp = onehot - p, dH = -p (log p + H).
    onehot = torch.nn.functional.one_hot(targets, 256).double()
    expected_grad = onehot - probs - 2 * torch.where(probs > 0, probs * (expected_logp + entropy[:, None]), 0.0)
    expected = (expected_logp.gather(-1, targets[:, None])[:, 0], entropy, expected_grad)
    left, right = run_ranks(2, _extreme_case, 2)
    for result in (_extreme_case(1), (left[0], left[1], torch.cat([left[2], right[2]], dim=1))):
        assert all(tensor.isfinite().all() for tensor in result)
        assert_equal_to_reference(result, expected, torch.float32)


def test_a_forbidden_target_has_probability_zero_and_a_finite_gradient() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]], requires_grad=True)
    chosen, entropy = vocab_parallel_logprobs(logits, torch.tensor([1]), vocab_start=0, vocab_size=3, temperature=1.0, group=None)
    chosen.backward()
    assert chosen.item() == -math.inf and entropy.item() == pytest.approx(math.log(2))
    assert logits.grad is not None and logits.grad.tolist() == [[-0.5, 1.0, -0.5]]


def test_gradients_pass_the_numeric_check_with_either_output_unused() -> None:
    logits = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, 5, 8, 2])
    for pick in (slice(0, 2), slice(0, 1), slice(1, 2)):
        torch.autograd.gradcheck(
            lambda x, pick=pick: vocab_parallel_logprobs(x, targets, vocab_start=0, vocab_size=9, temperature=0.7, group=None)[pick],
            logits,
            check_undefined_grad=False,
        )


def test_chunks_change_nothing_and_the_layout_of_the_input_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets, grads = samples(129, torch.float32, 3.0)
    whole = one_rank(logits, targets, 1.0, grads, vocab=129)
    monkeypatch.setattr(logprob, "CHUNK_ELEMENTS", 300)  # two rows at a time, the last chunk holds one
    for got, want in zip(one_rank(logits, targets, 1.0, grads, vocab=129), whole, strict=True):
        assert torch.equal(got, want)
    transposed = logits.t().contiguous().t()
    chosen, _ = vocab_parallel_logprobs(transposed, targets, vocab_start=0, vocab_size=129, temperature=1.0, group=None)
    torch.testing.assert_close(chosen, whole[0])


def test_no_tokens_give_empty_results_and_an_empty_gradient() -> None:
    logits = torch.zeros(0, 8, requires_grad=True)
    chosen, entropy = vocab_parallel_logprobs(
        logits, torch.zeros(0, dtype=torch.int64), vocab_start=0, vocab_size=8, temperature=1.0, group=None
    )
    (chosen.sum() + entropy.sum()).backward()
    assert chosen.tolist() == [] and logits.grad is not None and logits.grad.shape == (0, 8)


def test_backward_keeps_the_logits_and_nothing_else_of_their_size() -> None:
    saved: list[int] = []
    logits = torch.randn(64, 1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        vocab_parallel_logprobs(logits, torch.zeros(64, dtype=torch.int64), vocab_start=0, vocab_size=1000, temperature=1.0, group=None)
    assert sorted(saved) == [64, 64, 64, 64, 64_000]


@pytest.mark.parametrize(
    ("targets", "temperature", "message"),
    [
        ([0, 8], 1.0, r"targets lie in \[0, 8\].*ids \[0, 8\)"),
        ([0, -1], 1.0, r"targets lie in \[-1, 0\]"),
        ([0, 1], 0.0, "temperature is 0.0.*above 0"),
        ([0], 1.0, r"got \(2, 8\) and \(1,\)"),
    ],
)
def test_wrong_input_is_refused(targets: list[int], temperature: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vocab_parallel_logprobs(torch.zeros(2, 8), torch.tensor(targets), vocab_start=0, vocab_size=8, temperature=temperature, group=None)
