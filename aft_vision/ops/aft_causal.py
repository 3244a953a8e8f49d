"""The masked AFT operations, where target t sees the sources up to t (footnote 2).

On a CPU any finite key and bias is exact, and a key or value that is not finite changes no earlier target.
"""

import torch
from torch import Tensor

from aft_vision.ops.causal import FULL_CAUSAL, LOCAL_CAUSAL, SIMPLE_CAUSAL
from aft_vision.ops.tracing import saves_for_backward


def aft_full_causal(
    q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, backend: str = 'auto'
) -> Tensor:
    """Mix each token with those up to it by pair-wise position biases (AFT Eq. 2, causal).

    Args:
        q, k, v: (B, T, D). q = None leaves the sigmoid gate out.
        bias: (T, T) position bias w, of which the lower triangle is read.
        mask: (B, T) bool, True where a source counts; a target with no source gives 0.
        backend: 'auto' or 'eager'.

    Returns:
        (B, T, D) in q's dtype.

    Raises:
        ValueError: shapes do not match, mask is not a bool (B, T), or the backend is unknown.
    """
    if not torch.jit.is_scripting():
        return FULL_CAUSAL(q, k, v, bias, mask, backend)
    return torch.ops.aft_vision.aft_full_causal(q, k, v, bias, mask, saves_for_backward(), backend)[0]


def aft_local_causal(
    q: Tensor | None, k: Tensor, v: Tensor, band: Tensor, mask: Tensor | None = None, backend: str = 'auto'
) -> Tensor:
    """Mix each token with those up to it, the last s of them with position biases (AFT Eq. 4, causal).

    Args:
        q, k, v: (B, T, D). q = None leaves the sigmoid gate out.
        band: (T, s): band[t, j] is w[t, t - (s - 1) + j]; entries before the sequence are ignored.
        mask: (B, T) bool, True where a source counts; a target with no source gives 0.
        backend: 'auto', 'eager', 'cpp' (the compiled kernel on a CPU, not for float64), or 'triton'.

    Returns:
        (B, T, D) in q's dtype. Memory is O(B * T * D + T * s); no (T, T) matrix is formed.

    Raises:
        ValueError: shapes do not match, mask is not a bool (B, T), or the backend is unknown.
    """
    if not torch.jit.is_scripting():
        return LOCAL_CAUSAL(q, k, v, band, mask, backend)
    return torch.ops.aft_vision.aft_local_causal(q, k, v, band, mask, saves_for_backward(), backend)[0]


def aft_simple_causal(
    q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None = None, backend: str = 'auto'
) -> Tensor:
    """Gate the key-weighted mean of the values up to each token (AFT Eq. 5, causal).

    Args:
        q, k, v: (B, T, D). q = None leaves the sigmoid gate out.
        mask: (B, T) bool, True where a source counts; a target with no source gives 0.
        backend: 'auto', 'eager', 'cpp' (the compiled kernel on a CPU, not for float64), or 'triton'.

    Returns:
        (B, T, D) in q's dtype.

    Raises:
        ValueError: shapes do not match, mask is not a bool (B, T), or the backend is unknown.
    """
    if not torch.jit.is_scripting():
        return SIMPLE_CAUSAL(q, k, v, mask, backend)
    return torch.ops.aft_vision.aft_simple_causal(q, k, v, mask, saves_for_backward(), backend)[0]
