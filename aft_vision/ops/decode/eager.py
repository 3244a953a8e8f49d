"""One token at a time, with a state of constant size that is updated in place (footnote 2).

AFT-simple keeps sums of e^(k - reference) [v | 1]; the reference changes only for a key far above it.

AFT-local keeps such sums for the tokens before the window, and the window as a ring buffer in which token t has slot
t mod s. On a CPU a slot stores [e^(k - reference) v | e^(k - reference)], so that a step is one product with the
position biases, without an exponential per token of the window. If this product could lose precision, the step uses a
joint log-sum-exp, with tokens recovered from their exponentials. If the keys of a window are too far apart for one
reference, the ring stores [v | k] until they no longer are. On an accelerator, where a branch on values would
synchronise every layer, it always stores [v | k].
"""

import math

import torch
from torch import Tensor

from aft_vision.ops.common.numerics import may_branch, without_autocast

# How far a key may exceed its reference, in nats: less than in the causal forms, whose values are scaled.
HEADROOM = 40.0
# How far a key in the ring may be below its reference, in nats; HEADROOM is the limit above it.
REACH = 80.0
# A new reference is this far below the largest key; the rest of HEADROOM is for later keys.
MARGIN = 20.0
# A denominator below this, or biases further apart than REACH, may have lost precision by underflow.
SMALLEST = 1e-28


def absorb(k: Tensor, v: Tensor, reference: Tensor, numerator: Tensor, denominator: Tensor) -> None:
    """Add a token (B, D) to the sums, in place."""
    scale = _raise(k, reference, denominator)
    weight = torch.exp(k - reference)
    numerator.mul_(scale).addcmul_(weight, v)
    denominator.mul_(scale).add_(weight)


def absorb_many(k: Tensor, v: Tensor, reference: Tensor, numerator: Tensor, denominator: Tensor) -> None:
    """Add tokens (B, n, D) to the sums, in place."""
    scale = _raise(k.amax(1), reference, denominator)
    weight = torch.exp(k - reference.unsqueeze(1))
    numerator.mul_(scale).add_((weight * v).sum(1))
    denominator.mul_(scale).add_(weight.sum(1))


def counted_values(k: Tensor, v: Tensor) -> Tensor:
    """Return the values, 0 for keys of minus infinity, where values may be NaN."""
    return v.masked_fill(k == float('-inf'), 0.0)


def _raise(peak: Tensor, reference: Tensor, denominator: Tensor) -> Tensor:
    # Move a reference to the largest new key if necessary, and return the factor for the sums. Empty sums accept any.
    empty = (denominator == 0) & (peak > float('-inf'))
    moved = torch.where((peak > reference + HEADROOM) | empty, peak, reference)
    scale = torch.exp((reference - moved).clamp_max(0.0))
    reference.copy_(moved)
    return scale


