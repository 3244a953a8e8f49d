"""Latency of ONNX files in onnxruntime, compared in one process."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from aft_vision.export.program import export_onnx, matrix_bytes
from aft_vision.export.verify import Shape, channels, onnx_runner
from aft_vision.layers import AFTConv
from aft_vision.timing import time_interleaved

_logger = logging.getLogger(__name__)

# DeiT models by width.
PEERS = {192: 'deit_tiny_patch16_224', 384: 'deit_small_patch16_224', 768: 'deit_base_patch16_224'}
# The matrix form is not timed if its matrices have more bytes than this.
MOST_MATRICES = 2**30
SECONDS_PER_TURN = 0.2


def time_files(
    files: Mapping[str, str | Path],
    images: Tensor,
    threads: int = 1,
    rounds: int = 15,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Time ONNX files on the same images in onnxruntime, in turns.

    Args:
        files: Paths by name; the others are compared with the first.
        images: (B, 3, H, W) float32.
        threads: Threads per operator; 0 lets onnxruntime choose.
        rounds: Turns of every file. A turn repeats the call for about 0.2 s.
        progress: Show a progress bar on standard error.

    Returns:
        For each file `name`, `milliseconds` of a call (median over the rounds), `ratio`, the median over the rounds of
        the speed relative to the first file, and its quartiles `ratio_range`.

    Raises:
        ValueError: there is no file or no round.
    """
    runners = [onnx_runner(path, threads) for path in files.values()]
    timings = time_interleaved(
        [partial(run, images) for run in runners],
        torch.device('cpu'),
        rounds,
        warmup=2,
        least_seconds=SECONDS_PER_TURN,
        progress=progress,
    )
    return [
        {'name': name, 'milliseconds': 1000 * found.seconds, 'ratio': found.ratio, 'ratio_range': list(found.quartiles)}
        for name, found in zip(files, timings, strict=True)
    ]


def find_peer(model: nn.Module) -> str:
    """Return the name of the DeiT of a model's width.

    Raises:
        ValueError: there is none.
    """
    width: Any = model.num_features
    if width not in PEERS:
        raise ValueError(f'expected a model as wide as a DeiT, one of {", ".join(map(str, PEERS))}, got {width}')
    if not (hasattr(model, 'patch_embed') and hasattr(model, 'blocks')):
        raise ValueError(f'expected a model with the patches and blocks of a DeiT, got a {type(model).__name__}')
    return PEERS[width]


def write_peers(model: nn.Module, folder: Path, shape: Shape, opset: int, form: str = 'conv') -> dict[str, Path]:
    """Write the ONNX files that an exported model's latency is compared with, at the size of the shape.

    Args:
        model: An exported model of the width of a DeiT.
        form: The form of the exported model.

    Returns:
        ONNX files by name: DeiT of the same width, depth, patch and classes with random weights, and the other forms of
        an AFT-conv at this size. A matrix form of more than 1 GiB is left out.

    Raises:
        ValueError: there is no DeiT of that width.
    """
    peer_name = find_peer(model)
    source: Any = model
    fixed = Shape(shape.size, True, shape.batch)
    peer = timm.create_model(
        peer_name,
        img_size=shape.size,
        patch_size=source.patch_embed.patch_size,
        in_chans=channels(model),
        num_classes=source.num_classes,
        depth=len(source.blocks),
    )
    files = {peer_name.partition('_patch')[0]: (peer, 'conv')}
    if any(isinstance(module, AFTConv) for module in model.modules()):
        files['conv, one size'] = (model, 'conv')
        size = matrix_bytes(model, shape.size)
        if size > MOST_MATRICES:
            _logger.warning('the form matmul is not timed: its matrices take %d MiB', size >> 20)
        elif form != 'matmul':
            files['matmul, one size'] = (model, 'matmul')
    paths: dict[str, Path] = {}
    for name, (candidate, own_form) in files.items():
        paths[name] = folder / f'{len(paths)}.onnx'
        export_onnx(candidate, paths[name], fixed, form=own_form, opset=opset)
    return paths


def measure_latency(
    model: nn.Module,
    path: Path,
    folder: Path,
    shape: Shape,
    *,
    form: str = 'conv',
    opset: int = 20,
    threads: int = 1,
    rounds: int = 15,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Time an exported ONNX file against DeiT of the same width and against the model's other forms.

    Args:
        path: The file from `export_onnx` for the model in this shape and form.
        folder: Folder for the files to compare with.

    Returns:
        As `time_files`, DeiT first, then the file under the name of its form, then the other forms.
    """
    peers = write_peers(model, folder, shape, opset, form)
    deit = next(iter(peers))
    own = f'{form}, {"one size" if shape.fixed_size else "any size"}'
    files = {deit: peers[deit], own: path, **{name: file for name, file in peers.items() if name not in (deit, own)}}
    images = torch.randn(shape.batch or 1, channels(model), *shape.size, generator=torch.Generator().manual_seed(0))
    return time_files(files, images, threads, rounds, progress)
