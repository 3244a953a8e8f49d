"""int8 projections in ONNX files, by onnxruntime.quantization."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aft_vision.export.verify import onnx_runner
from aft_vision.files import replacing

INT8_MODES = ('dynamic', 'static')


def quantize_onnx(path: str | Path, mode: str, images: Sequence[Tensor] = ()) -> float | None:
    """Replace an ONNX file by one with the weights and inputs of its projections in int8.

    Exponentials, weighted means, convolutions, norms and products of two activations stay float32. Weights have 7 bits,
    so that the file computes the same on processors with and without VNNI.

    Args:
        path: A file from `export_onnx`.
        mode: 'dynamic' chooses one scale of an input for the whole batch at each call, 'static' once, from half of the
            images.
        images: Preprocessed photographs, (B, 3, H, W) each. 'static' needs two or more.

    Returns:
        Share of images with the same most likely class as before, of those that chose no scale; None without images.

    Raises:
        ValueError: the mode is unknown, or 'static' has too few images.
    """
    if mode not in INT8_MODES:
        raise ValueError(f'mode must be one of {", ".join(INT8_MODES)}, got {mode!r}')
    if mode == 'static' and len(images) < 2:
        raise ValueError(f"mode='static' needs 2 images or more, to calibrate and to compare, got {len(images)}")
    compared = list(images[1::2] if mode == 'static' else images)
    before = onnx_runner(path, torch.get_num_threads())
    expected = [before(batch).argmax(1) for batch in compared]
    with replacing(Path(path)) as temporary:
        _quantize(Path(path), temporary, mode, images[::2])
        after = onnx_runner(temporary, torch.get_num_threads())
        classes = [after(batch).argmax(1) for batch in compared]
    return (torch.cat(classes) == torch.cat(expected)).float().mean().item() if compared else None


def _quantize(path: Path, out: Path, mode: str, images: Sequence[Tensor]) -> None:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static

    graph = onnx.load(path).graph
    constants = {constant.name for constant in graph.initializer}
    products = [node for node in graph.node if node.op_type in ('Gemm', 'MatMul')]
    options: dict[str, Any] = {
        'op_types_to_quantize': ['Gemm', 'MatMul'],
        'nodes_to_exclude': [node.name for node in products if node.input[1] not in constants],
        'per_channel': True,
        'weight_type': QuantType.QInt8,
        # Weights of 7 bits: without VNNI, onnxruntime adds products in pairs in 16 bits, which saturate with 8.
        'reduce_range': True,
    }
    if mode == 'dynamic':
        quantize_dynamic(path, out, **options)
    else:
        quantize_static(path, out, _Reader(images), activation_type=QuantType.QUInt8, **options)


class _Reader:
    # What `quantize_static` reads its calibration data from.
    def __init__(self, images: Sequence[Tensor]) -> None:
        self.batches: Iterator[Tensor] = iter(images)

    def get_next(self) -> dict[str, Any] | None:
        images = next(self.batches, None)
        return None if images is None else {'images': images.numpy()}