def simple_step(k: Tensor, v: Tensor, reference: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the mean (B, D) of the values up to the token, and add its key and value to the sums in place."""
    shifted, v = k - reference, counted_values(k, v)
    if shifted.numel() and may_branch(k) and not torch.compiler.is_compiling() and float(shifted.max()) <= HEADROOM:
        weight = shifted.exp_()
        numerator.addcmul_(weight, v)
        denominator.add_(weight)
    else:
        absorb(k, v, reference, numerator, denominator)
    return _ratio(numerator, denominator)


def local_step(
    k: Tensor,
    v: Tensor,
    band_row: Tensor,
    reference: Tensor,
    sums: Tensor,
    ring: Tensor,
    position: Tensor,
    holds_keys: Tensor,
) -> Tensor:
    """Return the mean (B, D) for a token and update the state in place, on a CPU.

    Args:
        k, v: (B, D), key and value of the token in the state's dtype.
        band_row: (s,), the token's row of the band.
        reference, sums, ring, position, holds_keys: fields of `ops.LocalState`.
    """
    count, window, dim = tokens_seen(position), ring.shape[1], k.shape[1]
    used = min(count + 1, window)
    slot = count % window
    position += 1
    row = _by_slot(band_row, slot, used)
    shifted, v = k - reference, counted_values(k, v)
    if bool(holds_keys) or not _fits(shifted):
        return _exact_step(k, v, row, reference, sums, ring, slot, count >= window, holds_keys)
    entry = ring[:, slot]
    if count >= window:
        sums += entry
    weight = shifted.exp_()
    torch.mul(weight, v, out=entry[:, :dim])
    entry[:, dim:] = weight
    low, high = (float(x) for x in row.aminmax())
    # Tokens before the window have a bias of 0.
    high, low = max(high, 0.0), min(low, 0.0)
    if high - low <= REACH:
        weights = torch.exp(row - high).expand(len(k), 1, -1)
        with without_autocast('cpu'):
            mixed = torch.baddbmm(sums.unsqueeze(1), weights, ring[:, :used], beta=math.exp(-high)).squeeze(1)
        num, den = mixed[:, :dim], mixed[:, dim:]
        if float(den.min()) >= SMALLEST:
            return num / den
    return _joint_mean(*decode(reference, ring[:, :used], holds_keys), row, reference, sums)


def tokens_seen(position: Tensor) -> int:
    """Return the position of a state.

    Raises:
        ValueError: it is negative.
    """
    count = int(position)
    if count < 0:
        raise ValueError(f'state.position must be the number of tokens seen, at least 0, got {count}')
    return count


def held_mean(
    band_row: Tensor, reference: Tensor, sums: Tensor, ring: Tensor, position: Tensor, holds_keys: Tensor
) -> Tensor:
    """Return the mean (B, D) for the last token of a state, exact for arbitrarily small exponentials."""
    count, window = int(position), ring.shape[1]
    used = min(count, window)
    row = _by_slot(band_row, (count - 1) % window, used)
    return _joint_mean(*decode(reference, ring[:, :used], holds_keys), row, reference, sums)


def local_step_static(
    k: Tensor,
    v: Tensor,
    band_row: Tensor,
    reference: Tensor,
    sums: Tensor,
    ring: Tensor,
    position: Tensor,
) -> Tensor:
    """Compute `local_step` without branches or values on the host, for a ring of [v | k]."""
    window, dim = ring.shape[1], k.shape[1]
    slot = (position % window).view(1)
    leaving = ring.index_select(1, slot).squeeze(1)
    # An empty slot has a key of minus infinity and adds nothing.
    absorb(leaving[:, dim:], leaving[:, :dim], reference, sums[:, :dim], sums[:, dim:])
    ring.index_copy_(1, slot, torch.cat([counted_values(k, v), k], 1).unsqueeze(1))
    row = band_row[(torch.arange(window, device=k.device) - slot - 1) % window]
    position.add_(1)
    return _joint_mean(ring[..., dim:], ring[..., :dim], row, reference, sums)


def decode(reference: Tensor, ring: Tensor, holds_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values (B, slots, D) of a ring; minus infinity and 0 in an empty slot."""
    values, keys = ring.chunk(2, dim=-1)
    if not may_branch(ring) or bool(holds_keys):
        return keys, values
    values = torch.where(keys > 0, values / keys, 0.0)
    return keys.log() + reference.unsqueeze(1), values


def encode(keys: Tensor, values: Tensor, reference: Tensor, sums: Tensor, ring: Tensor, holds_keys: Tensor) -> None:
    """Write keys and values (B, slots, D) to a ring, as exponentials if one reference is enough for all."""
    dim = keys.shape[2]
    if may_branch(keys):
        den = sums[:, dim:]
        older = torch.where(den == 0, float('-inf'), reference + den.log())
        moved = torch.maximum(keys.amax(1), older).clamp_min(torch.finfo(keys.dtype).min / 4) - MARGIN
        lowest = torch.cat([keys, older.unsqueeze(1)], 1)
        lowest = lowest.masked_fill(lowest == float('-inf'), float('inf')).amin(1)
        if bool((lowest >= moved - REACH).all()):
            # In two steps, because the factor may overflow for small sums.
            half = torch.where(den > 0, torch.exp((reference - moved) / 2), 0.0).repeat(1, 2)
            sums.mul_(half).mul_(half)
            reference.copy_(moved)
            weight = torch.exp(keys - moved.unsqueeze(1))
            torch.mul(weight, values, out=ring[..., :dim])
            ring[..., dim:] = weight
            holds_keys.fill_(False)
            return
    ring[..., :dim] = values
    ring[..., dim:] = keys
    holds_keys.fill_(True)


def _by_slot(band_row: Tensor, slot: int, used: int) -> Tensor:
    # The positions of slots 0, 1, ... in the band of the token in `slot`.
    return band_row.roll(slot + 1)[:used]


def _fits(shifted: Tensor) -> bool:
    # True if the exponential of a new key, relative to the reference, can be stored in the ring.
    if not shifted.numel():
        return False
    low, high = (float(x) for x in shifted.aminmax())
    if not high <= HEADROOM:
        return False
    return low >= -REACH or bool(((shifted >= -REACH) | (shifted == float('-inf'))).all())


def _exact_step(
    k: Tensor,
    v: Tensor,
    row: Tensor,
    reference: Tensor,
    sums: Tensor,
    ring: Tensor,
    slot: int,
    is_full: bool,
    holds_keys: Tensor,
) -> Tensor:
    dim, used = k.shape[1], len(row)
    keys, values = (x.clone() for x in decode(reference, ring, holds_keys))
    if is_full:
        absorb(keys[:, slot], values[:, slot], reference, sums[:, :dim], sums[:, dim:])
    keys[:, slot], values[:, slot] = k, v
    mean = _joint_mean(keys[:, :used], values[:, :used], row, reference, sums)
    encode(keys, values, reference, sums, ring, holds_keys)
    return mean


def _joint_mean(keys: Tensor, values: Tensor, row: Tensor, reference: Tensor, sums: Tensor) -> Tensor:
    numerator, denominator = sums.chunk(2, dim=1)
    older = torch.where(denominator == 0, float('-inf'), reference)
    least = torch.finfo(keys.dtype).min / 4
    # Subtract the largest key first: a large key plus a bias would lose the bias to rounding.
    base = torch.maximum(keys.amax(1), older).clamp_min(least)  # (B, D)
    logits, older = keys - base.unsqueeze(1) + row[:, None], older - base
    peak = torch.maximum(logits.amax(1), older).clamp_min(least)
    weight, scale = torch.exp(logits - peak.unsqueeze(1)), torch.exp(older - peak)
    num = (weight * values).sum(1) + scale * numerator
    return _ratio(num, weight.sum(1) + scale * denominator)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    # 0 for a token that sees no source.
    return torch.where(denominator == 0, 0.0, numerator / denominator)
