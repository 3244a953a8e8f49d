"""Position biases as functions of their parameters (AFT Eq. 4, 7, 8, 9, 10), differentiated by autograd."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_vision.ops.common.numerics import accumulate_dtype, may_branch, without_autocast
from aft_vision.ops.local.band import block_length, unskew


def local_bias(bias: Tensor, window: int, causal: bool = False) -> Tensor:
    """Return the band of a whole position bias that AFT-local keeps (AFT Eq. 4).

    Args:
        bias: (T, T) position bias.
        window: s, in tokens: pairs with |t - t'| < s keep their bias.
        causal: keep only the token and the s - 1 tokens before it.

    Returns:
        (T, 2s - 1), or (T, s) if causal; zero where it points outside the sequence.

    Raises:
        ValueError: bias is not square, or window is below 1.
    """
    if bias.ndim != 2 or bias.shape[0] != bias.shape[1]:
        raise ValueError(f'bias must be square, got shape {list(bias.shape)}')
    _check_window(window)
    after = 0 if causal else window - 1
    # Row t of the padded bias starts window - 1 places before the sequence; its band starts t places later.
    return unskew(F.pad(bias, (window - 1, after)))


def factorized_bias(bias_u: Tensor, bias_v: Tensor, window: int | None = None, causal: bool = False) -> Tensor:
    """Compute the position bias w = u v^T, whole or only its band (AFT Eq. 7).

    Args:
        bias_u, bias_v: (T, d') factors of targets and of sources.
        window: s, in tokens: only the band with |t - t'| < s is computed, in O(T s) memory (AFT Eq. 4); in a program
            that is exported for any T, in O(T * T).
        causal: with a window, only the token and the s - 1 tokens before it.

    Returns:
        (T, T); with a window (T, 2s - 1), or (T, s) if causal, zero where it points outside the sequence.

    Raises:
        ValueError: the factors differ in shape, or window is below 1.
    """
    if bias_u.ndim != 2 or bias_u.shape != bias_v.shape:
        raise ValueError(
            f'bias_u and bias_v must both have shape (T, d), got {list(bias_u.shape)} and {list(bias_v.shape)}'
        )
    if torch.jit.is_scripting():
        return _product(bias_u, bias_v, window, causal)
    else:  # TorchScript compiles neither this branch nor autocast
        # It will be exponentiated, so autocast must not round it.
        with without_autocast(bias_u.device.type):
            if window is not None and isinstance(bias_u.shape[0], torch.SymInt):
                # An exported program for any grid. Blocks would fix whether there are several.
                return local_bias(bias_u @ bias_v.t(), window, causal)
            return _product(bias_u, bias_v, window, causal)


def local_band_row(bias: Tensor, position: Tensor, window: int | None = None) -> Tensor:
    """Return one row of the causal band of a whole position bias, for a decoding step.

    Args:
        bias: (T, T) position bias.
        position: () int64, the target.
        window: s, in tokens; None is T.

    Returns:
        (s,): the row of `local_bias`; entries that point before the sequence are arbitrary.
    """
    return bias[position, _band_sources(position, window, bias.shape[0])]


def factorized_band_row(bias_u: Tensor, bias_v: Tensor, position: Tensor, window: int | None = None) -> Tensor:
    """Compute one row of the causal band of the position bias w = u v^T, for a decoding step.

    Args:
        bias_u, bias_v: (T, d') factors of targets and of sources.
        position: () int64, the target.
        window: s, in tokens; None is T.

    Returns:
        (s,): the row of `factorized_bias`; entries that point before the sequence are arbitrary.
    """
    with without_autocast(bias_u.device.type):
        return bias_v[_band_sources(position, window, bias_v.shape[0])] @ bias_u[position]


def standardized_kernel(kernel: Tensor, gamma: Tensor, beta: Tensor, eps: float = 1e-8) -> Tensor:
    """Standardise the kernel to zero mean and unit deviation per head, then scale and shift it (AFT Eq. 8).

    The deviation is the population's over the s x s entries of a head (divided by s * s, not by s * s - 1), with eps
    added to the variance. There are no running statistics.

    Args:
        kernel: (h, s, s) raw bias.
        gamma, beta: (h,) gain and shift; zeros make AFT-conv an AFT-simple.
        eps: added to the variance.

    Returns:
        (h, s, s).

    Raises:
        ValueError: shapes do not match.
    """
    heads = kernel.shape[0]
    if kernel.ndim != 3 or list(gamma.shape) != [heads] or list(beta.shape) != [heads]:
        raise ValueError(
            f'kernel (h, s, s), gamma (h,) and beta (h,) must agree in h, '
            f'got {list(kernel.shape)}, {list(gamma.shape)} and {list(beta.shape)}'
        )
    size = kernel.shape[1] * kernel.shape[2]
    normal = F.layer_norm(kernel.flatten(1), [size], eps=eps)
    return (gamma[:, None] * normal + beta[:, None]).view_as(kernel)


def kernel_entropy(kernel: Tensor) -> Tensor:
    """Compute the entropy of the softmax of each head's kernel, a regulariser of training (AFT Eq. 9).

    Args:
        kernel: (h, s, s) position bias w, after AFT Eq. 8 if that is used.

    Returns:
        (h,) in nats, float64 for a float64 kernel, else float32: 0 if one offset has all the weight, log(s * s) if all
        have the same. Its sum over the heads is the paper's reg(w).

    Raises:
        ValueError: kernel is not (h, s, s).
    """
    if kernel.ndim != 3:
        raise ValueError(f'kernel must have shape (h, s, s), got {list(kernel.shape)}')
    # Not p log p of a softmax p, which would be 0 log 0 for an underflowed weight.
    log_p = kernel.to(accumulate_dtype(kernel)).flatten(1).log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


def gumbel_kernel(kernel: Tensor, tau: float = 0.5, straight_through: bool = False) -> Tensor:
    """Multiply the kernel by a sample of its Gumbel softmax, as in training (AFT Eq. 10).

    Args:
        kernel: (h, s, s) position bias w, after AFT Eq. 8 if that is used.
        tau: temperature, above 0.
        straight_through: multiply by the one-hot form of the sample, with the gradient of the sample.

    Returns:
        (h, s, s). Random: drawn from torch's generator of the kernel's device.

    Raises:
        ValueError: tau is not positive.
    """
    if tau <= 0:
        raise ValueError(f'tau must be positive, got {tau}')
    sample = F.gumbel_softmax(kernel.flatten(1), tau=tau, hard=straight_through, dim=1)
    return kernel * sample.view_as(kernel)


def onehot_kernel(kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest entry of each head, which inference keeps (AFT Eq. 10).

    Args:
        kernel: (h, s, s) position bias w.

    Returns:
        offset (h, 2) int64, (dy, dx) from target to source, and the bias there, (h,): inputs of `aft_onehot`.
    """
    size = kernel.shape[-1]
    weight, place = kernel.flatten(1).max(1)
    return torch.stack([place // size, place % size], 1) - size // 2, weight


def hard_kernel(kernel: Tensor) -> Tensor:
    """Set all entries of each head except the largest to 0: `onehot_kernel` as a kernel (AFT Eq. 10).

    Args:
        kernel: (h, s, s) position bias w.

    Returns:
        (h, s, s).
    """
    flat = kernel.flatten(1)
    weight, place = flat.max(1, keepdim=True)
    return torch.zeros_like(flat).scatter(1, place, weight).view_as(kernel)


def _product(bias_u: Tensor, bias_v: Tensor, window: int | None, causal: bool) -> Tensor:
    if window is None:
        return bias_u @ bias_v.t()
    _check_window(window)
    tokens, after = len(bias_u), 0 if causal else window - 1
    step = min(block_length(window), tokens)
    blocks = -(-tokens // step)
    # Block b multiplies its targets with the sources [b * step - (s - 1), (b + 1) * step + after).
    targets = F.pad(bias_u, (0, 0, 0, blocks * step - tokens)).unflatten(0, (blocks, step))
    sources = F.pad(bias_v, (0, 0, window - 1, blocks * step - tokens + after))
    products = targets @ sources.unfold(0, step + window - 1 + after, step)  # (blocks, step, step + s - 1 + after)
    return unskew(products).flatten(0, 1)[:tokens]


def _band_sources(position: Tensor, window: int | None, tokens: int) -> Any:
    # The sources of a target's causal band, oldest first: a slice if the target is known on the host.
    window = tokens if window is None else min(window, tokens)
    if may_branch(position) and not torch.compiler.is_compiling() and int(position) >= window - 1:
        return slice(int(position) - window + 1, int(position) + 1)
    return (position - (window - 1) + torch.arange(window, device=position.device)) % tokens


def _check_window(window: int) -> None:
    if window < 1:
        raise ValueError(f'window must be at least 1, got {window}')
