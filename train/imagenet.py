"""Train an image classifier.

python -m train.imagenet --config FILE [--eval] [section.key=value ...]
torchrun --nproc-per-node 8 -m train.imagenet --config FILE [section.key=value ...]

FILE is a YAML experiment such as configs/smoke/clothing_demo.yaml; `section.key=value` changes one value of it, for
example `data.dir=/data/imagenet run.dir=runs/first optim.lr=1e-3`. data.dir is a folder or tar file with train/CLASS
and val/CLASS; data.name is a data set of torchvision, Hugging Face, WebDataset or TensorFlow by timm's name.

The folder of the run receives config.yaml (the resolved experiment, which reproduces the run), summary.csv, curves.png,
tensorboard/, best.pth, last.pth and export/, which `timm.create_model('local-dir:.../export', pretrained=True)` loads.
run.resume=auto goes on with a run that was interrupted, or begins it.

--eval trains nothing: it prints the accuracy on the validation images of the weights of run.init_from, of those of
model.pretrained=true, or of best.pth in the folder of the run.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.utils import random_seed
from torch import nn

from aft_vision.data import Loaders, create_loaders
from aft_vision.evaluate import check_image_size, initialize_model, load_model
from aft_vision.visualize import new_figure, plot_history
from train.checkpoint import BEST, Saver, export_model, holds_run, remove_run, resume
from train.config import WEIGHT_KEYS, load_config, save_config
from train.distill import load_teacher
from train.distributed import World, join_world
from train.engine import fit
from train.schema import Config
from train.state import TrainState, create_state
from train.throughput import measure_throughput


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--config', type=Path, required=True, help='the YAML experiment')
    parser.add_argument('--eval', action='store_true', help='evaluate, and train nothing')
    parser.add_argument('--quiet', action='store_true', help='no progress bar')
    parser.add_argument('overrides', nargs='*', metavar='section.key=value', help='changes to the experiment')
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> TrainState:
    """Train, and print where the results are.

    Returns:
        The final state, with the figures of every epoch in `history`.

    Raises:
        ValueError: the experiment, the data set or the checkpoint to start from is not valid.
        FileExistsError: the folder of the run already holds one.
        SystemExit: the run was asked to stop by a signal, and its state is saved.
    """
    args = parse_args(argv)
    config = load_config(args.config, args.overrides)
    run_dir = choose_run_dir(config, default=Path('runs') / args.config.stem)
    if config.run.cpu_threads is not None:
        torch.set_num_threads(config.run.cpu_threads)
    with join_world(config.run.device) as world:
        config.check_parts(world.size)
        loaders = build_loaders(config, world)
        state, description = build_state(config, loaders, world)
        if config.run.resume is not None:
            resume(state, run_dir, config.run.resume, loaders.class_names)
        if world.is_primary:
            begin(run_dir, state)
        if config.run.throughput_batches and not loaders.is_stream and len(loaders.train) > 1:
            throughput = measure_throughput(state, loaders, config.run.throughput_batches)
            if world.is_primary:
                print(throughput)
        saver = Saver(run_dir, description, config.run.keep, config.run.save_minutes)
        fit(state, loaders, saver, progress=not args.quiet)
        if world.is_primary:
            finish(run_dir, state, description)
    return state


def choose_run_dir(config: Config, default: Path) -> Path:
    """Name the folder of the run; one that holds a run is left alone unless it is to be resumed or overwritten."""
    run_dir = Path(config.run.dir) if config.run.dir is not None else default
    if holds_run(run_dir) and not (config.run.overwrite or config.run.resume):
        raise FileExistsError(
            f'expected a new folder, got {run_dir}, which holds a run; set run.dir, run.resume=auto to go on with it, '
            'or run.overwrite=true'
        )
    return run_dir


def build_state(config: Config, loaders: Loaders, world: World) -> tuple[TrainState, dict[str, Any]]:
    """Make the model and all that trains it, and what rebuilds the model from a checkpoint."""
    class_names = loaders.class_names
    name, kwargs = model_arguments(config, num_classes=len(class_names))
    # Before the seed, so that the first weights do not depend on the teacher.
    teacher = None
    if config.distill.teacher is not None:
        teacher = load_teacher(config.distill, class_names, config.data.img_size)
    random_seed(config.run.seed)
    model = build_model(name, kwargs)
    for size in image_sizes(config):
        check_image_size(model, size)
    if config.run.init_from is not None:
        initialize_model(model, config.run.init_from, config.run.reset_head)
    updates_per_epoch = len(loaders.train) // config.optim.accumulate
    state = create_state(model, config, updates_per_epoch, len(class_names), world, teacher)
    rebuild = {key: value for key, value in kwargs.items() if key not in WEIGHT_KEYS}
    preprocessing = {
        'input_size': (3, *(config.data.eval_img_size or config.data.img_size)),
        'crop_pct': config.data.crop_pct,
        'interpolation': 'bicubic',
    }
    described = {'model_name': name, 'model_kwargs': rebuild, 'class_names': class_names, 'data_config': preprocessing}
    return state, described


def image_sizes(config: Config) -> list[tuple[int, int]]:
    """All sizes (H, W) that the model will see, in pixels."""
    schedule = config.size_schedule
    sizes = [config.data.img_size] if schedule is None else list(schedule.sizes)
    return [*sizes, config.data.eval_img_size or config.data.img_size]


def model_arguments(config: Config, num_classes: int) -> tuple[str, dict[str, Any]]:
    """Split the model section into the name and all keyword arguments that rebuild the model."""
    kwargs = {'num_classes': num_classes, **config.model}
    name = kwargs.pop('name')
    # As timm's own scripts: only a model of fixed input size is told the size.
    if getattr(timm.get_pretrained_cfg(name), 'fixed_input_size', False):
        kwargs.setdefault('img_size', list(config.data.img_size))
    return name, kwargs


def build_model(name: str, kwargs: dict[str, Any]) -> nn.Module:
    """Create a registered model; an argument that it does not take is a ValueError."""
    try:
        return timm.create_model(name, **kwargs)
    except TypeError as error:
        raise ValueError(f'expected keyword arguments of the model {name}, got {kwargs}: {error}') from error


def build_loaders(config: Config, world: World) -> Loaders:
    """Make the loaders of this process, normalised as the model expects."""
    cfg = timm.get_pretrained_cfg(config.model['name'])
    return create_loaders(
        config.data,
        config.data.img_size,
        config.data.batch_size,
        eval_batch_size=config.data.eval_batch_size,
        train_sizes=config.size_schedule,
        eval_img_size=config.data.eval_img_size,
        augment=config.augment,
        crop_pct=config.data.crop_pct,
        mean=IMAGENET_DEFAULT_MEAN if cfg is None else cfg.mean,
        std=IMAGENET_DEFAULT_STD if cfg is None else cfg.std,
        seed=config.run.seed,
        accumulate=config.optim.accumulate,
        rank=world.rank,
        world_size=world.size,
        num_workers=config.data.num_workers,
        device=world.device,
    )


def begin(run_dir: Path, state: TrainState) -> None:
    """Make the folder of the run, write the experiment into it, and print what is trained."""
    # The curves are drawn in the end; what they need is better found missing now.
    new_figure(1, 1)
    run_dir.mkdir(parents=True, exist_ok=True)
    if state.config.run.resume is None:
        remove_run(run_dir)
    save_config(state.config, run_dir / 'config.yaml')
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    world = state.world
    processes = f'{world.size} processes, the first ' if world.size > 1 else ''
    print(f'{state.config.model["name"]}: {parameters / 1e6:.2f} M parameters; {processes}on {world.device}')
    distill = state.config.distill
    if distill.teacher is not None:
        print(f'distilled from {distill.teacher} ({distill.kind})')


def finish(run_dir: Path, state: TrainState, description: dict[str, Any]) -> None:
    """Export the best weights with their preprocessing, draw the curves, and print what is where."""
    model = load_model(run_dir / BEST)
    export_model(model, run_dir / 'export', description['class_names'], description['data_config'])
    plot_history(state.history, run_dir / 'curves.png')
    print(f'best top-1 {state.best_top1:.1f} %; in {run_dir}:')
    print('  best.pth, last.pth  checkpoints    export/     the best weights for timm.create_model')
    print('  summary.csv         every epoch    curves.png  the same as a picture')
    print('  config.yaml         repeats the run', end='')
    print('    tensorboard/  for tensorboard --logdir' if state.config.run.tensorboard else '')


if __name__ == '__main__':
    main()
