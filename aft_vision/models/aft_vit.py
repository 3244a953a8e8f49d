"""AFT vision transformers on timm's VisionTransformer (AFT Sec. 5.3, Tables 7 to 12).

The blocks mix tokens with an AFT operation instead of attention. Everything else (patch embedding, head, pooling,
position embedding, feature extraction, checkpointing) is timm's. Importing this module registers the `aft_*` models.

@article{zhai2021attention,
  title={An Attention Free Transformer},
  author={Zhai, Shuangfei and Talbott, Walter and Srivastava, Nitish and Huang, Chen and Goh, Hanlin and Zhang, Ruixiang
    and Susskind, Josh},
  journal={arXiv preprint arXiv:2105.14103},
  year={2021}
}
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import (
    global_pool_nlc,
    register_notrace_function,
    to_2tuple,
)
from timm.models import build_model_with_cfg, checkpoint, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from aft_vision.layers import AFTBlock, AFTPatchEmbed, fix_trained_size, token_mixers
from aft_vision.layers.base import TokenMixer, find_mixer, split_arguments, undecayed
from aft_vision.models.attention_block import AttentionBlock, attention_heads, check_attention_blocks
from aft_vision.models.deit_transfer import deit_to_aft, is_deit_like
from aft_vision.models.naflex import compute_on_patches, read_patches
from aft_vision.models.state_dict import resample_patches, resample_rows
from aft_vision.models.transfer_report import TransferReport, describe_transfer
from aft_vision.models.weight_files import forget_classes, packaged_cfg

_logger = logging.getLogger(__name__)

# The classes of Imagenette by their identifiers in WordNet: tench, English springer, cassette player, chain saw,
# church, French horn, garbage truck, gas pump, golf ball, parachute.
IMAGENETTE = tuple(
    'n01440764 n02102040 n02979186 n03000684 n03028079 n03394916 n03417042 n03425413 n03445777 n03888257'.split()
)


class AFTVisionTransformer(VisionTransformer):
    """A vision transformer with AFT token mixers (AFT Sec. 5.3).

    With a mixer of a grid ('conv', 'onehot' or 'axial') it takes any input size: no class token, no position
    embedding, average pooling after the final norm. The others keep DeiT's class token and position embedding and a
    fixed size; `dynamic_img_size=True` resamples position embedding and position biases at run time, `set_input_size`
    once.

    Args:
        img_size: input size in pixels, one number or (H, W); for mixers of a grid only the nominal one.
        patch_size: patch size in pixels.
        global_pool: as in timm; None means 'token' with a class token, else 'avg'.
        num_heads: heads h of the mixers of a grid, which divide embed_dim; None means one per channel. The other mixers
            have one bias for all channels, and take no other number than 1.
        mixer: 'conv', 'full', 'local', 'simple', 'axial' (ours), 'onehot', which `aft_vision.models.harden` makes of
            a Gumbel-trained 'conv', or a name of `aft_vision.layers.register_mixer`.
        mixer_args: arguments of the mixer's class by name. Each is also an argument of the model; those of the paper's
            mixers, and of ours, are below.
        class_token: None is False with mixers of a grid, where it is not possible, else True.
        pos_embed: as timm; None is 'none' with mixers of a grid, else 'learn'.
        fc_norm: as timm; None is False with mixers of a grid (the final norm comes before pooling), else timm's rule.
        query_gate: False removes W_q and the sigmoid (Table 12).
        kernel_size: s of AFT-conv, in tokens, odd; 11 by default. A one-hot model uses it only for pictures.
        standardize_kernel: False trains AFT-conv's raw kernel (Table 10), or AFT-axial's raw biases.
        global_context: False removes AFT-conv's context outside the window (Sec. 5.3).
        gumbel: True keeps one offset per head of AFT-conv (AFT Eq. 10).
        tau: temperature of its Gumbel softmax, only with gumbel=True; 0.5 by default.
        straight_through: True samples one offset per head in training, with the gradient of the Gumbel softmax.
        window_size: s of AFT-local, in tokens along the sequence; of AFT-axial along both axes, or (rows, columns), 14
            by default.
        factorize_bias: False stores the whole bias of AFT-full or AFT-local (Table 9).
        bias_dim: width d' of their factors; 128 by default.
        resample_bias: True stretches AFT-axial's biases over a grid of another size; else distances from s on have no
            bias.
        local_conv: True adds a 3 x 3 depthwise convolution of the values to the result of a mixer of a grid.
        attention_blocks: indices of blocks with timm's softmax attention, embed_dim / 64 heads, in place of the mixer.
        kwargs: of the mixer, and of timm's VisionTransformer.

    Raises:
        TypeError: an argument that is unknown or not supported by the mixer.
        ValueError: arguments that contradict each other.
    """

    # TorchScript reads Final annotations only from the last subclass, but these from every class.
    __constants__: ClassVar[list[str]] = ['dynamic_img_size', 'passes_grid']
    __jit_unused_properties__: ClassVar[list[str]] = ['embeds']

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        global_pool: str | None = None,
        embed_dim: int = 384,
        num_heads: int | None = None,
        mixer: str = 'conv',
        mixer_args: Mapping[str, Any] | None = None,
        class_token: bool | None = None,
        pos_embed: str | None = None,
        fc_norm: bool | None = None,
        dynamic_img_size: bool = False,
        query_gate: bool = True,
        attention_blocks: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        mixer_class = find_mixer(mixer)
        on_grid, has_positions = mixer_class.on_grid, mixer_class.depends_on_positions()
        class_token = (not on_grid) if class_token is None else class_token
        _check_arguments(mixer_class, num_heads, class_token, dynamic_img_size, kwargs)
        attention_blocks = attention_blocks or ()
        check_attention_blocks(attention_blocks, range(kwargs.get('depth', 12)))
        heads = {'num_heads': num_heads} if 'num_heads' in mixer_class.arguments() else {}
        chosen, kwargs = split_arguments(mixer, {**kwargs, **heads}, mixer_args)
        block_args: dict[str, Any] = {'mixer': mixer, 'query_gate': query_gate, **chosen}
        taken = mixer_class.parameters_of_init()
        has_tokens = 'num_tokens' in taken
        if has_tokens:
            sizes = zip(to_2tuple(img_size), to_2tuple(patch_size), strict=True)
            height, width = (size // patch for size, patch in sizes)
            prefix = int(class_token) + kwargs.get('reg_tokens', 0)
            tokens: dict[str, Any] = {'num_tokens': height * width + prefix, 'grid': (height, width)}
            block_args |= {name: value for name, value in tokens.items() if name in taken}
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            global_pool=('token' if class_token else 'avg') if global_pool is None else global_pool,  # type: ignore[arg-type]
            embed_dim=embed_dim,
            num_heads=attention_heads(embed_dim),  # of attention pooling and attention blocks
            class_token=class_token,
            pos_embed=('none' if on_grid else 'learn') if pos_embed is None else pos_embed,
            fc_norm=False if on_grid and fc_norm is None else fc_norm,
            dynamic_img_size=on_grid or dynamic_img_size,
            # timm passes the arguments of attention to a block; add the arguments of the mixer.
            block_fn=_BlockFactory(block_args, attention_blocks),  # type: ignore[arg-type]
            **{'embed_layer': AFTPatchEmbed, **kwargs},
        )
        # A fixed grid is not passed, so that a fixed model's graph has constant position biases.
        self.passes_grid = self.dynamic_img_size and has_positions
        self.drops_patches = kwargs.get('patch_drop_rate', 0.0) > 0
        self.resamples = self.dynamic_img_size and (self.pos_embed is not None or has_tokens)
        # With a mask, a padded image has the tokens of the image alone, unless biases are stretched over the grid.
        self.pads_exactly = on_grid and not chosen.get('resample_bias')

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Return timm's position parameters, and what the mixers name: AFT's position biases."""
        return super().no_weight_decay() | undecayed(self)

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Change the input size: resample patch embedding, position embedding and position biases.

        Args:
            img_size: in pixels; None keeps it.
            patch_size: in pixels; None keeps it.
        """
        old_grid = self.patch_embed.grid_size
        if patch_size is not None:
            for info in self.feature_info:
                info['reduction'] = max(to_2tuple(patch_size))
        super().set_input_size(None if img_size is None else to_2tuple(img_size), patch_size)  # type: ignore[arg-type]
        if self.patch_embed.grid_size == old_grid:
            return
        for mixer in token_mixers(self):
            mixer.set_grid(self.patch_embed.grid_size)

    def _embed(self, x: Tensor, attn_mask: Tensor | None) -> tuple[Tensor, tuple[int, int] | None, Tensor | None]:
        # Tokens (B, T, C), their grid where the blocks need it, and their mask (B, T).
        if attn_mask is not None and self.training and self.drops_patches:
            raise ValueError('attn_mask needs patch_drop_rate = 0 in training, which drops other tokens in each image')
        if self.resamples and not torch.jit.is_scripting():
            fix_trained_size(x)
        height, width = self.patch_embed.dynamic_feat_size((x.shape[2], x.shape[3]))
        x = self.patch_embed(x)
        grid: tuple[int, int] | None = None
        if self.passes_grid:
            grid = (x.shape[1], x.shape[2])
        if self.pos_embed is None and self.num_prefix_tokens == 0:
            x = x.flatten(1, 2) if self.dynamic_img_size else x
            # The convolution's output is strided in the channels, and all blocks would keep that layout.
            x = x.contiguous()
        else:
            x = self._pos_embed(x)
        mask = _token_mask(attn_mask, height, width, self.num_prefix_tokens, self.attn_pool is None)
        return self.norm_pre(self.patch_drop(x)), grid, mask

    # No causal form: only the pixel and character models, which are sequences, have one.
    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Compute the tokens after the final norm.

        Args:
            x: (B, 3, H, W) images, or a dict of timm's NaFlex collator, whose images keep their own grids.
            attn_mask: (B, tokens) or (B, H / patch, W / patch) bool, True where a patch counts: for a padded batch of
                mixed sizes.

        Returns:
            (B, T, C), prefix tokens first; for a dict these as 'patches', with 'patch_valid', as timm's NaFlexVit.
        """
        # Two conditions, of which TorchScript leaves out what is below the first.
        if not torch.jit.is_scripting():  # noqa: SIM102
            if isinstance(x, dict):
                return self._patch_features(x, attn_mask)
        x, grid, mask = self._embed(x, attn_mask)
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = checkpoint(block, x, grid, mask)
            else:
                x = block(x, grid, mask)
        return self.norm(x)

    def forward_intermediates(  # type: ignore[override]
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
    ) -> Any:
        """Compute the final features and those after chosen blocks, as timm's `forward_intermediates`.

        Args:
            x: (B, 3, H, W) images, or a dict of timm's NaFlex collator.
            indices: the last n blocks for a number, these blocks for a list, all for None.
            return_prefix_tokens: return (spatial, prefix) pairs.
            norm: apply the final norm to each.
            stop_early: stop after the last chosen block.
            output_fmt: 'NCHW' or 'NLC'.
            intermediates_only: leave the final features out.
            output_dict: return a dict with 'image_features', 'image_intermediates' and 'image_intermediates_prefix'.
            attn_mask: as in `forward_features`.

        Raises:
            ValueError: output_fmt is neither of the two, or 'NCHW' for a dict, whose images have no common grid.
        """
        formats = ('NLC',) if isinstance(x, dict) else ('NCHW', 'NLC')
        if output_fmt not in formats:
            raise ValueError(f'output_fmt must be {" or ".join(map(repr, formats))}, got {output_fmt!r}')
        taken, last = feature_take_indices(len(self.blocks), indices)
        count = last + 1 if stop_early else len(self.blocks)
        compute = partial(self._block_outputs, taken=taken, count=count, norm=norm, final=not intermediates_only)
        valid: Tensor | None = None
        if isinstance(x, dict):
            tokens, valid = self._on_patches(compute, x, attn_mask)
        else:
            tokens = compute(x, attn_mask)
        features = None if intermediates_only else tokens.pop()
        prefixes = [y[:, : self.num_prefix_tokens] for y in tokens]
        maps = [y[:, self.num_prefix_tokens :] for y in tokens]
        if output_fmt == 'NCHW':
            size = self.patch_embed.dynamic_feat_size((x.shape[2], x.shape[3]))
            maps = [y.transpose(1, 2).unflatten(2, size).contiguous() for y in maps]
        has_prefix = return_prefix_tokens and self.num_prefix_tokens > 0
        return _pack_intermediates(features, maps, prefixes if has_prefix else None, valid, output_dict)

    def _block_outputs(
        self, x: Tensor, attn_mask: Tensor | None, taken: Sequence[int], count: int, norm: bool, final: bool
    ) -> list[Tensor]:
        # Tokens after the taken ones of the first `count` blocks, and, if wanted, the final features.
        x, grid, mask = self._embed(x, attn_mask)
        outputs: list[Tensor] = []
        for i, block in enumerate(self.blocks[:count]):
            x = checkpoint(block, x, grid, mask) if self.grad_checkpointing else block(x, grid, mask)
            if i in taken:
                outputs.append(self.norm(x) if norm else x)
        return [*outputs, self.norm(x)] if final else outputs

    @property
    def embeds(self) -> nn.Module:
        """Return the patch embedding, where scripts of timm look for the patch size of NaFlex batches."""
        return self.patch_embed

    @torch.jit.unused
    def _patch_features(self, batch: dict[str, Any], attn_mask: Tensor | None) -> Any:
        # Return what timm's NaFlexVit returns for a dict.
        (tokens,), valid = self._on_patches(lambda x, mask: [self.forward_features(x, mask)], batch, attn_mask)
        return {'patches': tokens, 'patch_valid': valid}

    def _on_patches(
        self,
        compute: Callable[[Tensor, Tensor | None], list[Tensor]],
        batch: dict[str, Any],
        attn_mask: Tensor | None,
    ) -> tuple[list[Tensor], Tensor]:
        # Results of a function of images and a mask for a dict of timm's NaFlex collator, and its valid patches.
        if attn_mask is not None:
            raise ValueError('attn_mask must be None for a dict, whose mask is patch_valid')
        if self.training and self.drops_patches:
            raise ValueError('a dict of patches needs patch_drop_rate = 0 in training')
        if self.attn_pool is not None:
            raise ValueError("images of mixed sizes need global_pool='avg', 'max' or 'token', got attention pooling")
        size = self.patch_embed.patch_size
        patches = read_patches(batch, size, self.patch_embed.proj.in_channels)
        pads = self.pads_exactly and self.pos_embed is None
        return compute_on_patches(compute, patches, size, pads), patches.valid

    def forward_head(self, x: Tensor, pre_logits: bool = False, attn_mask: Tensor | None = None) -> Tensor:
        """Compute logits (B, classes) of tokens (B, T, C), or with pre_logits the input of the classifier."""
        if self.attn_pool is not None:
            x = self.pool(x)
        else:
            x = pool_tokens(x, attn_mask, self.global_pool, self.num_prefix_tokens, self.pool_include_prefix)
        x = self.head_drop(self.fc_norm(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Compute logits (B, classes) of images (B, 3, H, W) or a dict of patches; attn_mask as `forward_features`."""
        if not torch.jit.is_scripting():  # noqa: SIM102
            if isinstance(x, dict):
                features = self.forward_features(x, attn_mask)
                return self.forward_head(features['patches'], attn_mask=features['patch_valid'])
        return self.forward_head(self.forward_features(x, attn_mask), attn_mask=attn_mask)


def _pack_intermediates(
    features: Tensor | None,
    maps: list[Tensor],
    prefixes: list[Tensor] | None,
    valid: Tensor | None,
    output_dict: bool,
) -> Any:
    # What timm returns; None is left out.
    if output_dict:
        outputs = {
            'patch_valid': valid,
            'image_intermediates': maps,
            'image_intermediates_prefix': prefixes,
            'image_features': features,
        }
        return {name: value for name, value in outputs.items() if value is not None}
    intermediates = maps if prefixes is None else list(zip(maps, prefixes, strict=True))
    return intermediates if features is None else (features, intermediates)


# A mask is a leaf for FX, which cannot branch on whether a traced argument is None.
@torch.fx.wrap
@register_notrace_function
def _token_mask(mask: Tensor | None, height: int, width: int, num_prefix_tokens: int, maskable: bool) -> Tensor | None:
    # (B, T): prefix tokens always count.
    if mask is None:
        return None
    if not maskable:
        raise ValueError('attention pooling takes no attn_mask')
    shape = list(mask.shape[1:])
    if mask.dtype != torch.bool or (shape != [height * width] and shape != [height, width]):
        raise ValueError(
            f'attn_mask must be a bool tensor of shape (B, {height}, {width}) or (B, {height * width}), True where a '
            f'patch counts, got {mask.dtype} of shape {list(mask.shape)}'
        )
    return _with_prefix(mask.flatten(1), num_prefix_tokens)


def _with_prefix(mask: Tensor, num_prefix_tokens: int) -> Tensor:
    return torch.cat([mask.new_ones(mask.shape[0], num_prefix_tokens), mask], dim=1)


@torch.fx.wrap
@register_notrace_function
def pool_tokens(x: Tensor, mask: Tensor | None, pool_type: str, num_prefix_tokens: int, include_prefix: bool) -> Tensor:
    """Pool tokens (B, T, C) to (B, C) as timm does, with a mask (B, T) over those that count."""
    if mask is None or pool_type == '' or pool_type == 'token':
        # Without a prefix, a full slice would stay in the graph, and Core ML's converter does not support it.
        return global_pool_nlc(x, pool_type, num_prefix_tokens, include_prefix or num_prefix_tokens == 0)
    mask = _with_prefix(mask.flatten(1), num_prefix_tokens)
    if not include_prefix:
        x, mask = x[:, num_prefix_tokens:], mask[:, num_prefix_tokens:]
    weight = mask.unsqueeze(-1)
    # A sum over many tokens overflows in float16.
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean = (x.masked_fill(~weight, 0.0).sum(1, dtype=dtype) / weight.sum(1).clamp(min=1)).to(x.dtype)
    if pool_type == 'avg':
        return mean
    peak = x.masked_fill(~weight, float('-inf')).amax(1).masked_fill(~weight.any(1), 0.0)
    return peak if pool_type == 'max' else 0.5 * (peak + mean)


class _BlockFactory:
    """Builds AFTBlocks and attention blocks from the arguments that timm's VisionTransformer gives its blocks."""

    # Arguments that only attention has; AFT accepts only their default values.
    attention_only: ClassVar[dict[str, Any]] = {
        'qk_norm': False,
        'scale_attn_norm': False,
        'scale_mlp_norm': False,
        'attn_drop': 0.0,
    }

    def __init__(self, block_args: dict[str, Any], attention_blocks: Sequence[int]) -> None:
        self.block_args, self.attention_blocks = block_args, attention_blocks

    def __call__(self, num_heads: int, attn_layer: Any, depth: int, **kwargs: Any) -> AFTBlock | AttentionBlock:
        if depth in self.attention_blocks:
            return AttentionBlock(num_heads=num_heads, attn_layer=attn_layer, depth=depth, **kwargs)
        for name, default in self.attention_only.items():
            if kwargs.pop(name) != default and not self.attention_blocks:
                raise TypeError(f'{name} is an argument of attention, which AFT does not have')
        return AFTBlock(**kwargs, **self.block_args)


def _check_arguments(
    mixer_class: type[TokenMixer],
    num_heads: int | None,
    class_token: bool,
    dynamic_img_size: bool,
    kwargs: dict[str, Any],
) -> None:
    for name in ('block_fn', 'attn_layer'):
        if name in kwargs:
            raise TypeError(f'{name} is an argument of attention; choose the mixer by `mixer`')
    mixer = mixer_class.name
    if mixer_class.on_grid and (class_token or kwargs.get('reg_tokens', 0)):
        raise ValueError(f'mixer={mixer!r} works on a grid and does not support class_token and reg_tokens')
    if 'num_heads' not in mixer_class.arguments() and num_heads not in (None, 1):
        raise ValueError(f'mixer={mixer!r} has no heads: num_heads must be 1, got {num_heads}')
    if not mixer_class.on_grid and kwargs.get('dynamic_img_pad') and not dynamic_img_size:
        raise ValueError(
            'dynamic_img_pad=True needs dynamic_img_size=True, because the position embedding has a fixed size'
        )
    if mixer_class.depends_on_positions() and kwargs.get('patch_drop_rate', 0.0):
        raise ValueError(f'mixer={mixer!r} needs the whole grid: patch_drop_rate must be 0')


def checkpoint_filter_fn(
    state_dict: dict[str, Any], model: AFTVisionTransformer, grid: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Convert a checkpoint of another input or patch size: patch and position parameters are resampled.

    The weights of a DeiT or ViT are transferred by `deit_to_aft`, with a warning that lists what was left out.

    Args:
        grid: (H, W) of the checkpoint in tokens; None takes it from `pretrained_cfg`, the model or a square.
    """
    state_dict = state_dict.get('model', state_dict)
    if is_deit_like(state_dict, model):
        transferred, report = deit_to_aft(state_dict, model, grid=grid)
        _logger.warning(describe_transfer(report, model) + _describe_new_head(report, model))
        return transferred
    own = model.state_dict()
    patches = state_dict.get('patch_embed.proj.weight')

    def resample(rows: Tensor, prefix: int) -> Tensor:
        return resample_rows(rows, model, patches, prefix, grid)

    own_mixers = token_mixers(model)
    mixers: dict[str, Any] = {name: module for name, module in model.named_modules() if module in own_mixers}
    result = {}
    for name, value in state_dict.items():
        if name not in own:
            pass
        elif name == 'patch_embed.proj.weight':
            if value.shape != own[name].shape and value.ndim == 4 and len(value) == len(own[name]):
                value = resample_patches(value, list(own[name].shape[-2:]))
        # The same token count may have another (H, W).
        elif name == 'pos_embed' and value.shape[-1] == own[name].shape[-1]:
            value = resample(value[0], 0 if model.no_embed_class else model.num_prefix_tokens).unsqueeze(0)
        elif (path := name.partition('.attn.'))[0] + '.attn' in mixers:
            mixer = mixers[path[0] + '.attn']
            value = mixer.resample(path[2], value, lambda rows: resample(rows, model.num_prefix_tokens))
        result[name] = value
    return result


def _describe_new_head(report: TransferReport, model: AFTVisionTransformer) -> str:
    # timm compares the number of classes in its configuration, not in the file, and only after the filter.
    classes = (getattr(model, 'pretrained_cfg', None) or {}).get('num_classes', model.num_classes)
    placed = any(each.target == 'head.weight' for outcomes in report.values() for each in outcomes)
    if not placed or classes == model.num_classes:
        return ''
    return f'; timm makes a new head unless pretrained_cfg_overlay has num_classes={model.num_classes}'


def _create_aft(variant: str, pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    model = build_model_with_cfg(
        AFTVisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=kwargs.pop('out_indices', 3), feature_cls='getter'),
        **kwargs,
    )
    forget_classes(model, pretrained, IMAGENETTE)
    return model


def _cfg(fixed_input_size: bool, size: int = 224) -> dict[str, Any]:
    return {
        'num_classes': 1000,
        'input_size': (3, size, size),
        'pool_size': None,
        'crop_pct': 0.875,
        'interpolation': 'bicubic',
        'fixed_input_size': fixed_input_size,
        'mean': IMAGENET_DEFAULT_MEAN,
        'std': IMAGENET_DEFAULT_STD,
        'first_conv': 'patch_embed.proj',
        'classifier': 'head',
        'paper_name': 'An Attention Free Transformer',
        'paper_ids': 'arXiv:2105.14103',
    }


def _imagenette(name: str, fixed_input_size: bool) -> dict[str, Any]:
    return {**_cfg(fixed_input_size), **packaged_cfg(f'{name}.imagenette', IMAGENETTE)}


# No other weights are published: without a file or a URL, pretrained=True raises timm's error.
default_cfgs = generate_default_cfgs(
    {
        'aft_full_nano.imagenette': _imagenette('aft_full_nano', fixed_input_size=True),
        'aft_full_tiny': _cfg(fixed_input_size=True),
        'aft_full_small': _cfg(fixed_input_size=True),
        'aft_full_base': _cfg(fixed_input_size=True),
        'aft_simple_nano.imagenette': _imagenette('aft_simple_nano', fixed_input_size=True),
        'aft_simple_tiny': _cfg(fixed_input_size=True),
        'aft_simple_small': _cfg(fixed_input_size=True),
        'aft_axial_nano.imagenette': _imagenette('aft_axial_nano', fixed_input_size=False),
        'aft_axial_tiny': _cfg(fixed_input_size=False),
        'aft_axial_small': _cfg(fixed_input_size=False),
        'aft_conv_nano.imagenette': _imagenette('aft_conv_nano', fixed_input_size=False),
        'aft_conv_tiny': _cfg(fixed_input_size=False),
        'aft_conv_tiny_k11_h32': _cfg(fixed_input_size=False),
        'aft_conv_small': _cfg(fixed_input_size=False),
        'aft_conv_small_k11_h16': _cfg(fixed_input_size=False),
        'aft_conv_small_k15_h384': _cfg(fixed_input_size=False),
        'aft_conv_base_k25_h32_384': _cfg(fixed_input_size=False, size=384),
    }
)

# Models of ten classes that a CPU trains in an hour: configs/small/imagenette.yaml.
_NANO: dict[str, Any] = dict(patch_size=8, embed_dim=128, depth=6)


@register_model
def aft_full_nano(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-full nano for 96 pixels, patch 8, 6 blocks of width 128: 1.5M parameters; not in the paper."""
    model_args = dict(_NANO, mixer='full')
    return _create_aft('aft_full_nano', pretrained, **dict(model_args, **kwargs))


@register_model
def aft_full_tiny(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-full tiny: 6.3M parameters, 72.4% top-1 (AFT Table 7)."""
    model_args = dict(embed_dim=192, mixer='full')
    return _create_aft('aft_full_tiny', pretrained, **dict(model_args, **kwargs))


@register_model
def aft_full_small(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-full small: 22.7M parameters, 79.8% top-1 (AFT Table 7)."""
    model_args = dict(embed_dim=384, mixer='full')
    return _create_aft('aft_full_small', pretrained, **dict(model_args, **kwargs))


@register_model
def aft_full_base(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-full at DeiT-base's width; not in the paper."""
    model_args = dict(embed_dim=768, mixer='full')
    return _create_aft('aft_full_base', pretrained, **dict(model_args, **kwargs))


@register_model
def aft_simple_nano(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-simple nano for 96 pixels, patch 8, 6 blocks of width 128: 1.2M parameters; not in the paper."""
    model_args = dict(_NANO, mixer='simple')
    return _create_aft('aft_simple_nano', pretrained, **dict(model_args, **kwargs))


@register_model
def aft_simple_tiny(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-simple at DeiT-tiny's width (AFT Eq. 5); not in Table 7."""
    model_args = dict(embed_dim=192, mixer='simple')
    return _create_aft('aft_simple_tiny', pretrained, **dict(model_args, **kwargs))


@register_model
def aft_simple_small(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-simple at DeiT-small's width (AFT Eq. 5); not in Table 7."""
    model_args = dict(embed_dim=384, mixer='simple')
    return _create_aft('aft_simple_small', pretrained, **dict(model_args, **kwargs))


@register_model
def aft_axial_nano(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-axial nano for 96 pixels, patch 8, 6 blocks of width 128, 16 heads: 1.1M parameters; ours."""
    model_args = dict(_NANO, img_size=96, mixer='axial', num_heads=16, window_size=12)
    return _create_aft('aft_axial_nano', pretrained, **dict(model_args, **kwargs))


@register_model
def aft_axial_tiny(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-axial at DeiT-tiny's width, 32 heads: 5.3M parameters; ours."""
    model_args = dict(embed_dim=192, mixer='axial', num_heads=32, window_size=14)
    return _create_aft('aft_axial_tiny', pretrained, **dict(model_args, **kwargs))


@register_model
def aft_axial_small(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-axial at DeiT-small's width, 16 heads: 20.3M parameters; ours."""
    model_args = dict(embed_dim=384, mixer='axial', num_heads=16, window_size=14)
    return _create_aft('aft_axial_small', pretrained, **dict(model_args, **kwargs))


@register_model
def aft_conv_nano(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-conv nano for 96 pixels, patch 8, 6 blocks of width 128, kernel 11: 1.3M parameters; not in the paper."""
    model_args = dict(_NANO, img_size=96, mixer='conv', num_heads=128, kernel_size=11)
    return _create_aft('aft_conv_nano', pretrained, **dict(model_args, **kwargs))


@register_model
def aft_conv_tiny(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-conv tiny, 11x11 kernel, 192 heads: 6.0M parameters, 74.8% top-1 (AFT Table 7)."""
    model_args = dict(embed_dim=192, mixer='conv', num_heads=192, kernel_size=11)
    return _create_aft('aft_conv_tiny', pretrained, **dict(model_args, **kwargs))


@register_model
def aft_conv_tiny_k11_h32(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-conv tiny, 11x11 kernel, 32 heads: 5.4M parameters, 73.9% top-1 (AFT Table 7)."""
    model_args = dict(embed_dim=192, mixer='conv', num_heads=32, kernel_size=11)
    return _create_aft('aft_conv_tiny_k11_h32', pretrained, **dict(model_args, **kwargs))


@register_model
def aft_conv_small(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-conv small, 11x11 kernel, 384 heads: 22.5M parameters, 80.8% top-1 (AFT Table 7)."""
    model_args = dict(embed_dim=384, mixer='conv', num_heads=384, kernel_size=11)
    return _create_aft('aft_conv_small', pretrained, **dict(model_args, **kwargs))


@register_model
def aft_conv_small_k11_h16(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-conv small, 11x11 kernel, 16 heads: 20.3M parameters, 80.2% top-1 (AFT Table 7)."""
    model_args = dict(embed_dim=384, mixer='conv', num_heads=16, kernel_size=11)
    return _create_aft('aft_conv_small_k11_h16', pretrained, **dict(model_args, **kwargs))


@register_model
def aft_conv_small_k15_h384(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-conv small, 15x15 kernel, 384 heads: 23.0M parameters, 81.0% top-1 (AFT Table 7)."""
    model_args = dict(embed_dim=384, mixer='conv', num_heads=384, kernel_size=15)
    return _create_aft('aft_conv_small_k15_h384', pretrained, **dict(model_args, **kwargs))


@register_model
def aft_conv_base_k25_h32_384(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-conv base at 384 pixels, 25x25 kernel, 32 heads: 79.9M parameters, 83.4% from DeiT-base (AFT Table 8)."""
    model_args = dict(img_size=384, embed_dim=768, mixer='conv', num_heads=32, kernel_size=25)
    return _create_aft('aft_conv_base_k25_h32_384', pretrained, **dict(model_args, **kwargs))
