"""Layers of fused models: the values and parameters of torch's and timm's, faster in evaluation on a CPU.

Fusing is for inference: from then on parameters may change only by `load_state_dict`, a move or a cast, and `train()`
is an error. The layers act without gradients, where nothing traces, exports or transforms the call; else they are
torch's. They keep packed weights, about as large as the parameters, of convolutions twice as large: made when a size
of the input comes a second time. Copies and files have none. Hooks on convolutions and norms within a fused block are
not called; one that keeps the output of an MLP's first layer must copy it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d, ConvNormAct, Mlp
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from aft_vision.ops.common.ordinary import is_ordinary
from aft_vision.ops.linear import (
    MIN_GRAPH_PRODUCT,
    can_run,
    linear,
    onednn_is_faster,
    pack_weight,
    supports_dtype,
)

# Activations that oneDNN computes with a convolution.
POINTWISE = {nn.Identity: 'none', nn.ReLU: 'relu', nn.Hardswish: 'hardswish', nn.SiLU: 'swish'}
# A convolution, with the norm and activation after it, if any.
_Layer = tuple[nn.Conv2d, BatchNormAct2d | None]


class _Packed(NamedTuple):
    # Packed weights: the type of the input and its number of rows or channels, and the calls that compute the layer.
    dtype: torch.dtype
    size: int
    calls: Sequence[Callable[[Tensor], Tensor]]


def check_trainable(module: nn.Module, is_fused: bool, mode: bool) -> None:
    """Raise a ValueError if a fused module is to be trained."""
    if is_fused and mode:
        raise ValueError(
            f'this {type(module).__name__} is fused for inference and cannot be trained: train the model that '
            'reparameterize_model copied, or load its state dict into a new one; eval() makes this one usable again'
        )


class _Packing(nn.Module):
    # A layer that keeps packed weights once it is fused.

    __jit_ignored_attributes__: ClassVar[list[str]] = ['packed']
    packed: _Packed | None = None
    is_fused: bool = True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, 'packed': None}

    def train(self, mode: bool = True) -> '_Packing':
        check_trainable(self, self.is_fused, mode)
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> '_Packing':
        self.packed = None
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.packed = None
        super()._load_from_state_dict(*args, **kwargs)

    def _may_pack(self, x: Tensor) -> bool:
        # Return whether packed weights may serve a call.
        if torch.is_grad_enabled() or not torch.backends.mkldnn.enabled or torch.is_autocast_enabled('cpu'):
            return False
        return is_ordinary((x,)) and x.is_cpu

    def _convolve(self, x: Tensor, layers: Sequence[_Layer]) -> Tensor | None:
        # Return the result of convolutions of maps (B, C, H, W) one after the other, None if oneDNN cannot compute it.
        # Another thread may replace it at any time.
        kept = self.packed
        if kept is None or kept.dtype is not x.dtype or not x.numel():
            if not _can_convolve(x, layers):
                return None
            # Normal tensors even in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                kept = self.packed = _Packed(x.dtype, x.shape[1], [_pack_convolution(*layer) for layer in layers])
        if x.ndim != 4 or x.shape[1] != kept.size:
            return None
        x = x.contiguous(memory_format=torch.channels_last)
        for call in kept.calls:
            x = call(x)
        return x


class InplaceGELU(nn.GELU):
    """A GELU that overwrites its input in evaluation.

    The hidden values of an MLP are its largest tensors. With a second one, the allocator returns their memory to the
    system in every block and gets it back page by page.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.gelu(x, approximate=self.approximate)
        return self._evaluated(x)

    @torch.jit.unused
    def _evaluated(self, x: Tensor) -> Tensor:
        gelu = torch.ops.aten.gelu_ if _overwrites(self, x) else F.gelu
        return gelu(x, approximate=self.approximate)


