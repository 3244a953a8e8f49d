"""Image classifiers of timm at several sizes, in torch and in other runtimes, against DeiT."""

import argparse
import importlib.util
import math
import tempfile
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import is_model_in_modules
from timm.utils import reparameterize_model
from torch import Tensor, nn

from aft_vision.export import Shape, export_onnx
from aft_vision.export.verify import onnx_runner
from tools.benchmark.compare import DIRECTIONS, PAPER_BASELINE, Candidate, Prepared, compare, most_bytes, too_large
from tools.benchmark.printer import Report
from tools.benchmark.times import describe_error
from tools.machine import autocast

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
# Of the largest logit: whether a runtime computes the same model, not how exact it is.
EXPORT_TOLERANCE = 1e-3


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure models and the baseline on images of each size and in each runtime."""
    names = list(dict.fromkeys([args.baseline, *(args.models or MODELS)]))
    for name in names:
        check_model(name)
    rows: list[dict[str, Any]] = []
    directions, runtimes = DIRECTIONS[: 1 + args.training], args.runtimes or ['torch']
    for size in args.sizes or SIZES:
        shape = (args.batch_size, 3, *size)
        if 'torch' in runtimes:
            limit = most_bytes(args.most_gib, device)
            rows += measure_classifiers(names, shape, device, args.dtype, args.rounds, directions, args.compile, limit)
        for runtime in runtimes:
            if runtime != 'torch':
                rows += measure_runtime(names, shape, runtime, args.rounds)
    head = f'classifiers, batch of {args.batch_size}; ratios to {args.baseline} of that size and form'
    return Report(rows, head)


def measure_classifiers(
    names: Sequence[str],
    shape: tuple[int, int, int, int],
    device: torch.device,
    dtype: str,
    rounds: int,
    directions: Sequence[str] = ('forward',),
    compiled: bool = False,
    most: float = math.inf,
) -> list[dict[str, Any]]:
    """Measure models on images of one size, interleaved, and the first, the baseline, with materialised attention too.

    Args:
        shape: (B, 3, H, W).
        dtype: Key of PRECISIONS.
        most: Bytes; materialised attention that takes more is refused.

    Returns:
        The rows of `compare` with `size` and `per_second`, images. A model that does not take such images has
        `refused`, the reason, and one that fails otherwise when it is first tried `error`.
    """
    place = {'size': shape[2:]}
    rows: list[dict[str, Any]] = []
    candidates: list[Candidate] = []
    for name in names:
        if why := probe(name, shape, device, dtype):
            rows.append({**place, 'name': name, **why})
            continue
        candidates.append(classifier(name, shape, device, baseline=names[0]))
        if name == names[0]:
            paper = classifier(name, shape, device, materialised=True, baseline=names[0])
            model = create(name, shape[2:])
            if reason := attention_too_large(model, shape[0], 'training' in directions, most):
                rows.append({**place, 'name': paper.name, 'refused': reason})
            elif has_fused_attention(model):
                candidates.append(paper)
    found = compare(candidates, device, rounds, dtype=dtype, directions=directions, compiled=compiled)
    return [{**place, **with_rate(row, shape[0])} for row in found] + rows


def with_rate(row: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the row with `per_second`: images or iterations of a call that processes so many."""
    return row | ({'per_second': 1e3 * count / row['milliseconds']} if 'milliseconds' in row else {})


def attention_too_large(model: Any, batch: int, learns: bool, most: float) -> str | None:
    """Return why a vision transformer with materialised attention cannot be measured, or None."""
    if not has_fused_attention(model) or not hasattr(model, 'num_prefix_tokens'):
        return None
    tokens = model.patch_embed.num_patches + model.num_prefix_tokens
    return too_large(batch, model.blocks[0].attn.num_heads, tokens, len(model.blocks) if learns else 1, most)


@torch.inference_mode()
def probe(name: str, shape: tuple[int, ...], device: torch.device, dtype: str = 'float32') -> dict[str, str]:
    """Try a model on images as they are measured, which tunes the kernels of a GPU for them.

    Returns:
        `refused`, why it does not take such images; `error`, what else went wrong; or nothing.
    """
    try:
        model = create_classifier(name, shape[2:], device)
        with autocast(device, dtype):
            model(torch.zeros(shape, device=device))
    except (ValueError, AssertionError) as error:
        return {'refused': describe_error(error)}
    # A lack of memory, or a bug: the others are measured all the same.
    except Exception as error:
        return {'error': describe_error(error)}
    return {}


