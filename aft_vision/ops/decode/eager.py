"""One token at a time, with a state of constant size that is updated in place (footnote 2).

AFT-simple keeps sums of e^(k - reference) [v | 1]; the reference moves for a key far above it alone.

AFT-local keeps such sums of what lies before the window, and the window as a ring of slots, where token t has slot
t mod s. On a CPU a slot holds [e^(k - reference) v | e^(k - reference)], so that a step is one product with the
position biases, without an exponential for each token of the window. Whatever that product could get wrong is noticed
and done by a joint log-sum-exp: tokens are got back from their exponentials, and where the keys of a window lie too far
apart for one reference, the ring holds [v | k] itself until they no longer do. On an accelerator, where a branch on
values would synchronise every layer, it always holds [v | k].
"""

import math

import torch
from torch import Tensor

from aft_vision.ops.common.numerics import may_branch, without_autocast

# How far a key may exceed its reference, in nats: less than in the causal forms, whose values are scaled.
HEADROOM = 40.0
# How far an exponential in the ring may lie below its reference, in nats; above it, HEADROOM.
REACH = 80.0
# A new reference lies this far below the largest key: what is left of HEADROOM is for the keys to come.
MARGIN = 20.0
# A denominator below this, or biases further apart than REACH, may have lost something to underflow.
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
    """Return the values, 0 where a key of minus infinity counts for nothing: what stands there may be NaN."""
    return v.masked_fill(k == float('-inf'), 0.0)


def _raise(peak: Tensor, reference: Tensor, denominator: Tensor) -> Tensor:
    # Move a reference to the largest new key where it must, and return the factor for the sums. Empty sums take any.
    empty = (denominator == 0) & (peak > float('-inf'))
    moved = torch.where((peak > reference + HEADROOM) | empty, peak, reference)
    scale = torch.exp((reference - moved).clamp_max(0.0))
    reference.copy_(moved)
    return scale


def simple_step(k: Tensor, v: Tensor, reference: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """The mean of the values up to the token (B, D), whose key and value are added to the sums in place."""
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
    """The mean (B, D) for a token with its state updated in place, on a CPU.

    Args:
        k, v: (B, D) of the token, in the state's dtype.
        band_row: (s,) of the token.
        reference, sums, ring, position, holds_keys: of `ops.LocalState`.
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
    # What lies before the window has a bias of 0.
    top, low = max(high, 0.0), min(low, 0.0)
    if top - low <= REACH:
        weights = torch.exp(row - top).expand(len(k), 1, -1)
        with without_autocast('cpu'):
            mixed = torch.baddbmm(sums.unsqueeze(1), weights, ring[:, :used], beta=math.exp(-top)).squeeze(1)
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
    """The mean (B, D) for the last token that a state has taken, from exponentials however small."""
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
    """`local_step` without a branch or a number on the host, for a ring that holds [v | k]."""
    window, dim = ring.shape[1], k.shape[1]
    slot = (position % window).view(1)
    leaving = ring.index_select(1, slot).squeeze(1)
    # An empty slot has a key of minus infinity, which adds nothing.
    absorb(leaving[:, dim:], leaving[:, :dim], reference, sums[:, :dim], sums[:, dim:])
    ring.index_copy_(1, slot, torch.cat([counted_values(k, v), k], 1).unsqueeze(1))
    row = band_row[(torch.arange(window, device=k.device) - slot - 1) % window]
    position.add_(1)
    return _joint_mean(ring[..., dim:], ring[..., :dim], row, reference, sums)


def decode(reference: Tensor, ring: Tensor, holds_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (B, slots, D) of a ring; minus infinity and 0 in an empty slot."""
    values, keys = ring.chunk(2, dim=-1)
    if not may_branch(ring) or bool(holds_keys):
        return keys, values
    values = torch.where(keys > 0, values / keys, 0.0)
    return keys.log() + reference.unsqueeze(1), values


def encode(keys: Tensor, values: Tensor, reference: Tensor, sums: Tensor, ring: Tensor, holds_keys: Tensor) -> None:
    """Write keys and values (B, slots, D) to a ring, as exponentials where one reference can serve all."""
    dim = keys.shape[2]
    if may_branch(keys):
        den = sums[:, dim:]
        older = torch.where(den == 0, float('-inf'), reference + den.log())
        moved = torch.maximum(keys.amax(1), older).clamp_min(torch.finfo(keys.dtype).min / 4) - MARGIN
        lowest = torch.cat([keys, older.unsqueeze(1)], 1)
        lowest = lowest.masked_fill(lowest == float('-inf'), float('inf')).amin(1)
        if bool((lowest >= moved - REACH).all()):
            # In two halves: the factor itself may overflow where the sums are small.
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
    # What stands in slot 0, 1, ... has these places in the band of the token in `slot`.
    first = len(band_row) - 1 - slot
    return torch.cat([band_row[first:], band_row[:first]])[:used]


def _fits(shifted: Tensor) -> bool:
    # Whether the exponential of a new key, less the reference, can stand in the ring.
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
    # Keys first relative to the largest: a large key plus a bias would round the bias away.
    base = torch.maximum(keys.amax(1), older).clamp_min(least)  # (B, D)
    logits, older = keys - base.unsqueeze(1) + row[:, None], older - base
    peak = torch.maximum(logits.amax(1), older).clamp_min(least)
    weight, scale = torch.exp(logits - peak.unsqueeze(1)), torch.exp(older - peak)
    num = (weight * values).sum(1) + scale * numerator
    return _ratio(num, weight.sum(1) + scale * denominator)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    # Of a token that sees nothing, 0.
    return torch.where(denominator == 0, 0.0, numerator / denominator)
