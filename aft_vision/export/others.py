"""Export to the formats of timmx."""

import copy
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from aft_vision.export.hub import export_model
from aft_vision.export.verify import channels
from aft_vision.sizes import resize_model

# The formats of `timmx.backends()` except ONNX and torch.export, which this package writes itself.
TIMMX_FORMATS = ('coreai', 'coreml', 'executorch', 'litert', 'ncnn', 'openvino', 'tensorrt', 'torchscript')


def export_with_timmx(
    model: nn.Module, path: str | Path, format: str, size: tuple[int, int] | None = None, **options: Any
) -> Path:
    """Write a file by `timmx.export_model`, which compares it with PyTorch.

    timmx builds its model by name, so it gets a hub folder of this one. It uses the exportable aten form with fused
    position biases.

    Args:
        model: Made by `timm.create_model`.
        format: One of `TIMMX_FORMATS`.
        size: (H, W) in pixels; None means the model's default. The file takes only this size.
        options: Options of timmx: `dynamic_batch=True`, `normalize=True`, `mode='int8'`, ...

    Returns:
        The path.

    Raises:
        ImportError: timmx is not installed.
        ValueError: the format is unknown.
        timmx.TimmxError: an option is wrong, the conversion failed or its output differs; a package is missing.
    """
    if format not in TIMMX_FORMATS:
        raise ValueError(f'format must be one of {", ".join(TIMMX_FORMATS)}, got {format!r}')
    try:
        import timmx
    except ImportError as error:
        raise ImportError(f"{format} is written by timmx: pip install 'timmx[{format}]' ({error})") from error
    cfg: Any = model.pretrained_cfg
    if size is not None:
        model = resize_model(copy.deepcopy(model), size)
        options['input_size'] = (channels(model), *size)
    with tempfile.TemporaryDirectory() as folder:
        export_model(model, folder, cfg.get('label_names') or [])
        return timmx.export_model(format, f'local-dir:{folder}', pretrained=True, output=str(path), **options)
