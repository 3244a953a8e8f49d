"""Image classifiers of timm at several sizes, in torch and in other runtimes, against DeiT."""

import argparse
import importlib.util
import math
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import is_model_in_modules
from timm.utils import reparameterize_model
from torch import Tensor, nn

from aft_vision.export import Shape, export_onnx
from aft_vision.export.verify import onnx_runner
from aft_vision.models.transfer_source import did_you_mean
from tools.benchmark.compare import DIRECTIONS, PAPER_BASELINE, Candidate, Prepared, check_weights, compare, draw
from tools.benchmark.printer import Report

# Files of timm, and ours, whose models take `img_size`, `dynamic_img_size` and `dynamic_img_pad`.
VIT_FILES = ('aft_vit', 'deit', 'vision_transformer')
MODELS = (
    'aft_conv_small',
    'aft_conv_small_k11_h16',
    'aft_full_small',
    'cpubone_b0_bfrobust',
    'poolformer_s12',
    'convnext_tiny',
    'mambaout_tiny',
    'xcit_small_12_p16_224',
)
SIZES = ((224, 224), (384, 384), (512, 512), (1024, 1024))
# Relative to the largest logit: whether a runtime computes the same model, not how exact it is.
EXPORT_TOLERANCE = 1e-3
# (B, 3, H, W)
Images = tuple[int, int, int, int]


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure models and the baseline on images of each size and in each runtime, with materialised attention too."""
    names = list(dict.fromkeys([args.baseline, *(args.models or MODELS)]))
    for name in names:
        check_model(name)
    rows: list[dict[str, Any]] = []
    for size in args.sizes or SIZES:
        shape = (args.batch_size, 3, *size)
        for runtime in args.runtimes or ['torch']:
            if runtime == 'torch':
                candidates, directions = classifiers(names, shape, device), DIRECTIONS[: 1 + args.training]
                found = compare(
                    candidates, device, args.rounds, dtype=args.dtype, directions=directions, compiled=args.compile
                )
            else:
                found = measure_runtime(names, shape, runtime, args.rounds)
            rows += [{'size': size, **with_rate(row, args.batch_size)} for row in found]
    return Report(rows, f'classifiers, batch of {args.batch_size}; ratios to {args.baseline} of that size and form')


def with_rate(row: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the row with `per_second`: images or iterations of a call that processes so many."""
    return row | ({'per_second': 1e3 * count / row['milliseconds']} if 'milliseconds' in row else {})


def classifiers(names: Sequence[str], shape: Images, device: torch.device, dense: bool = False) -> list[Candidate]:
    """Return models, the first with materialised attention too, the paper's baseline, if it has fused attention."""
    forms = (False, True) if has_fused_attention(names[0]) else (False,)
    first = [classifier(names[0], shape, device, materialised=form, dense=dense) for form in forms]
    return [*first, *(classifier(name, shape, device, dense=dense) for name in names[1:])]


def classifier(
    name: str, shape: Images, device: torch.device, *, materialised: bool = False, dense: bool = False
) -> Candidate:
    """Return a model on images of a shape: as it is deployed, or in training.

    Args:
        materialised: Its attention forms its weights, by timm's own code, which is what DeiT had.
        dense: It gives features, the last three maps, of images of any size, in place of logits.
    """

    def prepare(training: bool) -> Prepared:
        model = create(name, shape[2:], dense).to(device).train(training)
        if materialised:
            materialise_attention(model, shape, device, training)
        if not (training or dense):
            model = reparameterize_model(model, inplace=True)
        images = draw(*shape).to(device)
        leaves = [each for each in model.parameters() if training]
        return Prepared(lambda: model(images), leaves, [images, *model.buffers()], _learn_maps if dense else None)

    title = f'{name}, materialised, {PAPER_BASELINE}' if materialised else name
    return Candidate(title, prepare, compiles=not materialised)


def _learn_maps(maps: Sequence[Tensor]) -> None:
    sum(features.float().mean() for features in maps).backward()  # type: ignore[union-attr]


