"""Train a detector on scenes composed of photographs, and evaluate it.

python -m tools.detect --model NAME --data FOLDER_OR_TAR --out OUT [--cpu-minutes 60] [--resume]

The data set is one of classification: a folder per split, and a folder per class in it. Scenes are composed of
its photographs at random scale, place and overlap, on enlarged corners of other photographs; the class of a box is that
of its photograph. Photographs of the split train make the scenes for training, those of --split for the evaluation.

The backbone is any model of timm, untrained. The detector is torchvision's FCOS with two convolutions per branch, on
maps of strides 8, 16 and 32: those of the backbone merged by a feature pyramid network, or if it has others, those of a
simple feature pyramid on its last map.

Training ends after --cpu-minutes of processor time of this process, which includes composing the scenes. So jobs that
share a processor are comparable. The learning rate depends on the time used. OUT/last.pth is written every
--save-minutes, and --resume continues from it; after the end of the training it only evaluates again.

Prints COCO's average precision in percent and writes it to OUT/detect.json: of boxes with classes, and of boxes alone,
where boxes that overlap are suppressed whatever their classes.
It needs pip install 'aft-vision[detect]', and runs on the CPU.
"""

import argparse
import importlib.util
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.arguments import CommandParser, parse_count, parse_positive

STRIDES = (8, 16, 32)
# Share of the time in which the learning rate rises, and the share of the highest that it rises from.
WARMUP, FIRST_LR = 0.05, 0.01
MAX_NORM = 1.0
# Boxes that a detector returns for an image, of which those with the highest scores count.
RETURNED, COUNTED = 1000, 100
# Options that may change when a run continues; of the data, the folder but not the name.
FREE = ('out', 'resume', 'save_minutes', 'split', 'scenes')


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add('--model', required=True, help='the backbone, by its name in timm')
    add('--data', required=True, help='a folder or tar file of photographs in splits and classes')
    add('--out', type=Path, required=True, help='folder of the results')
    add('--cpu-minutes', type=float, default=60.0, help='processor time of the training (default: 60)')
    add('--save-minutes', type=float, default=5.0, help='processor time between checkpoints (default: 5)')
    add('--resume', action='store_true', help='continue from OUT/last.pth, which must exist')
    add('--split', default='test', help='split of the evaluation (default: test)')
    add('--scenes', type=parse_positive, default=500, help='scenes of the evaluation (default: 500)')
    add('--size', type=parse_positive, default=512, help='side of a scene in pixels (default: 512)')
    add('--batch-size', type=parse_positive, default=4, help='scenes per update (default: 4)')
    add('--channels', type=parse_positive, default=64, help='channels of pyramid and head (default: 64)')
    add('--lr', type=float, default=1e-3, help='highest learning rate of AdamW (default: 0.001)')
    add('--weight-decay', type=float, default=0.05, help='weight decay (default: 0.05)')
    add('--seed', type=parse_count, default=0, help='seed of scenes and initial weights (default: 0)')
    args = parser.parse_args(argv)
    if args.size % STRIDES[-1] or args.channels % 32:
        parser.error(f'expected multiples of 32, got --size {args.size} --channels {args.channels}')
    if args.split == 'train':
        parser.error('--split must be another one than train')
    if not all(0 < x < math.inf for x in (args.lr, args.cpu_minutes)) or not args.save_minutes >= 0:
        parser.error('--lr and --cpu-minutes must be positive and finite, --save-minutes at least 0')
    return args


if __name__ == '__main__':
    parse_args()

import timm
import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.fcos import FCOSHead
from torchvision.ops import nms
from tqdm import trange

from aft_vision.commandline import run_command, say
from aft_vision.data import Source
from aft_vision.data.datasets import check_same_classes, open_eval_split, open_train_split
from aft_vision.devices import peak_memory_mb
from aft_vision.files import LAST, replacing, write_json
from aft_vision.models.pyramid import FeaturePyramid, create_pyramid
from aft_vision.models.state_dict import check_state_dict
from aft_vision.models.weight_files import load_torch_file
from tools.average_precision import average_precision
from tools.machine import describe_machine
from tools.scenes import Scenes

