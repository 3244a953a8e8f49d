"""Export as a static page that classifies photographs in a browser."""

import contextlib
import json
import shutil
from pathlib import Path

from torch import nn

from aft_vision.export.program import TOLERANCE, choose_shape, describe_input, export_onnx
from aft_vision.export.verify import Check, InputShape
from aft_vision.files import replacing
from aft_vision.sizes import check_channels

# The version of npm's package that the page was tried with, and where the page expects it.
RUNTIME = 'onnxruntime-web@1.30.0'
RUNTIME_FOLDER = 'node_modules/onnxruntime-web'
# The two files of the package that the page loads.
RUNTIME_FILES = ('ort.wasm.bundle.min.mjs', 'ort-wasm-simd-threaded.wasm')
# Filters that pixels.js implements.
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

    The folder has model.onnx, model.json with what `describe_input` returns, and the page. A server of static files
    shows it; the page needs no network beyond it.

    Args:
        model: A classifier of timm or of this package, of 1 or 3 channels.
        shape: From `choose_shape`, of any batch or of 1; None makes everything dynamic that can be.
        runtime: The folder of npm's package onnxruntime-web, whose two needed files are copied to RUNTIME_FOLDER; None
            leaves it to `npm install`.
        tolerance: As in `export_onnx`.

    Returns:
        The comparisons of `export_onnx`.

    Raises:
        ImportError: the `export` extra is not installed.
        ValueError: the page cannot prepare images for the model or the shape, or the file differs from the model by
            more than the tolerance.
        FileNotFoundError: the runtime is no such folder.
    """
    directory, shape = Path(directory), shape or choose_shape(model)
    check_channels(model, 1, 3)
    described = describe_input(model, shape.size)
    if shape.batch not in (None, 1):
        raise ValueError(f'expected a batch of 1 or of any size for a web page, got {shape.batch}')
    if not described['label_names']:
        raise ValueError('expected a model with a classifier, got one with num_classes=0')
    if described['interpolation'] not in INTERPOLATIONS:
        raise ValueError(
            f'expected a model whose images are resized by {" or ".join(INTERPOLATIONS)} interpolation for a web page, '
            f'got {described["interpolation"]}'
        )
    # The model last, both files of it at once: after an error the earlier one stays.
    with replacing(directory / 'model.json') as description, replacing(directory / 'model.onnx') as program:
        checks = export_onnx(model, program, shape, tolerance=tolerance)
        description.write_text(json.dumps(described), encoding='utf-8')
        for path in Path(__file__).with_name('page').iterdir():
            _copy(path, directory / path.name)
        if runtime is not None:
            for name in RUNTIME_FILES:
                _copy(Path(runtime) / 'dist' / name, directory / RUNTIME_FOLDER / 'dist' / name)
    return checks


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # The runtime may be this page's.
    with contextlib.suppress(shutil.SameFileError):
        shutil.copyfile(source, target)
