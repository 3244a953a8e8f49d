"""The softmax-weighted mean of every prefix of a text (Fastformer Eq. 4 and Eq. 6 up to each token), in linear time.

With L_i the log of the sum of exp(s_j) over j <= i, the mean up to i is the sum of exp(s_j - L_i) x_j. No exponent is
positive for any scores, and no later token contributes. Chunks of tokens are summed by a triangular product each; their
ends are such a sequence again, and a shorter one.

Shapes: B batch, N tokens, h heads, d channels of a head.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from .additive import is_transformed

CHUNK = 16


def prefix_softmax_mean(
    x: Tensor, scores: Tensor, mask: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute softmax-weighted means of the vectors up to each token (Fastformer Eq. 4, each prefix).

    Args:
        x: (B, h, N, d), in scores' dtype.
        scores: (B, h, N), float32 or float64; finite.
        mask: (B, N) bool, True where a token counts; None: all do. A prefix without such a token has a mean of zero.
        state: state from an earlier call on the tokens before these; None if there are none.

    Returns:
        The means (B, h, N, d), and the state (B, h, 1, d + 1) after the last token: its mean, and the log of the sum of
        the exponentials.
    """
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
    with maybe_autocast(x.device.type, enabled=False):
        if state is None:
            means, log_sums = _means(x, scores)
        elif x.shape[2] == 1:
            means, log_sums = _step(x, scores, state)
        else:
            # The earlier tokens act as one vector, whose score is the log of their sum.
            x, scores = torch.cat([state[..., :-1], x], 2), torch.cat([state[..., -1], scores], 2)
            means, log_sums = (y[:, :, 1:] for y in _means(x, scores))
        return means, torch.cat([means[:, :, -1:], log_sums[:, :, -1:, None]], -1)


def _step(x: Tensor, scores: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the mean (B, h, 1, d) and the log of the sum (B, h, 1) after one more token."""
    before = state[..., -1]
    log_sums = torch.logaddexp(before, scores)
    # A difference of means, for one product.
    means = torch.lerp(state[..., :-1], x, torch.exp(scores - log_sums)[..., None])
    return means, log_sums


def _means(x: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Compute means (B, h, N, d) and the logs of sums (B, h, N), differentiable in every mode."""
    function = _TransformedPrefixMean if is_transformed(x, scores) else _PrefixMean
    return function.apply(x, scores)


class _PrefixMean(torch.autograd.Function):
    """Means and logs of sums; the backward pass repeats the weights instead of keeping them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        log_sums = _log_sums(scores)
        means = _sum_before(x, scores, log_sums)
        ctx.save_for_backward(x, scores, log_sums, means)
        return means, log_sums

    @staticmethod
    def backward(ctx: Any, grad_means: Tensor, grad_log_sums: Tensor) -> tuple[Tensor, Tensor]:
        x, scores, log_sums, means = ctx.saved_tensors
        with maybe_autocast(x.device.type, enabled=False):
            shared = (grad_means * means).sum(-1) - grad_log_sums
            sums = _sum_after(torch.cat([grad_means, shared[..., None]], -1), scores, log_sums)
            grad_x = sums[..., :-1]
            return grad_x, (grad_x * x).sum(-1) - sums[..., -1]


class _TransformedPrefixMean(torch.autograd.Function):
    """`_PrefixMean` for the transforms of torch.func, which need slower calls, and for forward-mode differentiation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        log_sums = _log_sums(scores)
        # Contiguous, as a tangent is.
        return _sum_before(x, scores, log_sums).contiguous(), log_sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        x, scores, means, log_sums = *inputs, *output
        ctx.save_for_backward(x, scores, log_sums, means)
        ctx.save_for_forward(x, scores, log_sums, means)

    backward = _PrefixMean.backward

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, scores_tangent: Tensor) -> tuple[Tensor, Tensor]:
        x, scores, log_sums, means = ctx.saved_tensors
        with maybe_autocast(x.device.type, enabled=False):
            change = scores_tangent[..., None]
            sums = _sum_before(torch.cat([x_tangent + change * x, change], -1), scores, log_sums)
            return sums[..., :-1] - means * sums[..., -1:], sums[..., -1]


def _log_sums(scores: Tensor) -> Tensor:
    """Compute the log of the sum over j <= i of exp(scores_j), finite before the first token that counts too."""
    return torch.logcumsumexp(scores, -1).clamp_min_(torch.finfo(scores.dtype).min)


def _sum_before(x: Tensor, scores: Tensor, log_sums: Tensor) -> Tensor:
    """Compute the sum over j <= i of exp(scores_j - log_sums_i) x_j, with x (..., N, d) and scores (..., N)."""
    tokens = x.shape[-2]
    if tokens <= CHUNK:
        return _weights(scores, log_sums) @ x
    x, scores, log_sums = _chunks(x, scores, log_sums)
    sums = _weights(scores, log_sums) @ x
    ends = log_sums[..., :-1, -1]
    earlier = _sum_before(sums[..., :-1, -1, :], ends, ends)
    decay = torch.exp(ends[..., None] - log_sums[..., 1:, :])
    _add_product(sums[..., 1:, :, :], decay[..., None], earlier[..., None, :])
    return sums.flatten(-3, -2)[..., :tokens, :]


def _sum_after(y: Tensor, scores: Tensor, log_sums: Tensor) -> Tensor:
    """Compute the sum over i >= j of exp(scores_j - log_sums_i) y_i: `_sum_before`, transposed."""
    tokens = y.shape[-2]
    if tokens <= CHUNK:
        return _weights(scores, log_sums).mT @ y
    y, scores, log_sums = _chunks(y, scores, log_sums)
    sums = _weights(scores, log_sums).mT @ y
    ends = log_sums[..., :-1, -1]
    decay = torch.exp(ends[..., None] - log_sums[..., 1:, :])
    later = _sum_after((decay[..., None, :] @ y[..., 1:, :, :]).squeeze(-2), ends, ends)
    gain = torch.exp(scores[..., :-1, :] - ends[..., None])
    _add_product(sums[..., :-1, :, :], gain[..., None], later[..., None, :])
    return sums.flatten(-3, -2)[..., :tokens, :]


def _add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    # torch.func.vmap has no rule for addcmul_, and would loop over the batch.
    if is_transformed():
        total.add_(x * y)
    else:
        total.addcmul_(x, y)


def _weights(scores: Tensor, log_sums: Tensor) -> Tensor:
    """Compute exp(scores_j - log_sums_i) at (i, j), zero where j > i."""
    length = scores.shape[-1]
    later = torch.full((length, length), -torch.inf, dtype=scores.dtype, device=scores.device).triu_(1)
    # Mask later scores before the difference, which could overflow.
    return (scores[..., None, :] + later).sub_(log_sums[..., None]).exp_()


def _chunks(x: Tensor, scores: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Divide into chunks (..., N / CHUNK, CHUNK), padded with tokens of zero weight."""
    more = -x.shape[-2] % CHUNK
    if more:
        x, scores = F.pad(x, (0, 0, 0, more)), F.pad(scores, (0, more), value=-torch.inf)
        log_sums = F.pad(log_sums, (0, more), value=torch.finfo(log_sums.dtype).max)
    return x.unflatten(-2, (-1, CHUNK)), scores.unflatten(-1, (-1, CHUNK)), log_sums.unflatten(-1, (-1, CHUNK))