RESULT = 'detect.json'


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, evaluate, and print and write the result.

    Returns:
        The content of detect.json.

    Raises:
        ValueError: the model, the data or the checkpoint to continue from is not valid.
        FileExistsError: OUT is a file, or has a checkpoint and --resume is not given.
        FileNotFoundError: OUT has none and --resume is given.
        ImportError: pycocotools is missing.
    """
    args = parse_args(argv)
    check_out(args.out, args.resume)
    if importlib.util.find_spec('pycocotools') is None:
        raise ImportError("average precision needs pycocotools: pip install 'aft-vision[detect]'")
    source = Source(dir=args.data, eval_split=args.split)
    training, evaluation = open_train_split(source, 1), open_eval_split(source, 1)
    check_same_classes(training.class_names, evaluation.class_names)
    torch.manual_seed(args.seed)
    detector = create_detector(args.model, len(training.class_names), args.size, args.channels)
    trained = train(detector, Scenes(training.dataset, 'train', args.size, args.seed), training.class_names, args)
    scenes = Scenes(evaluation.dataset, args.split, args.size, args.seed)
    result = {
        'options': describe_options(args),
        'parameters': sum(p.numel() for p in detector.parameters()),
        **trained,
        'evaluation': {'split': args.split, 'scenes': args.scenes, **evaluate(detector, scenes, args.scenes)},
        'peak_memory_mb': max(trained['peak_memory_mb'], peak_memory_mb('cpu')),
        'machine': describe_machine('cpu'),
    }
    write_json(args.out / RESULT, result)
    print(json.dumps({'model': args.model, **result['evaluation']}))
    return result


def check_out(out: Path, resume: bool) -> None:
    """Raise an error if a folder is a file, has a checkpoint and is to be new, or has none and is to continue."""
    if out.is_file():
        raise FileExistsError(f'expected a folder, got the file {out}; give another --out')
    path = out / LAST
    if resume and not path.exists():
        raise FileNotFoundError(f'expected {path} to continue from, got no such file; leave out --resume to start')
    if path.exists() and not resume:
        raise FileExistsError(
            f'expected a new folder, got {out}, which holds a run; give another --out, or --resume to go on with it'
        )


def create_detector(name: str, num_classes: int, size: int, channels: int) -> FCOS:
    """Build an untrained FCOS.

    Args:
        name: Backbone in timm.
        num_classes: Without the background.
        size: Side of its images in pixels, a multiple of 32.
        channels: Channels of pyramid and head, a multiple of 32.

    Raises:
        ValueError: timm has no such model.
    """
    if not timm.is_model(name):
        raise ValueError(f'expected a model of timm, got {name}')
    config: Any = timm.get_pretrained_cfg(name)
    kwargs: dict[str, Any] = {'img_size': size} if config.fixed_input_size else {}
    info: Any = timm.create_model(name, features_only=True, **kwargs).feature_info
    reductions = info.reduction()
    backbone: nn.Module
    if set(STRIDES) <= set(reductions):
        levels = tuple(map(reductions.index, STRIDES))
        backbone = FeaturePyramid(timm.create_model(name, features_only=True, out_indices=levels, **kwargs), channels)
    else:
        backbone = create_pyramid(name, out_channels=channels, strides=STRIDES, **kwargs)
    # FCOS finds the stride of a map in the size of its only anchor.
    anchors = AnchorGenerator(tuple((stride,) for stride in STRIDES), ((1.0,),) * len(STRIDES))
    head = FCOSHead(channels, 1, num_classes + 1, num_convs=2)
    detector = FCOS(
        backbone,
        num_classes + 1,
        min_size=size,
        max_size=size,
        anchor_generator=anchors,
        head=head,
        score_thresh=0.01,
        detections_per_img=RETURNED,
    )
    return detector.to(memory_format=torch.channels_last)


def train(detector: FCOS, scenes: Scenes, class_names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Train until the processor time is used, and save.

    Returns:
        Updates, scenes, seconds of processor time, peak memory in MiB and the mean losses between checkpoints.

    Raises:
        ValueError: the checkpoint to continue from has other options or classes.
        FloatingPointError: the loss is not finite.
    """
    optimizer = create_optimizer_v2(detector, 'adamw', lr=args.lr, weight_decay=args.weight_decay)
    path, budget = args.out / LAST, 60 * args.cpu_minutes
    state: dict[str, Any] = {'updates': 0, 'cpu_seconds': 0.0, 'peak_memory_mb': 0.0, 'history': []}
    if args.resume:
        # An older checkpoint has no peak.
        state |= load(path, detector, optimizer, class_names, args)
    detector.train()
    losses: list[float] = []
    saved = state['cpu_seconds']
    while state['cpu_seconds'] < budget:
        start = time.process_time()
        for group in optimizer.param_groups:
            group['lr'] = args.lr * schedule(state['cpu_seconds'] / budget)
        first = state['updates'] * args.batch_size
        losses.append(update(detector, optimizer, [scenes[first + i] for i in range(args.batch_size)]))
        state['updates'] += 1
        state['cpu_seconds'] += time.process_time() - start
        if state['cpu_seconds'] >= min(saved + 60 * args.save_minutes, budget):
            saved = state['cpu_seconds']
            state['peak_memory_mb'] = max(state['peak_memory_mb'], peak_memory_mb('cpu'))
            state['history'].append({'cpu_seconds': saved, 'loss': sum(losses) / len(losses)})
            save(path, detector, optimizer, class_names, args, state)
            say(f'{saved / 60:.1f} min, {state["updates"]} updates, loss {state["history"][-1]["loss"]:.3f}')
            losses = []
    return {**state, 'scenes': state['updates'] * args.batch_size}


