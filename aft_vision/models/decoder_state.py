"""What a decoder remembers between two tokens."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aft_vision import ops
from aft_vision.layers.causal import KeyValueState


class DecoderState(NamedTuple):
    """What a decoder remembers of the tokens it has taken: the states of its layers, and their number.

    Attributes:
        position: () int64, inputs taken: the start and the tokens.
        layers: a state of each block.
    """

    position: Tensor
    layers: tuple[Any, ...]

    def reorder(self, index: Tensor) -> 'DecoderState':
        """A state with the batch rows picked by index (N,); rows may repeat."""
        return DecoderState(self.position.clone(), tuple(ops.reorder_state(layer, index) for layer in self.layers))

    def clone(self) -> 'DecoderState':
        """A copy, which the steps of the original leave as it is."""
        return DecoderState(self.position.clone(), tuple(ops.clone_state(layer) for layer in self.layers))

    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in (self.position, *(x for layer in self.layers for x in layer)))

    def to_dict(self) -> dict[str, Any]:
        """A copy of the state as dicts, lists and tensors, which torch.load(weights_only=True) reads."""
        copy = self.clone()
        return {'position': copy.position, 'layers': [layer._asdict() for layer in copy.layers]}

    @staticmethod
    def from_dict(data: Mapping[str, Any], device: torch.device | str | None = None) -> 'DecoderState':
        """The state of `to_dict`, in tensors of its own.

        Raises:
            ValueError: the data is not that of a state.
        """
        kinds = {kind._fields: kind for kind in (ops.LocalState, ops.SimpleState, KeyValueState)}
        layers = []
        for layer in data['layers']:
            if tuple(layer) not in kinds:
                raise ValueError(f'expected the state of a layer, got one with {sorted(layer)}')
            layers.append(ops.move_state(kinds[tuple(layer)](**layer), device))
        return DecoderState(data['position'].to(device, copy=True), tuple(layers))