class InplaceHardswish(nn.Hardswish):
    """A hard swish that overwrites its input in evaluation, as `InplaceGELU`."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.hardswish(x)
        return self._evaluated(x)

    @torch.jit.unused
    def _evaluated(self, x: Tensor) -> Tensor:
        return F.hardswish(x, inplace=_overwrites(self, x))


class FusedLinear(_Packing, nn.Linear):
    """A linear layer that multiplies by the fastest library, with packed weights.

    Attributes:
        graph_by_onednn: multiply by oneDNN in a graph of `torch.compile`.
    """

    graph_by_onednn: bool = False
    last_rows: int = 0

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.linear(x, self.weight, self.bias)
        return self._evaluated(x)

    @torch.jit.unused
    def _evaluated(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if torch.compiler.is_compiling():
            act = self.graph_by_onednn and not (torch.is_grad_enabled() or torch.compiler.is_exporting())
            return (linear if act and can_run(x, weight, bias, MIN_GRAPH_PRODUCT) else F.linear)(x, weight, bias)
        call = self._packed_call(x, weight, bias) if self._may_pack(x) else None
        return F.linear(x, weight, bias) if call is None else call(x)

    def _packed_call(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        rows = math.prod(x.shape[:-1])
        # Another thread may replace it at any time.
        kept = self.packed
        if kept is None or kept.dtype is not x.dtype or kept.size != rows:
            # The first call of so many rows packs nothing, so that images of ever other sizes do not.
            again, self.last_rows = self.last_rows == rows, rows
            if not again or not can_run(x, weight, bias):
                return None
            kept = self.packed = _Packed(x.dtype, rows, [pack_weight(x, weight, bias)])
        return kept.calls[0] if x.shape[-1] == weight.shape[1] and x.is_contiguous() else None


class FusedConv2d(_Packing, nn.Conv2d):
    """A convolution by oneDNN, with packed weights."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return self._conv_forward(x, self.weight, self.bias)
        return self._evaluated(x)

    @torch.jit.unused
    def _evaluated(self, x: Tensor) -> Tensor:
        y = self._convolve(x, [(self, None)]) if self._may_pack(x) else None
        return self._conv_forward(x, self.weight, self.bias) if y is None else y


class FusedConvolutions(_Packing):
    """Convolutions with batch normalisation, one after the other, that `fuse()` makes one operation each.

    Attributes:
        convolutions: names of each convolution, and of its norm and activation.
    """

    convolutions: ClassVar[Sequence[tuple[str, str]]] = ()
    is_fused: bool = False

    @torch.jit.ignore
    def fuse(self) -> 'FusedConvolutions':
        """Fold the norms into the convolutions for inference, and compute activations with them.

        Returns:
            The module itself, as `timm.utils.reparameterize_model` expects.
        """
        self.eval()
        self.is_fused = True
        return self

    @torch.jit.unused
    def folded(self, x: Tensor) -> Tensor | None:
        """Return the last map of maps (B, C, H, W); None if it is not fused, or oneDNN cannot compute it."""
        if not self.is_fused or not self._may_pack(x):
            return None
        return self._convolve(x, [(getattr(self, conv), getattr(self, norm)) for conv, norm in self.convolutions])


class FusibleConvNormAct(FusedConvolutions, ConvNormAct):
    """timm's convolution with norm and activation, without anti-aliasing, which can be fused."""

    convolutions = (('conv', 'bn'),)

    def forward(self, x: Tensor) -> Tensor:
        folded = None if torch.jit.is_scripting() else self.folded(x)
        return self.bn(self.conv(x)) if folded is None else folded


def fuse_linear(module: nn.Module) -> None:
    """Let linear layers and plain convolutions keep packed weights in evaluation.

    Args:
        module: its layers, or itself, become a `FusedLinear` or `FusedConv2d` with the same parameters and hooks.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for each in module.modules():
        if type(each) is nn.Linear:
            each.__class__ = FusedLinear
            each.__dict__['graph_by_onednn'] = onednn_is_faster()
        elif type(each) is nn.Conv2d:
            each.__class__ = FusedConv2d


def fuse_mlp(mlp: nn.Module) -> None:
    """Fuse the linear layers of an MLP, and let the activation of one of timm's overwrite its input."""
    fuse_linear(mlp)
    if type(mlp) is Mlp:
        act = mlp.act
        if type(act) is nn.GELU:
            mlp.act = InplaceGELU(act.approximate).train(act.training)
        elif type(act) is nn.Hardswish:
            mlp.act = InplaceHardswish().train(act.training)