def schedule(share: float) -> float:
    """Return the learning rate at a share of the time, relative to the highest: a linear rise, then a cosine."""
    rise = FIRST_LR + (1 - FIRST_LR) * share / WARMUP
    return min(rise, (1 + math.cos(math.pi * share)) / 2)


def update(detector: FCOS, optimizer: torch.optim.Optimizer, batch: list[tuple[Tensor, dict[str, Tensor]]]) -> float:
    """Take one step and return the loss.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    loss = sum(detector(*map(list, zip(*batch, strict=True))).values())
    value = float(loss.detach())
    if not math.isfinite(value):
        raise FloatingPointError(f'expected a finite loss, got {value}: try a lower --lr')
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(detector.parameters(), MAX_NORM)
    optimizer.step()
    return value


def describe_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that determine the training."""
    options = {name: value for name, value in vars(args).items() if name not in (*FREE, 'debug')}
    return {**options, 'data': Path(args.data).resolve().name}


def save(
    path: Path,
    detector: FCOS,
    optimizer: torch.optim.Optimizer,
    class_names: list[str],
    args: argparse.Namespace,
    state: dict[str, Any],
) -> None:
    """Write a checkpoint."""
    content = {'options': describe_options(args), 'class_names': class_names, 'state': state}
    content |= {'state_dict': detector.state_dict(), 'optimizer': optimizer.state_dict()}
    with replacing(path) as written:
        torch.save(content, written)


def load(
    path: Path, detector: FCOS, optimizer: torch.optim.Optimizer, class_names: list[str], args: argparse.Namespace
) -> dict[str, Any]:
    """Load a checkpoint and return its state.

    Raises:
        ValueError: it is damaged, of another command, or has other options or classes.
    """
    content = load_torch_file(path)
    if not isinstance(content, dict) or 'options' not in content:
        raise ValueError(f'expected a checkpoint of tools.detect, got {path} of another command; give another --out')
    wanted = describe_options(args)
    for name, value in content['options'].items():
        if wanted.get(name) != value:
            raise ValueError(f'expected --{name.replace("_", "-")} {value}, as in {path}, got {wanted.get(name)}')
    # An older checkpoint has no names.
    trained = content.get('class_names', class_names)
    if trained != class_names:
        differing = sorted({*trained} ^ {*class_names}) or class_names
        raise ValueError(
            f'expected the {len(trained)} classes of {path}, got {len(class_names)} in {args.data}, which differ in '
            f'{", ".join(differing):.80}; give the --data of the run, or another --out'
        )
    check_state_dict(detector, content['state_dict'])
    detector.load_state_dict(content['state_dict'])
    optimizer.load_state_dict(content['optimizer'])
    return content['state']


@torch.inference_mode()
def evaluate(detector: FCOS, scenes: Scenes, count: int) -> dict[str, float]:
    """Return average precision in percent, and scenes per second of processor time without composing them."""
    detector.eval()
    targets, found, alone, seconds = [], [], [], 0.0
    for index in trange(count, desc='evaluate', unit='scene', leave=False, disable=None):
        image, target = scenes[index]
        start = time.process_time()
        (boxes,) = detector([image])
        seconds += time.process_time() - start
        found.append({name: value[:COUNTED] for name, value in boxes.items()})
        alone.append(suppress(boxes, detector.nms_thresh, COUNTED))
        targets.append(target)
    both = average_precision(targets, found)
    without = average_precision(targets, alone, use_classes=False)
    return {
        'objects': sum(len(target['labels']) for target in targets),
        **both,
        **{f'boxes_{name}': value for name, value in without.items()},
        'scenes_per_cpu_second': count / seconds,
    }


def suppress(found: dict[str, Tensor], threshold: float, most: int) -> dict[str, Tensor]:
    """Return the boxes with the highest scores, without those that overlap a better one, of any class.

    Args:
        found: `boxes` (N, 4) as x0, y0, x1, y1, `labels` (N,) and `scores` (N,).
        threshold: Largest intersection over union of two boxes that remain.
        most: Largest number of boxes that remain.
    """
    kept = nms(found['boxes'], found['scores'], threshold)[:most]
    return {name: value[kept] for name, value in found.items()}


if __name__ == '__main__':
    run_command(main)
