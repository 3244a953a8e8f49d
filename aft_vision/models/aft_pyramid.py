"""Image models of four stages: convolutions at strides 4 and 8, AFT-axial at strides 16 and 32; ours.

The convolution blocks are timm's fused MBConv, as in CPUBone; the others are those of the AFT vision transformers.
Importing this module registers the `aft_pyramid_*` models.

@inproceedings{nottebaum2026cpubone,
  title={CPUBone: Efficient Vision Backbone Design for Devices with Low Parallelization Capabilities},
  author={Nottebaum, Moritz and Dunnhofer, Matteo and Micheloni, Christian},
  booktitle={CVPR Findings},
  year={2026}
}
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import (
    NormMlpClassifierHead,
    calculate_drop_path_rates,
    get_act_layer,
    get_device_dtype,
    register_notrace_function,
    to_2tuple,
)
from timm.models import build_model_with_cfg, checkpoint, generate_default_cfgs, named_apply, register_model
from timm.models._efficientnet_blocks import EdgeResidual
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import init_weights_vit_timm
from torch import Tensor, nn

from aft_vision.layers import AFTBlock, fix_trained_size
from aft_vision.layers.base import find_mixer, split_arguments, undecayed
from aft_vision.layers.fused import FusedConvolutions, FusibleConvNormAct
from aft_vision.models.aft_vit import pool_tokens
from aft_vision.models.attention_block import AttentionBlock, attention_heads, check_attention_blocks
from aft_vision.models.weight_files import PACKAGED, forget_classes, packaged_cfg

# The classes of Tiny-ImageNet and of Imagenette, none of which is in both.
TINY_IMAGENET = tuple((PACKAGED / 'tiny_imagenet.txt').read_text().split())

# Pixels per position of the last stage and of a padding mask, along a side.
STRIDE = 32
# Pixels per position of the input of each stage, along a side.
STRIDES = (2, 4, 8, 16)
# Stages of convolutions; those after them mix tokens.
CONV_STAGES = 2
# Of the mixers that have them, in the last two stages.
DEFAULT_SIZES = {'num_heads': 16, 'window_size': (14, 7)}


class FusibleEdgeResidual(FusedConvolutions, EdgeResidual):
    """timm's fused MBConv, without anti-aliasing and squeeze-and-excitation, which can be fused."""

    convolutions = (('conv_exp', 'bn1'), ('conv_pwl', 'bn2'))

    def forward(self, x: Tensor) -> Tensor:
        folded = None if torch.jit.is_scripting() else self.folded(x)
        y = self.bn2(self.conv_pwl(self.bn1(self.conv_exp(x)))) if folded is None else folded
        return self.drop_path(y) + x if self.has_skip else y


class ConvStage(nn.Module):
    """Fused MBConv blocks, the first of which halves the map.

    Args:
        blocks: of maps (B, C, H, W).
        factor: positions of the input per position of the mask, along a side.
    """

    def __init__(self, blocks: Sequence[nn.Module], factor: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.factor = factor
        self.grad_checkpointing = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        factor = self.factor
        for block in self.blocks:
            x = clear_padding(x, mask, factor)
            x = checkpoint(block, x) if self.grad_checkpointing and not torch.jit.is_scripting() else block(x)
            factor = self.factor // 2
        return x


class AFTStage(nn.Module):
    """A fused MBConv that halves the map, then blocks of a mixer of a grid or softmax attention.

    Args:
        downsample: of maps (B, C, H, W).
        blocks: called as an AFTBlock.
        factor: positions of the input per position of the mask, along a side.
    """

    def __init__(self, downsample: nn.Module, blocks: Sequence[nn.Module], factor: int) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.Sequential(*blocks)
        self.factor = factor
        self.grad_checkpointing = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.downsample(clear_padding(x, mask, self.factor))
        grid = (x.shape[2], x.shape[3])
        counted = token_mask(mask, grid, self.factor // 2)
        # Maps in the order of tokens need no copy on the way there and back.
        x = x.flatten(2).transpose(1, 2)  # (B, T, C)
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = checkpoint(block, x, grid, counted)
            else:
                x = block(x, grid, counted)
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], grid[0], grid[1])


