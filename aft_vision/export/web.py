"""Export as a static page that classifies photographs in a browser."""

import json
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from aft_vision.export.program import TOLERANCE, choose_shape, describe_input, export_onnx
from aft_vision.export.verify import Check, InputShape
from aft_vision.files import replacing
from aft_vision.sizes import check_channels

# The version of npm's package that the page was tried with, and where the page expects it.
RUNTIME = 'onnxruntime-web@1.30.0'
RUNTIME_FOLDER = 'node_modules/onnxruntime-web'
# All that the page loads of its 130 MB.
RUNTIME_FILES = ('ort.wasm.bundle.min.mjs', 'ort-wasm-simd-threaded.wasm')
# Those of pixels.js.
INTERPOLATIONS = ('bicubic', 'bilinear')


def export_web(
    model: nn.Module,
    directory: str | Path,
    shape: InputShape | None = None,
    *,
    runtime: str | Path | None = None,
    tolerance: float = TOLERANCE,
) -> list[Check]:
    """Write a folder whose index.html classifies photographs with onnxruntime-web, at the size of the shape.

    It has model.onnx, model.json with what `describe_input` returns, and the page. A server of static files shows it;
    the page needs no network beyond it.

    Args:
        model: A classifier of timm or of this package, of 1 or 3 channels.
        shape: From `choose_shape`; None makes everything dynamic that can be.
        runtime: The folder of npm's package onnxruntime-web, whose two needed files are copied to RUNTIME_FOLDER; None
            leaves it to `npm install`.
        tolerance: As of `export_onnx`.

    Returns:
        The comparisons of `export_onnx`.

    Raises:
        ImportError: the `export` extra is not installed.
        ValueError: the page cannot prepare images for the model, the runtime is no such folder, or the file differs
            from the model by more than the tolerance.
    """
    directory, shape = Path(directory), shape or choose_shape(model)
    check_channels(model, 1, 3)
    described = describe_input(model, shape.size)
    _check(described, runtime)
    checks = export_onnx(model, directory / 'model.onnx', shape, tolerance=tolerance)
    with replacing(directory / 'model.json') as temporary:
        temporary.write_text(json.dumps(described), encoding='utf-8')
    for path in Path(__file__).with_name('page').iterdir():
        shutil.copyfile(path, directory / path.name)
    if runtime is not None:
        (directory / RUNTIME_FOLDER / 'dist').mkdir(parents=True, exist_ok=True)
        for name in RUNTIME_FILES:
            shutil.copyfile(Path(runtime) / 'dist' / name, directory / RUNTIME_FOLDER / 'dist' / name)
    return checks


def _check(described: dict[str, Any], runtime: str | Path | None) -> None:
    if not described['label_names']:
        raise ValueError('expected a model with a classifier, got one with num_classes=0')
    if described['interpolation'] not in INTERPOLATIONS:
        raise ValueError(
            f'expected a model whose images are resized by {" or ".join(INTERPOLATIONS)} interpolation for a web page, '
            f'got {described["interpolation"]}'
        )
    missing = [] if runtime is None else [x for x in RUNTIME_FILES if not (Path(runtime) / 'dist' / x).is_file()]
    if missing:
        raise ValueError(
            f'expected the folder of the npm package onnxruntime-web, such as {RUNTIME_FOLDER} after `npm install '
            f'{RUNTIME}`, got {runtime} without dist/{missing[0]}'
        )
