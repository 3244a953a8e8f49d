"""A check of whether torch, beyond autograd, sees the operations of a call.

Private names of torch 2.14 without a public equivalent: the dispatch keys of a tensor, the modes of the dispatcher, the
level of forward mode, and whether a transform is active.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

# Kinds of devices with forms of the operators, and sets of dispatch keys met on them.
KINDS = ('cpu', 'cuda')
_PLAIN: dict[int, bool] = {}
# Sizes of a grid, flags and names.
_CONSTANTS = (bool, str, tuple, list, torch.Size)


def is_ordinary(args: Sequence[Any]) -> bool:
    """Return whether a call, with gradients or without, has plain tensors, and nothing but a profile sees operators.

    Compilers, traces, transforms, forward mode, modes and subclasses see them. So do tensors whose memory holds other
    numbers than they have, such as negated views.
    """
    if (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or is_transformed()
        or torch._C._len_torch_dispatch_stack()
        or torch.overrides.has_torch_function(args)
    ):
        return False
    keys = torch._C._dispatch_keys
    for x in args:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            if not (_PLAIN.get(keys(x).raw_repr()) or _has_plain_keys(x)):
                return False
        elif x is not None and kind not in _CONSTANTS:
            return False
    return True


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` or forward mode sees the call."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _has_plain_keys(x: Tensor) -> bool:
    # Return whether a tensor has the dispatch keys of a new one, those of the inference mode included.
    keys = torch._C._dispatch_keys(x).raw_repr()
    if keys not in _PLAIN and x.device.type in KINDS:
        with torch.inference_mode(x.is_inference()):
            _PLAIN[keys] = keys == torch._C._dispatch_keys(torch.empty(0, device=x.device)).raw_repr()
    return _PLAIN.get(keys, False)