class AFTPyramid(nn.Module):
    """A classifier and backbone with maps of stride 4, 8, 16 and 32, for images of any size.

    Args:
        in_chans: channels of the images.
        num_classes: 0 leaves the classifier out.
        global_pool: 'avg', 'max', 'avgmax', or '' for logits of every position.
        stem_dim: channels at stride 2.
        dims: channels of the stages.
        depths: blocks of the stages; the first one of a convolution stage halves the map, the others have a further
            convolution for that.
        expand_ratio: channels within a fused MBConv divided by those of its input.
        mixer: of the last two stages, one of a grid: 'axial', 'conv' or a name of `aft_vision.layers.register_mixer`.
        mixer_args: arguments of its class in both stages, by name; each is also an argument of the model.
        num_heads: heads of the mixer in the last two stages, one number or two; 16 by default.
        window_size: s of AFT-axial there, likewise, in tokens: distances below s have a bias; 14 and 7 by default.
        mlp_ratio: hidden width of their MLPs divided by the width.
        query_gate: False removes W_q and the sigmoid (Table 12).
        qkv_bias: biases on queries, keys and values.
        standardize_kernel: False trains AFT-axial's raw biases.
        resample_bias: True stretches them over a grid of another size; else distances from s on have no bias.
        local_conv: True adds a 3 x 3 depthwise convolution of the values to AFT-axial's result.
        attention_blocks: blocks of the last two stages with timm's softmax attention, C / 64 heads, in place of
            the mixer; counted from 0 through `depths`.
        init_values: initial value of layer scale in these stages; None leaves it out.
        head_hidden_size: width of a hidden layer of the classifier; None has none.
        act_layer: activation of all blocks, by timm's names.
        drop_rate: dropout rate before the classifier.
        proj_drop_rate: dropout rate of the blocks of the last two stages.
        drop_path_rate: stochastic-depth rate of the last block; it grows linearly from 0.
        kwargs: of the mixer.

    Raises:
        ValueError: there are not four dims and depths, the mixer is not one of a grid, or `attention_blocks` has an
            index of another stage.
        TypeError: the mixer has no such argument.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = 'avg',
        stem_dim: int = 16,
        dims: Sequence[int] = (32, 64, 128, 256),
        depths: Sequence[int] = (1, 1, 2, 6),
        expand_ratio: float = 4.0,
        mixer: str = 'axial',
        mixer_args: Mapping[str, Any] | None = None,
        num_heads: int | Sequence[int] | None = None,
        window_size: int | Sequence[int] | None = None,
        mlp_ratio: float = 4.0,
        query_gate: bool = True,
        qkv_bias: bool = True,
        attention_blocks: Sequence[int] | None = None,
        init_values: float | None = None,
        head_hidden_size: int | None = None,
        act_layer: str = 'hard_swish',
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        attention_blocks = attention_blocks or ()
        _check_arguments(dims, depths, num_heads, window_size, attention_blocks)
        stage_args = _mixer_arguments(mixer, mixer_args, {'num_heads': num_heads, 'window_size': window_size}, kwargs)
        self.in_chans, self.num_classes, self.global_pool = in_chans, num_classes, global_pool
        self.stride = STRIDE
        # Positions of the last map per position of a mask, along a side: more than one after a stage was removed.
        self.mask_factor = 1
        # The first layer is the 3 x 3 convolution, so that zeros at padding before it are all that a mask needs.
        self.stem = FusibleConvNormAct(in_chans, stem_dim, 3, stride=2, act_layer=act_layer, **dd)
        conv: Any = partial(FusibleEdgeResidual, exp_ratio=expand_ratio, act_layer=act_layer, **dd)
        block_args: dict[str, Any] = dict(mlp_ratio=mlp_ratio, qkv_bias=qkv_bias, init_values=init_values, **dd)
        block_args |= dict(proj_drop=proj_drop_rate, act_layer=get_act_layer(act_layer))
        stage_args = [dict(args, mixer=mixer, query_gate=query_gate) for args in stage_args]
        rates: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        self.stages = _make_stages((stem_dim, *dims), rates, conv, stage_args, block_args, attention_blocks)
        self.feature_info: list[dict[str, Any]] = [
            dict(num_chs=dim, reduction=2 * stride, module=f'stages.{index}')
            for index, (dim, stride) in enumerate(zip(dims, STRIDES, strict=True))
        ]
        self.num_features = dims[-1]
        self.head = NormMlpClassifierHead(
            dims[-1],
            num_classes,
            head_hidden_size,
            pool_type=global_pool,
            drop_rate=drop_rate,
            act_layer=act_layer,
            **dd,
        )
        self.head_hidden_size = self.head.num_features
        self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def init_weights(self, mode: str = '', needs_reset: bool = True) -> None:
        """Initialise all parameters: linear layers as DeiT does, convolutions as torch does."""
        named_apply(partial(init_weights_vit_timm, needs_reset=needs_reset), self)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Return what the mixers name: AFT's position biases, which timm exempts as relative-position tables."""
        return undecayed(self, 'stages.*.blocks.*')

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of parameter names: the stem, then a group for each stage, or for each block."""
        blocks = [(r'^stages\.(\d+)\.downsample', (0,)), (r'^stages\.(\d+)\.blocks\.(\d+)', None)]
        return dict(stem=r'^stem', blocks=r'^stages\.(\d+)' if coarse else blocks)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of each block in the backward pass."""
        stages: Any = self.stages
        for stage in stages:
            stage.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """Return the last layer of the classifier."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None, reset_other: bool = False) -> None:
        """Replace the classifier.

        Args:
            num_classes: 0 leaves it out.
            global_pool: None keeps the pooling.
            reset_other: remove its norm and hidden layer too.
        """
        self.num_classes = num_classes
        if global_pool is not None:
            self.global_pool = global_pool
        dd = get_device_dtype(self)
        self.head.reset(num_classes, global_pool, reset_other=reset_other, in_features=self.num_features, **dd)
        self.head_hidden_size = self.head.num_features

    def _embed(self, x: Tensor, attn_mask: Tensor | None) -> Tensor:
        if not torch.jit.is_scripting():
            fix_trained_size(x)
        check_mask(attn_mask, x.shape[0], x.shape[2], x.shape[3], self.stride)
        x = clear_padding(x, attn_mask, self.stride)
        return self.stem(nearby_channels(x) if self.training else x)

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Compute the map of the last stage.

        Args:
            x: (B, 3, H, W) images.
            attn_mask: (B, rows, columns) bool over squares of 32 pixels, True where one counts: for a padded batch of
                mixed sizes. rows and columns are H / 32 and W / 32, rounded up. In training, batch normalisation counts
                padding too.

        Returns:
            (B, C, rows, columns).
        """
        x = self._embed(x, attn_mask)
        for stage in self.stages:
            x = stage(x, attn_mask)
        return x

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
        attn_mask: Tensor | None = None,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Compute the maps of chosen stages, as timm's `forward_intermediates`.

        Args:
            x: (B, 3, H, W) images.
            indices: the last n stages for a number, these stages for a list, all for None.
            norm: without effect: the norm is part of the classifier.
            stop_early: stop after the last chosen stage.
            output_fmt: only 'NCHW'.
            intermediates_only: leave the final map out.
            attn_mask: as in `forward_features`.

        Raises:
            ValueError: output_fmt is another one.
        """
        if output_fmt != 'NCHW':
            raise ValueError(f"output_fmt must be 'NCHW', got {output_fmt!r}")
        taken, last = feature_take_indices(len(self.stages), indices)
        x = self._embed(x, attn_mask)
        maps: list[Tensor] = []
        for i, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x = stage(x, attn_mask)
            if i in taken:
                maps.append(x)
        return maps if intermediates_only else (x, maps)

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the stages after the last chosen one, and the classifier.

        Args:
            indices: as in `forward_intermediates`.
            prune_norm: without effect: the norm is part of the classifier.
            prune_head: False keeps the classifier if the last stage is chosen.

        Returns:
            The indices of the chosen stages.
        """
        taken, last = feature_take_indices(len(self.stages), indices)
        is_cut = last < len(self.stages) - 1
        self.stages = self.stages[: last + 1]
        if is_cut:
            self.num_features = self.head_hidden_size = self.feature_info[last]['num_chs']
        self.mask_factor = self.stride // self.feature_info[last]['reduction']
        if prune_head or is_cut:
            self.reset_classifier(0, '', reset_other=True)
        return taken

    def forward_head(self, x: Tensor, pre_logits: bool = False, attn_mask: Tensor | None = None) -> Tensor:
        """Compute logits (B, classes) of a map (B, C, rows, columns), or with pre_logits the classifier's input."""
        return self.head(
            pool_counted(x, attn_mask, self.mask_factor, self.head.global_pool.pool_type), pre_logits=pre_logits
        )

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Compute logits (B, classes) of images (B, 3, H, W); attn_mask as in `forward_features`."""
        return self.forward_head(self.forward_features(x, attn_mask), attn_mask=attn_mask)


def _check_arguments(
    dims: Sequence[int],
    depths: Sequence[int],
    num_heads: int | Sequence[int] | None,
    window_size: int | Sequence[int] | None,
    attention_blocks: Sequence[int],
) -> None:
    if not len(dims) == len(depths) == len(STRIDES):
        raise ValueError(f'dims and depths must have {len(STRIDES)} numbers each, got {tuple(dims)}, {tuple(depths)}')
    check_attention_blocks(attention_blocks, range(sum(depths[:CONV_STAGES]), sum(depths)))
    for name, given in (('num_heads', num_heads), ('window_size', window_size)):
        if given is not None and not isinstance(given, int) and len(given) != 2:
            raise ValueError(f'{name} must be one number, or two for the last two stages, got {tuple(given)}')


def _make_stages(
    widths: Sequence[int],
    rates: Sequence[Sequence[float]],
    conv: Any,
    mixer_args: Sequence[Mapping[str, Any]],
    block_args: Mapping[str, Any],
    attention_blocks: Sequence[int],
) -> nn.Sequential:
    # Of the widths from stage to stage, and the stochastic-depth rates of each stage's blocks.
    stages: list[nn.Module] = []
    for stage, (width, dim) in enumerate(itertools.pairwise(widths)):
        factor = STRIDE // STRIDES[stage]
        if stage < CONV_STAGES:
            first, *others = rates[stage]
            halving = conv(width, dim, stride=2, drop_path_rate=first)
            blocks = [halving, *(conv(dim, dim, drop_path_rate=rate) for rate in others)]
            stages.append(ConvStage(blocks, factor))
            continue
        blocks = [
            AttentionBlock(dim, attention_heads(dim), drop_path=rate, **block_args)
            if index in attention_blocks
            else AFTBlock(dim, drop_path=rate, **mixer_args[stage - CONV_STAGES], **block_args)
            for index, rate in enumerate(rates[stage], sum(map(len, rates[:stage])))
        ]
        stages.append(AFTStage(conv(width, dim, stride=2), blocks, factor))
    return nn.Sequential(*stages)


def _mixer_arguments(
    mixer: str, mixer_args: Mapping[str, Any] | None, sizes: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> list[dict[str, Any]]:
    # Those of each of the two stages; a size may be two numbers.
    kind = find_mixer(mixer)
    if not kind.on_grid:
        raise ValueError(f'a pyramid needs a mixer of a grid, such as axial or conv, got mixer={mixer!r}')
    own = {name: size for name, size in DEFAULT_SIZES.items() if name in kind.arguments()}
    own |= {name: size for name, size in sizes.items() if size is not None}
    found = []
    for stage in range(2):
        of_stage = {name: to_2tuple(size)[stage] for name, size in own.items()}
        chosen, others = split_arguments(mixer, {**kwargs, **of_stage}, mixer_args)
        if others:
            raise TypeError(f'AFTPyramid has no {", ".join(others)}')
        found.append(chosen)
    return found


# The functions of a mask are leaves for FX, which cannot branch on whether a traced argument is None.
@torch.fx.wrap
@register_notrace_function
def check_mask(mask: Tensor | None, batch: int, height: int, width: int, stride: int) -> None:
    """Raise a ValueError unless a mask has a position for each square of so many pixels of an image, rounded up."""
    if mask is None:
        return
    rows, columns = (height + stride - 1) // stride, (width + stride - 1) // stride
    if mask.dtype != torch.bool or list(mask.shape) != [batch, rows, columns]:
        raise ValueError(
            f'attn_mask must be a bool tensor of shape ({batch}, {rows}, {columns}), True where a square of '
            f'{stride} pixels counts, got {mask.dtype} of shape {list(mask.shape)}'
        )


@torch.fx.wrap
@register_notrace_function
def nearby_channels(x: Tensor) -> Tensor:
    """Return images on a CPU with the channels of a pixel next to each other, which all maps then have.

    Convolutions are faster so, and maps are tokens without a copy.
    """
    return x.contiguous(memory_format=torch.channels_last) if x.is_cpu else x


@torch.fx.wrap
@register_notrace_function
def clear_padding(x: Tensor, mask: Tensor | None, factor: int) -> Tensor:
    """Return a map (B, C, H, W) with zeros where the mask is False, as a convolution pads an image's border.

    Args:
        mask: as in `AFTPyramid.forward_features`.
        factor: positions of x to one of the mask, along a side.
    """
    if mask is None:
        return x
    return x.masked_fill(~_resize_mask(mask, x.shape[2], x.shape[3], factor).unsqueeze(1), 0.0)


@torch.fx.wrap
@register_notrace_function
def token_mask(mask: Tensor | None, grid: tuple[int, int], factor: int) -> Tensor | None:
    """Return the mask of the tokens of a grid, (B, T)."""
    return None if mask is None else _resize_mask(mask, grid[0], grid[1], factor).flatten(1)


def _resize_mask(mask: Tensor, height: int, width: int, factor: int) -> Tensor:
    return mask.repeat_interleave(factor, 1).repeat_interleave(factor, 2)[:, :height, :width]


@torch.fx.wrap
@register_notrace_function
def pool_counted(x: Tensor, mask: Tensor | None, factor: int, pool_type: str) -> Tensor:
    """Return a map (B, C, H, W) as it is, or with a mask its pooled positions that count, (B, C, 1, 1).

    Args:
        factor: positions of x to one of the mask, along a side.
    """
    if mask is None or pool_type == '':
        return x
    if pool_type not in ('avg', 'max', 'avgmax'):
        raise ValueError(f"attn_mask needs global_pool 'avg', 'max', 'avgmax' or '', got '{pool_type}'")
    mask = _resize_mask(mask, x.shape[2], x.shape[3], factor)
    return pool_tokens(x.flatten(2).transpose(1, 2), mask, pool_type, 0, True)[:, :, None, None]


def checkpoint_filter_fn(state_dict: dict[str, Any], model: AFTPyramid) -> dict[str, Any]:
    """Unwrap a checkpoint; the weights of a pyramid are the same at every size."""
    return state_dict.get('model', state_dict)


def _create_pyramid(variant: str, pretrained: bool = False, **kwargs: Any) -> AFTPyramid:
    model = build_model_with_cfg(
        AFTPyramid,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=(0, 1, 2, 3), flatten_sequential=True),
        **kwargs,
    )
    forget_classes(model, pretrained, TINY_IMAGENET)
    return model


def _cfg() -> dict[str, Any]:
    return {
        'num_classes': 1000,
        'input_size': (3, 224, 224),
        'pool_size': (7, 7),
        'crop_pct': 0.875,
        'interpolation': 'bicubic',
        'mean': IMAGENET_DEFAULT_MEAN,
        'std': IMAGENET_DEFAULT_STD,
        'first_conv': 'stem.conv',
        'classifier': 'head.fc',
    }


# No other weights are published: without a file or a URL, pretrained=True raises timm's error.
default_cfgs = generate_default_cfgs(
    {
        'aft_pyramid_pico.tiny_imagenet': {
            **_cfg(),
            **packaged_cfg('aft_pyramid_pico.tiny_imagenet', TINY_IMAGENET),
            'pool_size': (3, 3),
        },
        'aft_pyramid_nano': _cfg(),
        'aft_pyramid_tiny': _cfg(),
    }
)


@register_model
def aft_pyramid_pico(pretrained: bool = False, **kwargs: Any) -> AFTPyramid:
    """AFT pyramid pico, of about the time of CPUBone-Nano in onnxruntime; ours."""
    sizes: dict[str, Any] = dict(dims=(16, 32, 96, 192), depths=(1, 1, 2, 4), num_heads=8, head_hidden_size=1024)
    return _create_pyramid('aft_pyramid_pico', pretrained, **{**sizes, 'local_conv': True, **kwargs})


@register_model
def aft_pyramid_nano(pretrained: bool = False, **kwargs: Any) -> AFTPyramid:
    """AFT pyramid nano, of about the size of CPUBone-B0; ours."""
    model_args = dict(depths=(1, 1, 2, 6), head_hidden_size=3072, local_conv=True)
    return _create_pyramid('aft_pyramid_nano', pretrained, **dict(model_args, **kwargs))


@register_model
def aft_pyramid_tiny(pretrained: bool = False, **kwargs: Any) -> AFTPyramid:
    """AFT pyramid tiny, of about the size of CPUBone-B1; ours."""
    model_args = dict(depths=(1, 1, 4, 8), head_hidden_size=3072, local_conv=True)
    return _create_pyramid('aft_pyramid_tiny', pretrained, **dict(model_args, **kwargs))
