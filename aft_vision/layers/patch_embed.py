"""Patch embedding whose size checks keep the image size symbolic."""

import torch.nn.functional as F
from timm.layers import Format, PatchEmbed, nchw_to, register_notrace_function
from torch import Tensor


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
            f'got {height} x {width}'
        )


class AFTPatchEmbed(PatchEmbed):
    """timm's patch embedding with its checks as ValueError.

    timm's checks format the height and width into a message at every call. `torch.compile` and `torch.export` then
    treat the size as a constant and build one graph per size.
    """

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