def _overwrites(module: nn.Module, x: Any) -> bool:
    # Return whether a call is one of evaluation that nothing traces.
    watched = type(x) is not Tensor or torch.compiler.is_compiling() or torch.jit.is_tracing()
    return not (watched or module.training or torch.is_grad_enabled())


def _can_convolve(x: Tensor, layers: Sequence[_Layer]) -> bool:
    # Return whether oneDNN computes these convolutions of maps (B, C, H, W), one after the other.
    if x.ndim != 4 or not x.numel() or not supports_dtype(x.dtype):
        return False
    for conv, norm in layers:
        if type(conv) not in (nn.Conv2d, FusedConv2d) or conv.padding_mode != 'zeros' or isinstance(conv.padding, str):
            return False
        if norm is not None and (type(norm) is not BatchNormAct2d or norm.running_var is None):
            return False
        for each in _tensors(conv, norm):
            if each is not None and (each.dtype is not x.dtype or type(each) not in (Tensor, nn.Parameter)):
                return False
    return x.shape[1] == layers[0][0].in_channels


def _tensors(conv: nn.Conv2d, norm: BatchNormAct2d | None) -> list[Tensor | None]:
    found = [conv.weight, conv.bias]
    return found if norm is None else [*found, norm.weight, norm.bias, norm.running_mean, norm.running_var]


def _pack_convolution(conv: nn.Conv2d, norm: BatchNormAct2d | None) -> Callable[[Tensor], Tensor]:
    # The convolution with its norm and activation as one operation, of maps whose channels are neighbours.
    if norm is None:
        return _Convolution(conv, conv.weight, conv.bias, nn.Identity())
    tensors = [None if x is None else x.detach().double() for x in _tensors(conv, norm)]
    weight, bias, scale, shift, mean, variance = tensors
    assert weight is not None
    assert mean is not None
    assert variance is not None
    folded = fuse_conv_bn_weights(weight, bias, mean, variance, norm.eps, scale, shift)
    weight, bias = (x.detach().to(conv.weight.dtype) for x in folded)
    activation: nn.Module = norm.act
    return _Convolution(conv, weight, bias, activation)


class _Convolution:
    # A convolution by oneDNN of maps whose channels are neighbours. Its weight is packed when a size of the map comes
    # again: oneDNN has another form for other sizes, and takes 20 times as long with one that it cannot read at once.

    def __init__(self, conv: nn.Conv2d, weight: Tensor, bias: Tensor | None, activation: nn.Module) -> None:
        # oneDNN reads the bias as if it were contiguous.
        self.bias = None if bias is None else bias.detach().contiguous()
        self.weight = weight.detach().contiguous(memory_format=torch.channels_last)
        self.sizes = list(conv.padding), list(conv.stride), list(conv.dilation), conv.groups
        self.name = POINTWISE.get(type(activation))
        self.activation = activation if self.name is None else None
        self.kept: tuple[torch.Size, Tensor] = torch.Size(), self.weight

    def __call__(self, x: Tensor) -> Tensor:
        # Another thread may replace it at any time.
        shape, weight = self.kept
        if shape != x.shape:
            self.kept, weight = (x.shape, self.weight), self.weight
        elif weight is self.weight:
            pack: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
            weight = pack(weight.to_mkldnn(), *self.sizes, x.shape)
            self.kept = shape, weight
        convolve = torch.ops.mkldnn._convolution_pointwise.default
        y = convolve(x, weight, self.bias, *self.sizes, self.name or 'none', [], '')
        return y if self.activation is None else self.activation(y)
