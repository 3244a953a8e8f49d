"""The formats that timmx writes: a thin call to it."""

import copy
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from aft_vision.export.hub import export_model
from aft_vision.export.verify import channels
from aft_vision.sizes import resize_model

# What `timmx.backends()` has beside ONNX and torch.export, of which this package writes its own.
TIMMX_FORMATS = ('coreai', 'coreml', 'executorch', 'litert', 'ncnn', 'openvino', 'tensorrt', 'torchscript')


def export_with_timmx(
    model: nn.Module, path: str | Path, format: str, size: tuple[int, int] | None = None, **options: Any
) -> Path:
    """Write a file by `timmx.export_model`, which compares it with PyTorch itself.

    timmx builds its model by name, so it is given a hub folder of this one. It uses the exportable form of aten
    operations, its position biases fused.

    Args:
        model: Made by `timm.create_model`.
        format: One of `TIMMX_FORMATS`.
        size: (H, W) in pixels; None is what the model was made for. The file takes this size alone.
        options: Of timmx: `dynamic_batch=True`, `normalize=True`, `mode='int8'`, ...

    Returns:
        The path.

    Raises:
        ImportError: timmx is not installed.
        ValueError: there is no such format.
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
