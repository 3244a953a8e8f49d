"""Weights of a published run inside the package, with their model card."""

from pathlib import Path
from typing import Any

import timm
import torch

from aft_vision.files import replacing
from aft_vision.models.checkpoint import load_model
from aft_vision.models.weight_files import PACKAGED
from aft_vision.visualize import class_names
from tools.imagenette_page import describe_training
from tools.results import read_config, read_json

MOST_BYTES = 12 * 10**6
RECIPE = 'configs/small/imagenette.yaml'
# Of the published config, which has every key of the run.
COMMAND = 'python -m train.imagenet --config docs/results/data/imagenette/{run}/config.yaml data.dir=IMAGENETTE.tar'
CARD = """# {name}

An image classifier of {classes} classes, without attention: `{model}` of aft_vision, {parameters:,} parameters.

```python
import aft_vision, timm

model = timm.create_model('{model}', pretrained=True).eval()
```

| | |
|---|---|
| Classes | {words} |
| Input | {height} x {width} pixels, crop {crop_pct}; takes {sizes} |
| Top-1 | {top1:.2f} % on the {images:,} images of the official validation split |
| Weights | {which} of the last of {epochs} epochs, in float16{chosen} |
| Data | Imagenette, its official split; centre squares of 160 x 160 pixels, so not pixel for pixel fastai's |
| Recipe | {recipe}{start}, learning rate {lr:g} per 512 images, seed {seed} |
| Training | in {precision}, {commit}; {processor} |

```sh
{command}
```

The weights were trained on images of ImageNet, of which Imagenette is a subset. Its terms allow use of the images for
non-commercial research and education only; they belong to their owners and are not part of this package. The MIT
licence is that of the code and does not extend to images or weights, whose licence timm names `other`. The weights
know ten classes and were tested on no others: use them to try the package.
"""


def package(folder: Path, place: Path = PACKAGED) -> Path:
    """Copy the weights of a published run into the package, write their card, and return their path.

    Args:
        folder: A folder of `tools.publish`, with weights.
        place: The folder of packaged weights.

    Raises:
        ValueError: the model may not have packaged weights or differs from the registered one, the run was validated
            on other images than the official split, or all packaged weights together would be too large.
    """
    data = read_config(folder / 'config.yaml', 'train.imagenet')['data']
    for key in ('val_share', 'eval_split'):
        if data.get(key) is not None:
            raise ValueError(
                f'expected a run validated on the official split, got {folder} with data.{key}={data[key]}: '
                f'train on all training images, with data.{key}=null'
            )
    content = read_json(folder / 'config.json')
    model = content['architecture']
    cfg: Any = timm.get_pretrained_cfg(model)
    if not getattr(cfg, 'tag', None) or not model.startswith('aft_'):
        raise ValueError(f'expected a model of this package with a tag for weights, got {model}, which has none')
    file = folder / 'model.safetensors'
    check_registered(model, folder, file)
    target = place / f'{model}.{cfg.tag}.safetensors'
    others = sum(path.stat().st_size for path in place.glob('*.safetensors') if path != target)
    if others + file.stat().st_size > MOST_BYTES:
        raise ValueError(
            f'expected packaged weights of at most {MOST_BYTES:,} bytes in all, got {others:,} and these of '
            f'{file.stat().st_size:,}'
        )
    card = model_card(folder, f'{model}.{cfg.tag}')
    for path, data in ((target, file.read_bytes()), (target.with_suffix('.md'), card.encode())):
        with replacing(path) as written:
            written.write_bytes(data)
    return target


def check_registered(model: str, folder: Path, file: Path) -> None:
    """Raise a ValueError unless the registered model computes what the model of the folder does."""
    kept: Any = load_model(folder)
    try:
        found: Any = timm.create_model(model, pretrained=True, pretrained_cfg_overlay={'file': str(file)}).eval()
    except (RuntimeError, ValueError) as error:
        raise ValueError(f'expected weights of the registered {model}, got {folder}: {error}') from error
    keys = ('input_size', 'crop_pct', 'mean', 'std', 'num_classes', 'label_names')
    for key in keys:
        values = (each.pretrained_cfg.get(key) for each in (found, kept))
        # JSON has no tuples.
        registered, trained = ([*value] if isinstance(value, tuple) else value for value in values)
        if registered != trained:
            raise ValueError(f'expected {key} = {registered} of the registered {model}, got {trained} in {folder}')
    images = torch.randn(2, *kept.pretrained_cfg['input_size'], generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        if not torch.equal(found(images), kept(images)):
            raise ValueError(f'expected the arguments of the registered {model}, got others in {folder}')


def model_card(folder: Path, name: str) -> str:
    """Write the card of the weights of a published run."""
    result = read_json(folder / 'result.json')
    config = read_config(folder / 'config.yaml', 'train.imagenet')
    model: Any = load_model(folder)
    cfg = model.pretrained_cfg
    _, height, width = cfg['input_size']
    epochs, lr, seed = config['schedule']['epochs'], config['optim']['lr'], config['run']['seed']
    start = config['run'].get('init_from')
    amp = config['run']['amp']
    commit, processor = describe_training(result)
    top1 = result['top1_float16']
    found = ' and '.join(f'{name} ({value:.2f} %)' for name, value in top1.items())
    unrounded = '' if top1[result['best']] == max(top1.values()) else ' before rounding to float16'
    return CARD.format(
        name=name,
        model=cfg['architecture'],
        classes=cfg['num_classes'],
        parameters=result['parameters'],
        words=', '.join(class_names(model)),
        height=height,
        width=width,
        crop_pct=cfg['crop_pct'],
        sizes='any multiple of the patch size' if not cfg['fixed_input_size'] else 'other sizes by `set_input_size`',
        top1=top1[result['best']],
        images=len(result['right'][result['best']]),
        which={'weights': 'those', 'average': 'the moving average of those'}[result['best']],
        chosen=f': the better of {found} on this split{unrounded}' if len(top1) > 1 else '',
        epochs=epochs,
        recipe=RECIPE,
        start=f' from the weights of {start}' if start else '',
        lr=lr,
        seed=seed,
        precision='float32' if amp == 'none' else amp,
        commit=commit,
        processor=processor,
        command=COMMAND.format(run=folder.name),
    )
