"""Train an image classifier on an ImageFolder.

python -m train.imagenet --config FILE [section.key=value ...]

FILE is a YAML experiment such as configs/smoke/clothing_demo.yaml; `section.key=value` changes one value of it, for
example `data.dir=/data/imagenet run.dir=runs/first optim.lr=1e-3`. The folder of the run receives config.yaml (the
resolved experiment, which reproduces the run), summary.csv, best.pth, last.pth and export/, a folder that
`timm.create_model('local-dir:.../export', pretrained=True)` loads.
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
from aft_vision.evaluate import load_model
from train.checkpoint import export_model
from train.config import Config, load_config, save_config
from train.engine import TrainState, create_state, fit


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
        ValueError: the experiment or the data set is not valid.
        FileExistsError: the folder of the run already holds one.
    """
    args = parse_args(argv)
    config = load_config(args.config, args.overrides)
    run_dir = choose_run_dir(config, default=Path('runs') / args.config.stem)
    random_seed(config.run.seed)
    if config.run.cpu_threads is not None:
        torch.set_num_threads(config.run.cpu_threads)
    device = torch.device(choose_device(config.run.device))
    loaders = build_loaders(config, device)
    name, kwargs = model_arguments(config, num_classes=len(loaders.class_names))
    model = build_model(name, kwargs)
    run_dir.mkdir(parents=True, exist_ok=True)
    save_config(config, run_dir / 'config.yaml')
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f'{name}: {parameters / 1e6:.2f} M parameters on {device}; {len(loaders.train.dataset)} training images')
    state = create_state(model, config, len(loaders.train), device)
    description = {'model_name': name, 'model_kwargs': kwargs, 'class_names': loaders.class_names}
    fit(state, loaders, config, run_dir, description, progress=not args.quiet)
    export_best(run_dir, config, loaders)
    print(
        f'best top-1 {state.best_top1:.1f} %; best.pth, last.pth, summary.csv, config.yaml and export/ are in {run_dir}'
    )
    return state


def choose_run_dir(config: Config, default: Path) -> Path:
    """Name the folder of the run; one that holds a run is left alone unless `run.overwrite` is set."""
    run_dir = Path(config.run.dir) if config.run.dir is not None else default
    if (run_dir / 'last.pth').exists() and not config.run.overwrite:
        raise FileExistsError(
            f'expected a new folder, got {run_dir}, which holds a run; set run.dir or run.overwrite=true'
        )
    return run_dir


def choose_device(name: str) -> str:
    """Resolve `auto` to CUDA where there is one."""
    if name != 'auto':
        return name
    return 'cuda' if torch.cuda.is_available() else 'cpu'


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
        config.data.dir,
        config.data.img_size,
        config.data.batch_size,
        eval_batch_size=config.data.eval_batch_size,
        augment=config.augment,
        crop_pct=config.data.crop_pct,
        num_workers=config.data.num_workers,
        device=device,
        **statistics,
    )


def export_best(run_dir: Path, config: Config, loaders: Loaders) -> None:
    """Export the best weights of the run with their preprocessing."""
    data_config = {
        'input_size': (3, *config.data.img_size),
        'crop_pct': config.data.crop_pct,
        'interpolation': 'bicubic',
    }
    export_model(load_model(run_dir / 'best.pth'), run_dir / 'export', loaders.class_names, data_config)


if __name__ == '__main__':
    main()
