"""Regularisers of the kernels of AFT-conv: their entropy in the loss, and the temperature of their samples."""

import torch
from torch import nn

from aft_vision.layers import AFTConv, mixers_of
from aft_vision.regularizers import kernel_entropy, layer_entropies


class KernelRegularization:
    """The section `regularize` of an experiment, for the kernels of one model.

    Args:
        model: The model itself, not its compiled or distributed wrapper: the entropy is computed outside autocast, and
            its gradient is added before processes synchronise.
        updates: Updates of the whole run.
        weight, tau_end: `regularize.kernel_entropy` and `regularize.tau_end`.

    Raises:
        ValueError: the entropy has a weight and the model has no AFT-conv kernel, or tau_end is set without
            model.gumbel.
    """

    def __init__(self, model: nn.Module, updates: int = 1, weight: float = 0.0, tau_end: float | None = None) -> None:
        self.model, self.updates, self.weight, self.tau_end = model, updates, weight, tau_end
        mixers = mixers_of(model, AFTConv)
        self.sampled = [mixer for mixer in mixers if mixer.gumbel]
        self.first_tau = [mixer.tau for mixer in self.sampled]
        if self.weight > 0 and not mixers:
            raise ValueError(
                f'expected regularize.kernel_entropy to be 0 for a model without AFT-conv kernels, got {self.weight} '
                f'for a {type(model).__name__}'
            )
        if self.tau_end is not None and not self.sampled:
            raise ValueError(f'expected regularize.tau_end to be null without model.gumbel, got {self.tau_end}')

    def penalty(self) -> torch.Tensor | float:
        """Return the term that is added to the loss of an update."""
        return self.weight * kernel_entropy(self.model) if self.weight > 0 else 0.0

    def set_tau(self, update: int) -> None:
        """Set the temperature of an update, counted from 0."""
        if self.tau_end is not None:
            share = min(update / max(self.updates - 1, 1), 1.0)
            for mixer, first in zip(self.sampled, self.first_tau, strict=True):
                mixer.tau = first ** (1 - share) * self.tau_end**share

    @torch.no_grad()
    def entropies(self) -> list[float]:
        """Return the mean over heads of each layer in nats, or nothing without a weight and without sampled offsets."""
        if self.weight == 0 and not self.sampled:
            return []
        return torch.stack([entropy.mean() for entropy in layer_entropies(self.model)]).tolist()

    def metrics(self) -> dict[str, float]:
        """Return columns of the log: `kernel_entropy`, the mean per head, and `kernel_entropy_NN` of each layer."""
        layers = self.entropies()
        if not layers:
            return {}
        mean = sum(layers) / len(layers)
        return {'kernel_entropy': mean, **{f'kernel_entropy_{i:02d}': x for i, x in enumerate(layers, start=1)}}
