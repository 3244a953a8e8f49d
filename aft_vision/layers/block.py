"""The parts around a mixer: the patch embedding of images, and the pre-norm block of every model."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import (
    DropPath,
    Format,
    LayerNorm,
    LayerScale,
    Mlp,
    PatchEmbed,
    nchw_to,
    register_notrace_function,
)
from torch import Tensor, nn

from aft_vision.layers.base import TokenMixer, build_mixer, find_mixer
from aft_vision.layers.fused import fuse_linear, fuse_mlp


@torch.fx.wrap
@register_notrace_function
def check_image_size(
    x: Tensor, patch_size: tuple[int, int], img_size: tuple[int, int], strict: bool, pad: bool
) -> None:
    """Raise a ValueError if a strict model gets another size, or images are neither whole patches nor padded."""
    height, width = x.shape[2], x.shape[3]
    if strict:
        if height != img_size[0] or width != img_size[1]:
            raise ValueError(
                f'the model takes images of {img_size[0]} x {img_size[1]} pixels, got {height} x {width}: '
                'use set_input_size or dynamic_img_size=True'
            )
    elif not pad and (height % patch_size[0] != 0 or width % patch_size[1] != 0):
        raise ValueError(
            f'image height and width must be multiples of the patch size {patch_size[0]} x {patch_size[1]}, '
            f'got {height} x {width}; dynamic_img_pad=True pads others'
        )


@torch.fx.wrap
@register_notrace_function
@torch.jit.ignore
def fix_trained_size(x: Tensor) -> None:
    """Make the height and width of images (B, C, H, W) constants of a graph that `torch.compile` makes for gradients.

    Such a graph has one image size, and another size makes another graph, as in timm's models. Inductor cannot compile
    the gradient of a resampling to an open size, nor on a CPU maps of tokens that a convolution reads.
    """
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting() and torch.is_grad_enabled():
        torch._dynamo.mark_static(x, 2)
        torch._dynamo.mark_static(x, 3)


class AFTPatchEmbed(PatchEmbed):
    """timm's patch embedding with its checks as ValueError.

    timm's checks format the height and width into a message at every call. `torch.compile` and `torch.export` then
    treat the size as a constant and build one graph per size.
    """

    @torch.jit.ignore
    def fuse(self) -> 'AFTPatchEmbed':
        """Fuse the projection for inference.

        Returns:
            The module itself, as `timm.utils.reparameterize_model` expects.
        """
        fuse_linear(self)
        return self

    def forward(self, x: Tensor) -> Tensor:
        check_image_size(x, self.patch_size, self.img_size, self.strict_img_size, self.dynamic_img_pad)
        if self.dynamic_img_pad:
            height, width = self.patch_size
            x = F.pad(x, (0, (width - x.shape[3] % width) % width, 0, (height - x.shape[2] % height) % height))
        x = self.proj(x)
        if self.flatten:
            x = x.flatten(2).transpose(1, 2)  # (B, T, C)
        elif self.output_fmt != Format.NCHW:
            x = nchw_to(x, self.output_fmt)
        return self.norm(x)


class AFTBlock(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)), under timm's attribute names, so that DeiT keys map one to one.

    Args:
        dim: channels C.
        mixer: 'full', 'local', 'simple', 'conv', 'onehot' or 'axial'; or a class of mixers.
        mlp_ratio: hidden width of the MLP divided by C.
        proj_drop: dropout rate after the mixer and in the MLP.
        init_values: initial value of layer scale; None leaves it out.
        drop_path: stochastic-depth rate of both branches.
        kwargs: passed to the mixer.
    """

    def __init__(
        self,
        dim: int,
        mixer: str | type[TokenMixer] = 'conv',
        mlp_ratio: float = 4.0,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        init_values: float | None = None,
        drop_path: float = 0.0,
        norm_layer: Callable[..., nn.Module] = LayerNorm,
        act_layer: Callable[..., nn.Module] = nn.GELU,
        mlp_layer: Callable[..., nn.Module] = Mlp,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.norm1 = norm_layer(dim, **dd)
        mixer_args: dict[str, Any] = {'proj_bias': proj_bias, 'proj_drop': proj_drop, **kwargs, **dd}
        self.attn = build_mixer(find_mixer(mixer) if isinstance(mixer, str) else mixer, dim, **mixer_args)
        self.ls1 = LayerScale(dim, init_values, **dd) if init_values else nn.Identity()
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2 = norm_layer(dim, **dd)
        self.mlp = mlp_layer(
            in_features=dim,
            hidden_features=int(dim * mlp_ratio),
            act_layer=act_layer,
            bias=proj_bias,
            drop=proj_drop,
            **dd,
        )
        self.ls2 = LayerScale(dim, init_values, **dd) if init_values else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    @torch.jit.ignore
    def fuse(self) -> 'AFTBlock':
        """Fuse the mixer and the MLP for inference.

        A hook that keeps the output of `mlp.fc1` must copy it: the GELU overwrites it.

        Returns:
            The block itself, as `timm.utils.reparameterize_model` expects.
        """
        self.attn.fuse()
        fuse_mlp(self.mlp)
        return self

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), grid, mask)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
