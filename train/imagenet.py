"""Train an image classifier.

python -m train.imagenet --config FILE [--eval] [section.key=value ...]
torchrun --nproc-per-node 8 -m train.imagenet --config FILE [section.key=value ...]

FILE is a YAML experiment, or the name of one of the package such as finetune; `section.key=value` changes one value of
it, for example `data.dir=/data/imagenet run.dir=runs/first optim.lr=1e-3`. data.dir is a folder or tar file with
train/CLASS and val/CLASS; data.name is a data set of torchvision, Hugging Face or WebDataset by timm's name.

A run writes into its folder config.yaml (the resolved experiment, which reproduces the run), summary.csv, curves.png,
tensorboard/, best.pth, last.pth and export/, which `timm.create_model('local-dir:.../export', pretrained=True)` loads.
run.resume=auto continues an interrupted run or starts a new one.

--eval only evaluates: it prints the name of the weights and their validation accuracy. They are those of run.init_from
on the command line, else best.pth in the folder of the run, else those that the run would start from.
"""

import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from train.command_line import parse_args, run_command

EXAMPLE = 'finetune'

if __name__ == '__main__':
    parse_args(__doc__, EXAMPLE)

from aft_vision.evaluate import evaluate
from aft_vision.export import export_model
from aft_vision.models.checkpoint import load_model, read_checkpoint
from aft_vision.visualize import class_names, describe_targets, draw_history, save_figure
from train.build import (
    build_evaluation,
    build_loaders,
    build_state,
    describe_start,
    published_weights,
    resolve_images,
)
from train.checkpoint import BEST, Saver, lock_run
from train.config import load_config
from train.distributed import World, join_world
from train.key_list import format_keys, list_keys
from train.model_section import model_schema
from train.run import check_run_dir, evaluated_checkpoint, find_run_dir, train_run
from train.schema import Config
from train.state import TrainState, autocast_dtype


def main(argv: Sequence[str] | None = None) -> TrainState | None:
    """Train or evaluate.

    Returns:
        The final state, with the metrics of every epoch in `progress.history`; None after an evaluation.

    Raises:
        ValueError: the experiment, the data set or the checkpoint to start from is not valid.
        FileExistsError: the folder already has a run.
        SystemExit: a signal stopped the run; its state is saved.
    """
    args = parse_args(__doc__, EXAMPLE, argv)
    if args.keys:
        print(format_keys(list_keys(Config, model_schema())))
        return None
    config = load_config(args.config, args.overrides)
    run_dir = find_run_dir(config.run.dir, args.config)
    if not args.eval:
        check_run_dir(run_dir, config.run.resume, config.run.overwrite)
    run = config.run
    with join_world(run.device, run.cpu_threads, run.timeout_minutes, args.eval) as world:
        if args.eval:
            checkpoint = evaluated_checkpoint(config, run_dir, args.overrides)
            evaluate_weights(config, checkpoint, world, progress=not args.quiet)
            return None
        return train_classifier(config, run_dir, world, progress=not args.quiet)


def train_classifier(
    config: Config, run_dir: Path, world: World, progress: bool = True, experiment: Path | None = None
) -> TrainState:
    """Train, export the best weights and print the files of the run.

    Args:
        experiment: The file to resume an interrupted run with; None for the one in the folder of the run.

    Returns:
        The final state.
    """
    images = resolve_images(config)
    loaders = build_loaders(config, images, world)
    if world.is_primary:
        print(loaders.description)
    state, description = build_state(config, images, loaders, world)
    # The model has its weights now.
    del images
    start = describe_start(config)
    if world.is_primary and start:
        print(start)
    taught_by = config.distill.teacher if loaders.outputs is None else loaders.outputs.facts.teacher
    if world.is_primary and taught_by is not None:
        print(f'distilled from {taught_by} ({config.distill.kind})')
    with lock_run(run_dir) if world.is_primary else nullcontext():
        run = config.run
        saver = Saver(run_dir, description, run.keep, run.save_minutes, experiment)
        train_run(state, loaders, saver, run.resume, run.overwrite, run.throughput_batches, progress)
        if world.is_primary:
            finish(run_dir, state, description)
    return state


def evaluate_weights(
    config: Config, checkpoint: str | Path | None, world: World, progress: bool = True
) -> dict[str, float]:
    """Evaluate on the validation images, each counted once, and print the weights and the result.

    Args:
        checkpoint: The weights; None for the weights of the name of the model.
    """
    model, loader, classes = build_evaluation(config, checkpoint, world)
    if world.is_primary:
        print(f'evaluates {checkpoint or published_weights(config)}')
    metrics = evaluate(
        model,
        loader,
        world.device,
        amp_dtype=autocast_dtype(config.run.amp, world.device),
        distributed=world.is_distributed,
        progress=progress and world.is_primary,
        classes=classes,
    )
    if world.is_primary:
        top5 = f'  top-5 {metrics["top5"]:.3f} %' if 'top5' in metrics else ''
        line = f'top-1 {metrics["top1"]:.3f} %{top5}  loss {metrics["loss"]:.4f}'
        print(f'{config.model["name"]}: {line}  images {metrics["samples"]:.0f}')
    return metrics


def finish(run_dir: Path, state: TrainState, description: dict[str, Any]) -> None:
    """Export the best weights with their preprocessing, draw the curves, and print the files of the run."""
    model = load_model(run_dir / BEST)
    export_model(model, run_dir / 'export', description['class_names'], description['data_config'])
    targets = describe_targets(state.record)
    save_figure(draw_history(state.progress.history, targets), run_dir / 'curves.png')
    by_class = read_checkpoint(run_dir / BEST).get('by_class')
    worst = '' if by_class is None else describe_worst(class_names(model), by_class[:, :2].tolist())
    print(f'best top-1 {state.progress.best:.1f} %{worst}\nin {run_dir}:')
    print('  best.pth, last.pth  checkpoints    export/     the best weights for timm.create_model')
    print('  summary.csv         every epoch    curves.png  the metrics as plots')
    print('  config.yaml         to repeat the run', end='')
    print('    tensorboard/  for tensorboard --logdir' if state.loop.tensorboard else '')
    print(f'aft-vision report --checkpoint {shlex.quote(str(run_dir))} shows what it confuses')


def describe_worst(names: Sequence[str], by_class: Sequence[Sequence[int]], most: int = 3) -> str:
    """Return the classes of the lowest accuracy, as the end of a line; '' for a single class.

    Args:
        by_class: Images and right predictions of each class; a class without images is left out.
        most: Number of classes that are named.
    """
    shares = [(right / images, -images, name) for name, (images, right) in zip(names, by_class, strict=True) if images]
    worst = [f'{name} {100 * share:.1f} % of {-images}' for share, images, name in sorted(shares)[:most]]
    return f'; worst classes: {", ".join(worst)}' if len(shares) > 1 else ''


if __name__ == '__main__':
    run_command(main)
