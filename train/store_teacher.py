"""Compute the outputs of a teacher once, for students that then train at their own cost.

python -m train.store_teacher --config FILE --out FOLDER [--size 128] [--crops 4] [section.key=value ...]

FILE is an experiment of train.imagenet: its training images, its random crops and flips (`augment.scale`,
`augment.hflip`) and its teacher (`distill.teacher`). Of every image several crops are drawn; the folder keeps each with
the largest probabilities of the teacher, and with --features its pooled features too. `distill.stored=FOLDER` then
trains a student on these crops, at any size, without the teacher.

First the accuracy of the teacher at this size is printed. A command that was interrupted continues when it is given
again, and torchrun divides the images among processes. A crop takes 57 bytes at --top-k 10, and with features
of a length of 1,280 2.6 kB.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from train.command_line import CommandParser, run_command


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('--config', type=Path, required=True, help='the YAML experiment')
    parser.add_argument('--out', type=Path, required=True, help='the folder of the outputs')
    parser.add_argument('--size', type=int, help='side in pixels at which the teacher sees a crop (default: its own)')
    parser.add_argument('--crops', type=int, default=4, help='crops of each image (default: 4)')
    parser.add_argument('--top-k', type=int, default=10, help='probabilities that are kept of each (default: 10)')
    parser.add_argument('--features', action='store_true', help='keep the pooled features too')
    parser.add_argument('--no-accuracy', action='store_true', help='do not evaluate the teacher first')
    parser.add_argument('--quiet', action='store_true', help='no progress bar')
    parser.add_argument('overrides', nargs='*', metavar='section.key=value', help='changes to the experiment')
    args = parser.parse_intermixed_args(argv)
    for option in ('size', 'crops', 'top_k'):
        value = getattr(args, option)
        if value is not None and value < 1:
            parser.error(f'argument --{option.replace("_", "-")}: expected at least 1, got {value}')
    return args


if __name__ == '__main__':
    parse_args()

from typing import Any

import numpy as np
import torch
from timm.data import resolve_model_data_config
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from aft_vision.data import CorruptImageError, Preprocessing, create_eval_loader
from aft_vision.data.checked import MAX_SKIPPED_IN_A_ROW
from aft_vision.data.datasets import Split, open_train_split, with_evaluation_images
from aft_vision.data.images import describe_skipped
from aft_vision.data.loaders import survive_signals
from aft_vision.data.teacher_outputs import (
    SKIPPED,
    STORED,
    DrawnCrops,
    Facts,
    TeacherOutputs,
    hash_weights,
    image_names,
)
from aft_vision.evaluate import evaluate
from train.build import load_configured_teacher
from train.config import load_config
from train.distill import Teacher
from train.distributed import World, join_world
from train.schema import Config, require
from train.state import autocast_dtype

# Of a batch of the teacher.
CROPS_PER_BATCH = 256


def main(argv: Sequence[str] | None = None) -> TeacherOutputs:
    """Store the outputs.

    Returns:
        The complete folder.

    Raises:
        ValueError: the experiment, its data set or its teacher is not valid, or the folder has other outputs.
    """
    args = parse_args(argv)
    config = load_config(args.config, args.overrides)
    require('distill.teacher', config.distill.teacher, config.distill.teacher is not None, 'the name of the teacher')
    with join_world(config.run.device, config.run.cpu_threads, config.run.timeout_minutes) as world:
        config = replace(config, data=replace(config.data, on_corrupt_image='skip'))
        split = open_train_split(with_evaluation_images(config.data))
        names = image_names(split)
        size = args.size or _own_size(config)
        teacher = load_configured_teacher(config, split.class_names, [(size, size)]).to(world.device)
        facts = _describe(config, split, teacher, args, size)
        is_new = not (args.out / 'outputs.json').exists()
        if is_new and not args.no_accuracy:
            _print_accuracy(config, teacher, size, world, not args.quiet)
        if world.is_primary:
            outputs = TeacherOutputs.create(args.out, facts, names)
            print(f'{len(names)} images, {facts.crops} crops of each, {facts.bytes(len(names)) / 1e6:.0f} MB')
        world.wait()
        outputs = TeacherOutputs(args.out)
        missing = outputs.missing()
        # Before any process stores more. They do not wait for each other at the end: one may take far longer.
        world.wait()
        images = missing[world.rank :: world.size]
        skipped = _store(outputs, images, split, teacher, config, world, not args.quiet and world.is_primary)
        if skipped:
            print(describe_skipped(skipped))
    return outputs


def _own_size(config: Config) -> int:
    cfg: Any = load_configured_teacher(config, None, []).pretrained_cfg
    return max(cfg['input_size'][1:])


def _describe(config: Config, split: Split, teacher: Any, args: argparse.Namespace, size: int) -> Facts:
    return Facts(
        teacher=str(config.distill.teacher),
        weights=hash_weights(teacher),
        mean=list(teacher.pretrained_cfg['mean']),
        std=list(teacher.pretrained_cfg['std']),
        amp=config.run.amp,
        class_names=split.class_names,
        size=[size, size],
        crops=args.crops,
        top_k=min(args.top_k, len(split.class_names)),
        features=teacher.head_hidden_size if args.features else 0,
        scale=list(config.augment.scale),
        hflip=config.augment.hflip,
        seed=config.run.seed,
    )


def _print_accuracy(config: Config, teacher: nn.Module, size: int, world: World, progress: bool) -> None:
    """Print the accuracy on whole validation images, as far as they are square."""
    cfg = resolve_model_data_config(teacher)
    read = Preprocessing((size, size), 1.0, cfg['mean'], cfg['std'])
    shard, workers = world.shard(1), config.data.num_workers
    batch = config.data.eval_batch_size or config.data.batch_size
    loader, _ = create_eval_loader(config.data, read, batch, shard=shard, num_workers=workers, device=world.device)
    options: dict[str, Any] = dict(
        amp_dtype=autocast_dtype(config.run.amp, world.device), distributed=world.is_distributed
    )
    metrics = evaluate(teacher, loader, world.device, progress=progress and world.is_primary, **options)
    if world.is_primary:
        print(
            f'{config.distill.teacher} at {size} px: top-1 {metrics["top1"]:.2f} % of {metrics["samples"]:.0f} images'
        )


def _store(
    outputs: TeacherOutputs,
    images: np.ndarray,
    split: Split,
    teacher: nn.Module,
    config: Config,
    world: World,
    progress: bool,
) -> int:
    """Store the outputs for some images, and return how many of them cannot be read.

    Raises:
        CorruptImageError: none of many images in a row can be read, so the data set is broken.
    """
    facts, skipped, in_a_row = outputs.facts, 0, 0
    split.dataset.skip_corrupt('none')
    loader = DataLoader(
        DrawnCrops(split.dataset, images, facts, config.augment),
        batch_size=max(1, CROPS_PER_BATCH // facts.crops),
        num_workers=config.data.num_workers,
        collate_fn=list,
        worker_init_fn=survive_signals,
    )
    model = Teacher(teacher, hard=False, device=world.device).to(memory_format=torch.channels_last)
    mean, std = (getattr(model, f'{name}_kd') for name in ('mean', 'std'))
    amp = autocast_dtype(config.run.amp, world.device)
    with (
        torch.inference_mode(),
        torch.autocast(world.device.type, dtype=amp, enabled=amp is not None),
        tqdm(total=len(images), unit='image', disable=not progress) as bar,
    ):
        for samples in loader:
            bar.update(len(samples))
            read = [sample for sample in samples if sample[1] is not None]
            skipped += len(samples) - len(read)
            in_a_row = 0 if read else in_a_row + len(samples)
            if in_a_row >= MAX_SKIPPED_IN_A_ROW:
                raise CorruptImageError(f'expected images that can be decoded, got {in_a_row} in a row that cannot')
            if len(read) < len(samples):
                outputs.write([sample[0] for sample in samples if sample[1] is None], SKIPPED)
            if not read:
                continue
            numbers, crops, boxes, flips = zip(*read, strict=True)
            pixels = torch.cat(crops).to(world.device)
            batch = ((pixels / 255 - mean) / std).to(memory_format=torch.channels_last)
            values = _outputs(model, batch, facts)
            shaped = {name: value.reshape(len(read), facts.crops, -1) for name, value in values.items()}
            outputs.write(numbers, STORED, boxes=np.stack(boxes), flips=np.stack(flips), **shaped)
    return skipped


def _outputs(model: Teacher, images: torch.Tensor, facts: Facts) -> dict[str, np.ndarray]:
    """Return the arrays of some crops, without the crops themselves."""
    if facts.features:
        logits, features = model.both(images)
    else:
        logits, features = model(images), None
    logs, classes = logits.double().log_softmax(dim=-1).topk(facts.top_k)
    outputs = {'classes': classes.cpu().numpy().astype(np.uint16), 'log_probabilities': logs.half().cpu().numpy()}
    if features is not None:
        outputs['features'] = features.half().cpu().numpy()
    return outputs


if __name__ == '__main__':
    run_command(main)
