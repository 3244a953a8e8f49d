"""Observers of a call besides autograd, and captures of the launches of a CUDA device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter


def is_watched(args: Sequence[Any]) -> bool:
    """Return whether a call must go through the dispatcher of torch, as one operator.

    Compilers, traces, transforms, forward mode, modes, profiles and subclasses see operators. So do tensors whose
    numbers are not those in their memory. Plain tensors in an ordinary call, with gradients or without, need none.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch.autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    ):
        return True
    for x in args:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            if torch._C._dispatch_keys(x).raw_repr() not in _PLAIN:
                return True
        elif x is not None and kind not in _CONSTANTS:
            return True
    return False


def _find_plain_keys() -> frozenset[int]:
    # The dispatch keys of plain tensors on a CPU: ordinary ones, and those of the inference mode.
    found = set()
    for inference in (False, True):
        with torch.inference_mode(inference):
            found.add(torch._C._dispatch_keys(torch.empty(0, device='cpu')).raw_repr())
    return frozenset(found)


_PLAIN = _find_plain_keys()
# Sizes of a grid, flags and names.
_CONSTANTS = (bool, str, tuple, list, torch.Size)


def is_capturing(device: torch.device | None = None) -> bool:
    """Return whether launches on a CUDA device, by default the current one, are recorded in a CUDA graph.

    During a capture nothing may be timed or read back.
    """
    if not torch.cuda.is_initialized():
        return False
    # torch checks the stream of the current device.
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
