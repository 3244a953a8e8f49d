"""The linear layers around the mixer of a block, for the few rows of a step of decoding: `dense.cpp`, in float32."""

import ctypes

import torch
from torch import Tensor

from aft_vision.ops.common.build import compiled, library
from aft_vision.ops.common.tensors import pointer, room
from aft_vision.ops.decode.dense import Dense

# With so many rows this was still faster than torch's products.
MOST_ROWS = 64


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ('norm_weight', 'norm_bias', 'weight', 'bias')),
        ('inputs', ctypes.c_int64),
        ('outputs', ctypes.c_int64),
        ('eps', ctypes.c_float),
        ('gelu', ctypes.c_int32),
    ]


def covers_dense(qkv: Dense, proj: Dense | None, fc1: Dense, fc2: Dense) -> bool:
    """Whether this is made for the parameters of such layers."""
    parameters = [x for layer in (qkv, proj, fc1, fc2) for x in layer or () if isinstance(x, Tensor)]
    return all(_is_plain(x) for x in parameters) and _fit(qkv, proj, fc1, fc2) and library() is not None


class DenseBlock:
    """The linear layers of a block: that before its mixer, and the three behind, of which the first may be missing.

    The tensors must stay where they are.
    """

    def __init__(self, qkv: Dense, proj: Dense | None, fc1: Dense, fc2: Dense) -> None:
        # They hold the memory that the addresses are of.
        self._held = qkv, proj, fc1, fc2
        self.layers = (_Layer * 4)(*map(_layer, self._held))
        self.projected, self.channels = qkv.weight.shape
        self.hidden = len(fc1.weight)

    def covers(self, x: Tensor) -> bool:
        """Whether this is made for such rows."""
        if x.dim() != 2 or x.shape[1] != self.channels or x.shape[0] > MOST_ROWS:
            return False
        return x.is_cpu and x.dtype == torch.float32 and x.is_contiguous()

    def project(self, x: Tensor) -> Tensor:
        """What the mixer takes, from x (B, C)."""
        out = room((len(x), self.projected))
        compiled().aft_dense(self.layers, ctypes.c_int64(len(x)), pointer(x), pointer(out), torch.get_num_threads())
        return out

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        """The block's result (B, C), from its input and what the mixer makes, before its own projection."""
        batch, total, out = len(x), torch.empty_like(x), torch.empty_like(x)
        hidden = room((batch, self.hidden))
        y = y.contiguous()
        compiled().aft_dense_block(
            ctypes.byref(self.layers, ctypes.sizeof(_Layer)),
            ctypes.c_int64(batch),
            *map(pointer, (x, y, total, hidden, out)),
            torch.get_num_threads(),
        )
        return out


def _is_plain(x: Tensor) -> bool:
    # A subclass may have its numbers elsewhere.
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.device.type == 'cpu'
    return plain and x.dtype == torch.float32 and x.is_contiguous()


def _fit(qkv: Dense, proj: Dense | None, fc1: Dense, fc2: Dense) -> bool:
    # Whether each takes what that before it gives: nothing else looks at their sizes.
    if not all(layer is None or _is_whole(layer) for layer in (qkv, proj, fc1, fc2)):
        return False
    channels, hidden = qkv.weight.shape[1], len(fc1.weight)
    square = proj is None or proj.weight.shape == (channels, channels)
    return square and fc1.weight.shape[1] == channels and fc2.weight.shape == (channels, hidden)


def _is_whole(layer: Dense) -> bool:
    if layer.weight.dim() != 2:
        return False
    outputs, inputs = layer.weight.shape
    sizes = ((layer.bias, outputs), (layer.norm_weight, inputs), (layer.norm_bias, inputs))
    return all(x is None or x.shape == (n,) for x, n in sizes)


def _layer(layer: Dense | None) -> _Layer:
    if layer is None:
        return _Layer()
    outputs, inputs = layer.weight.shape
    pointers = (pointer(x) for x in (layer.norm_weight, layer.norm_bias, layer.weight, layer.bias))
    return _Layer(*pointers, inputs, outputs, layer.eps, layer.gelu)
