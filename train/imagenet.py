"""Train an image classifier.

python -m train.imagenet --config FILE [section.key=value ...]

FILE is a YAML experiment such as configs/smoke/clothing_demo.yaml; `section.key=value` changes one value of it, for
example `data.dir=/data/imagenet run.dir=runs/first optim.lr=1e-3`. data.dir is a folder or tar file with train/CLASS
and val/CLASS; data.name is a data set of torchvision, Hugging Face, WebDataset or TensorFlow by timm's name.

The folder of the run receives config.yaml (the resolved experiment, which reproduces the run), summary.csv, curves.png,
tensorboard/, best.pth, last.pth and export/, which `timm.create_model('local-dir:.../export', pretrained=True)` loads.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.utils import random_seed
from torch import nn

from aft_vision.data import Loaders, create_loaders
from aft_vision.evaluate import initialize_model, load_model
from aft_vision.visualize import plot_history
from train.checkpoint import export_model
from train.config import WEIGHT_KEYS, load_config, save_config
from train.engine import TrainState, create_state, fit
from train.schema import Config


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--config', type=Path, required=True, help='the YAML experiment')
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
    """
    args = parse_args(argv)
    config = load_config(args.config, args.overrides)
    run_dir = choose_run_dir(config, default=Path('runs') / args.config.stem)
    if config.run.cpu_threads is not None:
        torch.set_num_threads(config.run.cpu_threads)
    device = choose_device(config.run.device)
    loaders = build_loaders(config, device)
    name, kwargs = model_arguments(config, num_classes=len(loaders.class_names))
    random_seed(config.run.seed)
    model = build_model(name, kwargs)
    if config.run.init_from is not None:
        initialize_model(model, config.run.init_from, config.run.reset_head)
    updates_per_epoch = len(loaders.train) // config.optim.accumulate
    state = create_state(model, config, updates_per_epoch, len(loaders.class_names), device)
    run_dir.mkdir(parents=True, exist_ok=True)
    save_config(config, run_dir / 'config.yaml')
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f'{name}: {parameters / 1e6:.2f} M parameters on {device}; {len(loaders.train.dataset)} training images')
    rebuild = {key: value for key, value in kwargs.items() if key not in WEIGHT_KEYS}
    description = {'model_name': name, 'model_kwargs': rebuild, 'class_names': loaders.class_names}
    fit(state, loaders, run_dir, description, progress=not args.quiet)
    finish(run_dir, state, loaders)
    return state


def choose_run_dir(config: Config, default: Path) -> Path:
    """Name the folder of the run; one that holds a run is left alone unless `run.overwrite` is set."""
    run_dir = Path(config.run.dir) if config.run.dir is not None else default
    if (run_dir / 'last.pth').exists() and not config.run.overwrite:
        raise FileExistsError(
            f'expected a new folder, got {run_dir}, which holds a run; set run.dir or run.overwrite=true'
        )
    return run_dir


def choose_device(name: str) -> torch.device:
    """Resolve `auto` to CUDA where there is one.

    Raises:
        ValueError: the device does not exist here.
    """
    available = torch.cuda.is_available()
    if name == 'auto':
        return torch.device('cuda' if available else 'cpu')
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f'expected run.device to be auto or a device of torch, got {name!r}: {error}') from error
    if device.type == 'cuda' and not available:
        raise ValueError(f'expected run.device to be a device of this machine, got {name!r}, and CUDA is not available')
    return device


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


def build_loaders(config: Config, device: torch.device) -> Loaders:
    """Make the loaders, normalised as the model expects."""
    cfg = timm.get_pretrained_cfg(config.model['name'])
    statistics = {'mean': cfg.mean, 'std': cfg.std} if cfg is not None else {}
    return create_loaders(
        config.data,
        config.data.img_size,
        config.micro_batch_size,
        eval_batch_size=config.data.eval_batch_size,
        augment=config.augment,
        crop_pct=config.data.crop_pct,
        seed=config.run.seed,
        num_workers=config.data.num_workers,
        device=device,
        **statistics,
    )


def finish(run_dir: Path, state: TrainState, loaders: Loaders) -> None:
    """Draw the curves, export the best weights with their preprocessing, and print what is where."""
    plot_history(state.history, run_dir / 'curves.png')
    data_config = {
        'input_size': (3, *state.config.data.img_size),
        'crop_pct': state.config.data.crop_pct,
        'interpolation': 'bicubic',
    }
    export_model(load_model(run_dir / 'best.pth'), run_dir / 'export', loaders.class_names, data_config)
    print(f'best top-1 {state.best_top1:.1f} %; in {run_dir}:')
    print('  best.pth, last.pth  checkpoints    export/     the best weights for timm.create_model')
    print('  summary.csv         every epoch    curves.png  the same as a picture')
    print('  config.yaml         repeats the run', end='')
    print('    tensorboard/  for tensorboard --logdir' if state.config.run.tensorboard else '')


if __name__ == '__main__':
    main()