def classifier(
    name: str, shape: tuple[int, ...], device: torch.device, materialised: bool = False, baseline: str | None = None
) -> Candidate:
    """Return a model on images of a shape (B, 3, H, W): as it is deployed, or in training.

    Args:
        materialised: Its attention forms its weights, by timm's own code, which is what DeiT had.
    """

    def prepare(training: bool) -> Prepared:
        model = create_classifier(name, shape[2:], device, materialised=materialised, training=training)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
        return Prepared(
            lambda: model(images), [each for each in model.parameters() if training], [images, *model.buffers()]
        )

    title = f'{name}, materialised, {PAPER_BASELINE}' if materialised else name
    return Candidate(title, prepare, compiles=not materialised, baseline=baseline)


def measure_runtime(
    names: Sequence[str], shape: tuple[int, int, int, int], runtime: str, rounds: int
) -> list[dict[str, Any]]:
    """Measure the exported ONNX files of models in a runtime of RUNTIMES, with as many threads as torch has.

    Returns:
        The rows of `compare` with `size`, `per_second` and the runtime as `form`, without the memory, which torch does
        not see. Where the package is absent, one row with the verdict `open`.
    """
    if importlib.util.find_spec(runtime) is None:
        return [{'size': shape[2:], 'form': runtime, 'verdict': 'open', 'refused': f'{runtime} is not installed'}]
    with tempfile.TemporaryDirectory() as folder:
        candidates = [runtime_candidate(name, shape, runtime, Path(folder)) for name in names]
        rows = compare(candidates, torch.device('cpu'), rounds, directions=('forward',))
    kept = [{key: value for key, value in row.items() if not key.startswith('peak')} for row in rows]
    return [{'size': shape[2:], **with_rate(row, shape[0]), 'form': runtime} for row in kept]


def runtime_candidate(name: str, shape: tuple[int, int, int, int], runtime: str, folder: Path) -> Candidate:
    """Return a model on images of a shape (B, 3, H, W), exported for that shape into a folder."""

    def prepare(training: bool) -> Prepared:
        path, size = folder / f'{name}.onnx', (shape[2], shape[3])
        # torch.export does not trace tensors of inference mode.
        with torch.inference_mode(False):
            model = create(name, size)
            export_onnx(model, path, Shape(size, True, shape[0]), tolerance=EXPORT_TOLERANCE)
        run = RUNTIMES[runtime](path, torch.get_num_threads())
        images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
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


def create(name: str, img_size: Sequence[int]) -> nn.Module:
    """Build a classifier in eval mode, not fused."""
    kwargs: dict[str, Any] = {'img_size': img_size} if is_model_in_modules(name, VIT_FILES) else {}
    return timm.create_model(name, **kwargs).eval()


def create_classifier(
    name: str, img_size: Sequence[int], device: torch.device, materialised: bool = False, training: bool = False
) -> nn.Module:
    """Build a classifier as it is deployed, in eval mode and fused, or as it is trained.

    Args:
        img_size: Height and width in pixels.
        materialised: See `materialise_attention`.
    """
    model = create(name, img_size).to(device).train(training)
    if materialised:
        materialise_attention(model)
    return model if training else reparameterize_model(model, inplace=True)


def create_dense(name: str, device: torch.device) -> nn.Module:
    """Build a feature extractor, `features_only`, that takes images of any size."""
    check_model(name)
    kwargs: dict[str, Any] = {}
    if is_model_in_modules(name, VIT_FILES):
        kwargs = dict(dynamic_img_size=True, dynamic_img_pad=True)
    return timm.create_model(name, features_only=True, **kwargs).to(device)


def check_model(name: str) -> None:
    """Raise a ValueError, with names that are close, if timm has no model of that name."""
    if not timm.is_model(name):
        close = ', '.join(get_close_matches(name, timm.list_models(), n=3, cutoff=0.0))
        raise ValueError(f'expected the name of a model that timm has, such as {close}, got {name!r}')


def has_fused_attention(model: nn.Module) -> bool:
    """Return whether attention in the model is `F.scaled_dot_product_attention`."""
    return any(getattr(module, 'fused_attn', False) for module in model.modules())


def materialise_attention(model: nn.Module) -> None:
    """Make attention form its (h, T, T) weights, as every attention did when the AFT paper was written.

    Raises:
        ValueError: the model has no fused attention.
    """
    if not has_fused_attention(model):
        raise ValueError(f'expected a model with fused attention, got a {type(model).__name__} without')
    attentions: list[Any] = [module for module in model.modules() if hasattr(module, 'fused_attn')]
    for attention in attentions:
        attention.fused_attn = False
