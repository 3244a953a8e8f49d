"""Export to a folder for timm, transformers and the Hugging Face hub."""

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
from timm.data import resolve_model_data_config
from timm.models._hub import generate_readme
from torch import nn

from aft_vision.export.verify import channels
from aft_vision.files import sync_directory
from aft_vision.models import AFTPyramid, AFTVisionTransformer
from aft_vision.models.weight_files import add_checksum
from aft_vision.sizes import default_size, has_fixed_input_size, resize_model

CITATION = """@article{zhai2021attention,
  title={An Attention Free Transformer},
  author={Zhai, Shuangfei and Talbott, Walter and Srivastava, Nitish and Huang, Chen and Goh, Hanlin and Zhang, Ruixiang
    and Susskind, Josh},
  journal={arXiv preprint arXiv:2105.14103},
  year={2021}
}"""
USAGE = """
```python
{import_aft}import timm

model = timm.create_model('local-dir:FOLDER', pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
logits = model(transform(image).unsqueeze(0))  # image: a PIL image in RGB
```

FOLDER is this folder; from the hub it is `timm.create_model('hf-hub:USER/NAME', pretrained=True)`. In transformers:

```python
{import_aft}from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained('FOLDER')
```
"""
IMPORT_AFT = 'import aft_vision  # registers the architecture with timm; must come before the model is loaded\n'


def export_model(
    model: nn.Module,
    directory: str | Path,
    class_names: Sequence[str],
    data_config: dict[str, Any] | None = None,
    card: str | None = None,
) -> None:
    """Write config.json and model.safetensors, which `timm.create_model('local-dir:DIR', pretrained=True)` loads.

    After `import aft_vision`, transformers' AutoModelForImageClassification loads the folder too.

    Args:
        class_names: Names in the order of the logits.
        data_config: The preprocessing to record: `input_size`, `crop_pct`, `mean`, `std`, `interpolation`.
        card: Text of a README.md, such as from `model_card`; None writes none.
    """
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f'.{directory.name}.', suffix='.tmp', dir=directory.parent))
    try:
        timm.models.save_for_hf(
            model,
            str(temporary),
            model_config={'label_names': list(class_names)},
            safe_serialization=True,
            data_config=data_config,
        )
        _name_classes_once(temporary / 'config.json')
        add_checksum(temporary / 'model.safetensors')
        if card is not None:
            (temporary / 'README.md').write_text(card, encoding='utf-8')
        directory.mkdir(parents=True, exist_ok=True)
        for file in temporary.iterdir():
            os.replace(file, directory / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_directory(directory)


def export_hub_folder(
    model: nn.Module,
    directory: str | Path,
    size: tuple[int, int] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    license: str | None = None,
) -> None:
    """Write the folder of `export_model` with a model card, ready for the hub.

    Args:
        model: Made by `timm.create_model`, with its preprocessing and class names in `pretrained_cfg`, as from
            `load_model`.
        size: (H, W) in pixels to record as its input size; a fixed-size model is resized. None keeps the model's size.
        checkpoint: Content of the trainer's checkpoint, whose accuracy the card reports.
        license: Licence of the weights, see `model_card`.
    """
    cfg: Any = model.pretrained_cfg
    data_config = None
    if size is not None:
        model = resize_model(copy.deepcopy(model), size)
        data_config = {'input_size': (channels(model), *size)}
    results = {}
    if checkpoint and 'best_top1' in checkpoint:
        results['Top-1 (validation)'] = f'{checkpoint["best_top1"]:.1f} % after {checkpoint["epoch"]} epochs'
    card = model_card(model, results, license=license, size=size)
    export_model(model, directory, cfg.get('label_names') or [], data_config, card)


def model_card(
    model: nn.Module,
    results: Mapping[str, str] | None = None,
    license: str | None = None,
    size: tuple[int, int] | None = None,
) -> str:
    """Write the README.md of a hub folder: description, results, usage and citation.

    Args:
        results: Metrics with their conditions: `{'Top-1 (validation, 100 epochs)': '74.8 %'}`.
        license: Licence of the weights, by the hub's names (`mit`, `apache-2.0`); None takes that of the architecture's
            pretrained configuration, or `other`.
        size: (H, W) in pixels of its input; None means the model's default.

    Returns:
        Markdown with the hub's metadata header.
    """
    cfg: Any = model.pretrained_cfg
    config = resolve_model_data_config(model)
    is_aft = isinstance(model, AFTVisionTransformer | AFTPyramid)
    height, width = size or default_size(model)
    others = 'any other that is a multiple of the patch size' if hasattr(model, 'patch_embed') else 'any other'
    sizes = 'only this size' if has_fixed_input_size(model) else others
    details = {
        'Architecture': cfg['architecture'],
        'Parameters': f'{sum(x.numel() for x in model.parameters()):,}',
        'Input': f'{height} x {width} pixels; takes {sizes}',
        'Classes': str(model.num_classes),
        'Preprocessing': f'crop {config["crop_pct"]}, {config["interpolation"]}, mean {config["mean"]}, '
        f'std {config["std"]}',
        **(results or {}),
    }
    if cfg.get('paper_ids'):
        papers = [cfg['paper_ids']] if isinstance(cfg['paper_ids'], str) else list(cfg['paper_ids'])
        details['Paper'] = f'{cfg.get("paper_name", "")} ({", ".join(papers)})'.strip()
    card = {
        'license': license or cfg.get('license') or 'other',
        'description': 'An image classifier of timm' + (' without attention, made with aft_vision.' if is_aft else '.'),
        'details': details,
        'usage': USAGE.format(import_aft=IMPORT_AFT if is_aft else '').rstrip(),
        **({'citation': CITATION} if is_aft else {}),
    }
    return generate_readme(card, cfg['architecture'])


def _name_classes_once(config: Path) -> None:
    # timm 1.0.31 also writes num_classes to the model's arguments, and transformers 5 would pass it twice.
    content = json.loads(config.read_text(encoding='utf-8'))
    content.get('model_args', {}).pop('num_classes', None)
    config.write_text(json.dumps(content, indent=2), encoding='utf-8')
