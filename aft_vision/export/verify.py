"""Comparison of an exported program with its model."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from timm.models import get_model_input_config
from torch import Tensor, nn

from aft_vision.layers import AFTConv, mixers_of
from aft_vision.sizes import resize_model

Size = tuple[int, int]


@dataclass(frozen=True)
class InputShape:
    """The inputs of an exported program.

    Args:
        size: (H, W) in pixels, at least of the example.
        fixed_size: Whether this is the only size.
        batch: Fixed batch size; None allows any.
    """

    size: Size
    fixed_size: bool
    batch: int | None = None


@dataclass(frozen=True)
class Check:
    """Differences between an exported file and PyTorch on random images.

    Args:
        size: (H, W) of the images, in pixels.
        batch: Number of images.
        difference: Largest difference of a logit, relative to the largest logit.
    """

    size: Size
    batch: int
    difference: float


def channels(model: nn.Module) -> int:
    """Return the number of image channels."""
    return get_model_input_config(model)['input_size'][0]


def onnx_runner(path: str | Path, threads: int = 0) -> Callable[[Tensor], Tensor]:
    """Load an ONNX file as a function of images, in onnxruntime on the CPU.

    Args:
        threads: 0 lets onnxruntime choose.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(np.asarray(session.run(None, {name: images.numpy()})[0]))


def grid_steps(model: nn.Module) -> tuple[Size, int]:
    """Return the pixels of a step in height and width, and the least number of steps of a program of any size.

    torch.export makes a constant of a grid of one token, in a pyramid of its last stage.
    """
    patch = getattr(getattr(model, 'patch_embed', None), 'patch_size', None)
    return ((1, 1), getattr(model, 'stride', 1) + 1) if patch is None else (patch, 2)


def smallest_size(model: nn.Module) -> Size:
    """Return the smallest (H, W) in pixels of a program of torch.export of any size."""
    (height, width), min_steps = grid_steps(model)
    return min_steps * height, min_steps * width


@torch.no_grad()
def verify(model: nn.Module, shape: InputShape, program: Callable[[Tensor], Tensor], tolerance: float) -> list[Check]:
    """Compare a program with its model in float32.

    Raises:
        ValueError: they differ by more than the tolerance, or a value is not finite.
    """
    model = copy.deepcopy(model).cpu().float().eval()
    checks = []
    for number, (batch, size) in enumerate(_cases(model, shape)):
        images = torch.randn(batch, channels(model), *size, generator=torch.Generator().manual_seed(number))
        expected, got = resize_model(model, size)(images), program(images)
        largest = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
        difference = ((got - expected).abs().max() / largest).item()
        if not difference <= tolerance:
            raise ValueError(
                f'expected the exported logits within {tolerance:.0e} of the largest one of PyTorch, got '
                f'{difference:.1e} for {batch} images of {size[0]} x {size[1]}; nothing was written'
            )
        checks.append(Check(size, batch, difference))
    return checks


def _cases(model: nn.Module, shape: InputShape) -> list[tuple[int, Size]]:
    # The model's size and, if sizes are dynamic, a rectangle and a size with more tokens than the kernel.
    batches = (1, 3) if shape.batch is None else (shape.batch, shape.batch)
    if shape.fixed_size:
        return [(batch, shape.size) for batch in sorted(set(batches))]
    (height, width), min_steps = grid_steps(model)
    rows, columns = shape.size[0] // height, shape.size[1] // width
    kernels = [mixer.kernel.weight.shape[-1] for mixer in mixers_of(model, AFTConv)]
    largest = max([rows, columns, *kernels])
    grids = [(rows, columns), (max(rows // 2, min_steps), columns + 1), (largest + 2, largest + 1)]
    sizes = [(y * height, x * width) for y, x in grids]
    return list(zip((batches[0], batches[1], batches[0]), sizes, strict=True))
