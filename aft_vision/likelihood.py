"""Bits per sub-pixel or character of a decoder, and its accuracy, over a whole data set."""

from typing import Any

import torch
from torch import nn

from aft_vision.data import IGNORED
from aft_vision.evaluate import evaluate_all
from aft_vision.models.decoder import bits


def sequence_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats of the targets that count.

    Args:
        logits: (B, T, V); half precision is widened to float32.
        targets: (B, T) int64; targets of -100 do not count.

    Raises:
        ValueError: the shapes do not fit.
    """
    return nn.functional.cross_entropy(*_flat(logits, targets), ignore_index=IGNORED)


class BitsEvaluator:
    """A running sum of the loss and of right predictions, in the manner of timm's evaluators; float64 and integers.

    Args:
        device: Device of the outputs.

    Attributes:
        counts: (3,) int64, sequences, tokens and right predictions so far.
    """

    def __init__(self, device: torch.device | str = 'cpu') -> None:
        device = torch.device(device)
        dtype = torch.float32 if device.type == 'mps' else torch.float64
        self.nats = torch.zeros((), dtype=dtype, device=device)
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch: logits (B, T, V), and targets (B, T) with -100 where they do not count."""
        flat = nn.functional.cross_entropy(*_flat(logits, targets), ignore_index=IGNORED, reduction='none')
        self.nats += flat.to(self.nats.dtype).sum()
        self.counts[0] += len(targets)
        self.counts[1] += targets.ne(IGNORED).sum()
        # A target that does not count is no token.
        self.counts[2] += logits.argmax(-1).eq(targets).sum()

    def compute(self, distributed: bool = False) -> dict[str, float]:
        """Return means over the tokens that count, over all processes if `distributed`.

        Returns:
            `loss` in nats, `bits`, `accuracy` in percent, and `tokens`, their number.
        """
        nats, counts = self.nats.clone(), self.counts.clone()
        if distributed:
            for total in (nats, counts):
                torch.distributed.all_reduce(total)
        tokens, right = int(counts[1]), int(counts[2])
        mean = nats.item() / max(tokens, 1)
        return {'loss': mean, 'bits': float(bits(mean)), 'accuracy': 100 * right / max(tokens, 1), 'tokens': tokens}


def evaluate_bits(
    model: nn.Module, loader: Any, device: torch.device | str = 'cpu', **options: Any
) -> dict[str, float]:
    """Measure the bits of a decoder; every token that counts is counted once.

    Args:
        model: Maps tokens (B, T) to their logits (B, T, V), each predicted from the tokens before it.
        loader: Yields tokens and targets (B, T), -100 where they do not count, as aft_vision.data has them.
        options: `amp_dtype`, `distributed` and `progress`, as in `evaluate`.

    Returns:
        `loss` (mean, in nats), `bits`, `accuracy` in percent, `tokens`, `samples` (sequences), and `images_per_second`
        of the forward pass, which counts sequences.

    Raises:
        ValueError: the loader is empty.
    """
    return evaluate_all([model], loader, device, evaluator=lambda: BitsEvaluator(device), **options)[0]


def _flat(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if logits.ndim != 3 or logits.shape[:2] != targets.shape:
        raise ValueError(f'expected logits of shape {(*targets.shape, "V")}, got {tuple(logits.shape)}')
    # Keep float64.
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    return logits.flatten(0, 1), targets.flatten()
