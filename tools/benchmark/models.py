"""Image classifiers of timm at several sizes, in torch and in other runtimes, against DeiT."""

import argparse
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
from torch import Tensor, nn

from aft_vision.export import InputShape, export_onnx
from aft_vision.export.verify import onnx_runner
from aft_vision.models.transfer_source import did_you_mean
from aft_vision.ops.linear import onednn_is_faster
from aft_vision.sizes import resize_model
from tools.benchmark.compare import DIRECTIONS, Candidate, Prepared, compare, deploy, draw, next_to_the_paper
from tools.benchmark.meters import peak_resident
from tools.benchmark.printer import Report

# Relative to the largest logit: whether a runtime computes the same model, not how exact it is.
EXPORT_TOLERANCE = 1e-3
# A baseline with torch's linear layers.
TIMM_DEFAULTS = 'as timm has it'
# (B, 3, H, W)
Images = tuple[int, int, int, int]


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure models and the baseline on images of each size and in each runtime, with materialised attention too."""
    names = model_names(args.baseline, *args.models)
    rows: list[dict[str, Any]] = []
    for size in args.sizes:
        shape = (args.batch_size, 3, *size)
        for runtime in args.runtimes:
            if runtime == 'torch':
                directions = DIRECTIONS[: 1 + args.training]
                options = dict(dtype=args.dtype, directions=directions, count=args.batch_size)
                options |= dict(compiled=args.compile, graph=args.graph)
                candidates = classifiers(names, shape, device)
                if (device.type, args.dtype) == ('cpu', 'float32') and not args.training and onednn_is_faster():
                    candidates.insert(1, classifier(names[0], shape, device, fuses=False))
                measured = compare(candidates, device, args.rounds, **options)
            else:
                # Its first call takes its memory, which torch does not see.
                candidates = [runtime_candidate(name, shape, runtime) for name in names]
                options = dict(directions=['forward'], count=args.batch_size, memory=False)
                measured = [{**row, 'form': runtime} for row in compare(candidates, device, args.rounds, **options)]
            rows += [{'size': size, **row} for row in measured]
    return Report(rows, f'classifiers, batch of {args.batch_size}; ratios to {args.baseline} of that size and runtime')


def model_names(*names: str) -> list[str]:
    """Return the names, each once, of models of timm.

    Raises:
        ValueError: timm has no model of a name.
    """
    for name in names:
        if not timm.is_model(name):
            raise ValueError(f'expected a model of timm, got {name}{did_you_mean(name, timm.list_models())}')
    return list(dict.fromkeys(names))


def classifiers(names: Sequence[str], shape: Images, device: torch.device) -> list[Candidate]:
    """Return models, the paper's baseline of the first one after it, if that has fused attention."""
    candidates = [classifier(name, shape, device) for name in names]
    is_fused = any(getattr(module, 'fused_attn', False) for module in timm.create_model(names[0]).modules())
    return next_to_the_paper(candidates) if is_fused else candidates


def classifier(name: str, shape: Images, device: torch.device, fuses: bool = True) -> Candidate:
    """Return a model on images of a shape: as it is deployed, or in training.

    Args:
        fuses: False leaves it as timm has it.
    """

    def prepare(training: bool) -> Prepared:
        model = create(name, shape[2:]).to(device).train(training)
        if fuses and not training:
            model = deploy(model)
        images = draw(*shape).to(device)
        leaves = [each for each in model.parameters() if training]
        return Prepared(lambda: model(images), leaves, [images, *model.buffers()])

    return Candidate(name if fuses else f'{name}, {TIMM_DEFAULTS}', prepare, compiles=fuses)


def runtime_candidate(name: str, shape: Images, runtime: str, threads: int | None = None) -> Candidate:
    """Return a model exported for images of a shape, in a runtime of RUNTIMES; threads are as many as torch has."""

    def prepare(training: bool) -> Prepared:
        # If it is absent, nothing is exported.
        importlib.import_module(runtime)
        # torch.export does not trace tensors of inference mode.
        with TemporaryDirectory() as folder, torch.inference_mode(False):
            path, size = Path(folder) / f'{name}.onnx', (shape[2], shape[3])
            export_onnx(create(name, size), path, InputShape(size, True, shape[0]), tolerance=EXPORT_TOLERANCE)
            run, images = RUNTIMES[runtime](path, threads or torch.get_num_threads()), draw(*shape)
        return Prepared(lambda: run(images), peak_bytes=peak_resident(lambda: run(images)))

    return Candidate(name, prepare)


def openvino_runner(path: str | Path, threads: int) -> Callable[[Tensor], Tensor]:
    """Return an ONNX file as a function of images on OpenVINO's CPU, in float32."""
    import openvino

    config = {'INFERENCE_NUM_THREADS': threads, 'INFERENCE_PRECISION_HINT': 'f32', 'PERFORMANCE_HINT': 'LATENCY'}
    compiled = openvino.Core().compile_model(str(path), 'CPU', config)
    return lambda images: torch.from_numpy(compiled(images.numpy())[0])


RUNTIMES = {'onnxruntime': onnx_runner, 'openvino': openvino_runner}


def create(name: str, img_size: Sequence[int]) -> nn.Module:
    """Build a classifier in eval mode, not fused, for images of a height and a width in pixels."""
    return resize_model(timm.create_model(name).eval(), img_size)