def measure_runtime(names: Sequence[str], shape: Images, runtime: str, rounds: int) -> list[dict[str, Any]]:
    """Measure the exported ONNX files of models in a runtime of RUNTIMES, with as many threads as torch has.

    Returns:
        The rows of `compare` with the runtime as `form`, without the memory, which torch does not see. Where the
        package is absent, one row with the verdict `open`.
    """
    if importlib.util.find_spec(runtime) is None:
        return [{'form': runtime, 'verdict': 'open', 'refused': f'{runtime} is not installed'}]
    with tempfile.TemporaryDirectory() as folder:
        candidates = [runtime_candidate(name, shape, runtime, Path(folder)) for name in names]
        rows = compare(candidates, torch.device('cpu'), rounds, directions=('forward',), memory=False)
    return [{**row, 'form': runtime} for row in rows]


def runtime_candidate(name: str, shape: Images, runtime: str, folder: Path) -> Candidate:
    """Return a model on images of a shape, exported for that shape into a folder."""

    def prepare(training: bool) -> Prepared:
        path, size = folder / f'{name}.onnx', (shape[2], shape[3])
        # torch.export does not trace tensors of inference mode.
        with torch.inference_mode(False):
            export_onnx(create(name, size), path, Shape(size, True, shape[0]), tolerance=EXPORT_TOLERANCE)
        run, images = RUNTIMES[runtime](path, torch.get_num_threads()), draw(*shape)
        return Prepared(lambda: run(images))

    return Candidate(name, prepare, compiles=False)


def openvino_runner(path: str | Path, threads: int) -> Callable[[Tensor], Tensor]:
    """Return an ONNX file as a function of images on OpenVINO's CPU, in float32."""
    import openvino

    config = {'INFERENCE_NUM_THREADS': threads, 'INFERENCE_PRECISION_HINT': 'f32', 'PERFORMANCE_HINT': 'LATENCY'}
    compiled = openvino.Core().compile_model(str(path), 'CPU', config)
    return lambda images: torch.from_numpy(compiled(images.numpy())[0])


RUNTIMES: dict[str, Callable[[Path, int], Callable[[Tensor], Tensor]]] = {
    'onnxruntime': onnx_runner,
    'openvino': openvino_runner,
}


def create(name: str, img_size: Sequence[int], dense: bool = False) -> nn.Module:
    """Build a classifier in eval mode, not fused, for images of a height and a width in pixels.

    Args:
        dense: Build a feature extractor, `features_only`, that takes images of any size.
    """
    kwargs: dict[str, Any] = {'features_only': True} if dense else {}
    if is_model_in_modules(name, VIT_FILES):
        kwargs |= dict(dynamic_img_size=True, dynamic_img_pad=True) if dense else {'img_size': img_size}
    return timm.create_model(name, **kwargs).eval()


def check_model(name: str) -> None:
    """Raise a ValueError, with a name that is close, if timm has no model of that name."""
    if not timm.is_model(name):
        raise ValueError(f'expected a model of timm, got {name}{did_you_mean(name, timm.list_models())}')


@cache
def has_fused_attention(name: str) -> bool:
    """Return whether attention in a model of timm is `F.scaled_dot_product_attention`."""
    return bool(_fused_attentions(timm.create_model(name)))


def materialise_attention(model: nn.Module, shape: Images, device: torch.device, training: bool) -> None:
    """Make attention form its (h, T, T) weights, as every attention did when the AFT paper was written.

    Raises:
        MemoryError: its weights would take more than a call may.
    """
    attentions = _fused_attentions(model)
    patch: Any = next((module.patch_size for module in model.modules() if hasattr(module, 'patch_size')), (16, 16))
    tokens = math.prod(-(-side // step) for side, step in zip(shape[2:], patch, strict=True)) + 1
    check_weights(shape[0], attentions[0].num_heads, tokens, len(attentions) if training else 1, device)
    for attention in attentions:
        attention.fused_attn = False


def _fused_attentions(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if getattr(module, 'fused_attn', False)]
