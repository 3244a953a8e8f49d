"""Export to a folder for timm, transformers and the Hugging Face hub."""

import contextlib
import copy
import json
import math
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
from timm.data import resolve_input_data_config
from timm.models import get_model_args
from timm.models._hub import generate_readme
from torch import nn

from aft_vision.data.class_names import in_words
from aft_vision.errors import shorten
from aft_vision.export.program import choose_shape, export_onnx, export_pt2
from aft_vision.export.verify import Check, channels, smallest_size
from aft_vision.files import sync_directory
from aft_vision.models import AFTPyramid, AFTVisionTransformer
from aft_vision.sizes import default_size, has_fixed_input_size, record_size, resize_model, takes_any_size

CITATION = """@article{zhai2021attention,
  title={An Attention Free Transformer},
  author={Zhai, Shuangfei and Talbott, Walter and Srivastava, Nitish and Huang, Chen and Goh, Hanlin and Zhang, Ruixiang
    and Susskind, Josh},
  journal={arXiv preprint arXiv:2105.14103},
  year={2021}
}"""
IMPORT_AFT = 'import aft_vision  # registers the architecture with timm; must come before the model is loaded\n'
TIMM_USAGE = """
```python
{import_aft}import timm

model = timm.create_model('local-dir:FOLDER', pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
logits = model(transform(image).unsqueeze(0))  # image: a PIL image in {mode}
```

FOLDER is this folder; from the hub it is `timm.create_model('hf-hub:USER/NAME', pretrained=True)`. In transformers:

```python
{import_aft}from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained('FOLDER')
```
"""
# The ways of loading a model without this package, by the file that they need.
ONNX_USAGE = """
With onnxruntime ({sizes}; no masks):

```python
import onnxruntime

session = onnxruntime.InferenceSession('FOLDER/model.onnx')
(logits,) = session.run(None, {{'images': images.numpy()}})
```
"""
CODE_USAGE = """
With transformers 5.24 or newer, for inference in float32 ({modeling}.py runs model.pt2; read it before you trust it):

```python
from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained('FOLDER', trust_remote_code=True)
logits = model(images).logits
```
"""
PROCESSOR_USAGE = """
`pipeline('image-classification', 'FOLDER', trust_remote_code=True)` of transformers takes photographs.
"""
PT2_USAGE = """
With torch.export ({sizes}; no masks):

```python
import torch

model = torch.export.load('FOLDER/model.pt2').module()
logits = model(images)
```
"""
NEEDS_PACKAGE = """
With aft_vision, for timm, and for training, features and masks:
"""
# Parts of a folder for users without this package.
PARTS = ('code', 'onnx', 'pt2')
# The file by which transformers loads model.pt2.
MODELING = 'modeling_aft_vision'
# Files that some exports have and others have not; the first is of earlier versions.
MODEL_FILES = frozenset({'hubconf.py', f'{MODELING}.py', 'preprocessor_config.json', 'model.onnx', 'model.pt2'})
# Filters of PIL, by the names of timm.
RESAMPLE = {'nearest': 0, 'lanczos': 1, 'bilinear': 2, 'bicubic': 3, 'box': 4, 'hamming': 5}


def export_model(
    model: nn.Module,
    directory: str | Path,
    class_names: Sequence[str],
    data_config: dict[str, Any] | None = None,
    card: bool = False,
) -> None:
    """Write config.json and model.safetensors, which `timm.create_model('local-dir:DIR', pretrained=True)` loads.

    After `import aft_vision`, transformers' AutoModelForImageClassification loads the folder too.

    Args:
        class_names: Names in the order of the logits.
        data_config: The preprocessing to record: `input_size`, `crop_pct`, `mean`, `std`, `interpolation`.
        card: Also write a `model_card`, which replaces another model's in the folder.

    Raises:
        ValueError: the model has another number of classes than `class_names`, if there are any, or was changed after
            it was built so that timm cannot rebuild it.
    """
    with _replacing_files(Path(directory)) as folder:
        _write_weights(model, folder, class_names, data_config)
        if card:
            (folder / 'README.md').write_text(model_card(model, data_config=data_config), encoding='utf-8')


def export_hub_folder(
    model: nn.Module,
    directory: str | Path,
    size: tuple[int, int] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    license: str | None = None,
    parts: Collection[str] = PARTS,
) -> dict[str, list[Check]]:
    """Write the folder of `export_model` with a model card and what users without this package need.

    Args:
        model: Made by `timm.create_model`, with its preprocessing and class names in `pretrained_cfg`, as from
            `load_model`.
        size: (H, W) in pixels to record as its input size; a fixed-size model is resized. None keeps the model's size.
        checkpoint: Content of the trainer's checkpoint, whose accuracy the card reports.
        license: Licence of the weights, for the card and config.json; see `model_card`.
        parts: 'onnx': model.onnx; 'pt2': model.pt2 with torch's operators; 'code': the code by which transformers runs
            model.pt2, which is written with it. None is written for a model of timm, which loads without this package.

    Returns:
        The comparisons with the model, by the file.

    Raises:
        ValueError: a part is unknown, a file differs from the model, or the model has another number of classes than
            names in its `pretrained_cfg`.
        ImportError: 'onnx' needs the `export` extra.
    """
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise ValueError(f'parts must be some of {", ".join(PARTS)}, got {", ".join(sorted(unknown))}')
    cfg: Any = model.pretrained_cfg
    data_config = None
    if size is not None:
        model = resize_model(copy.deepcopy(model), size)
        data_config = {'input_size': (channels(model), *size)}
    results = {}
    # The last checkpoint of a run has the best accuracy of the run, not the accuracy of its weights.
    if checkpoint and 'best_top1' in checkpoint and 'optimizer' not in checkpoint:
        results['Top-1 (validation)'] = f'{checkpoint["best_top1"]:.1f} % after {checkpoint["epoch"]} epochs'
    with _replacing_files(Path(directory)) as folder:
        _write_weights(model, folder, cfg.get('label_names') or [], data_config, license)
        checks = _write_parts(model, folder, size or default_size(model), parts)
        files = [path.name for path in folder.iterdir()]
        card = model_card(model, results, license, data_config, files)
        (folder / 'README.md').write_text(card, encoding='utf-8')
    return checks


def _write_parts(
    model: nn.Module, folder: Path, size: tuple[int, int], parts: Collection[str]
) -> dict[str, list[Check]]:
    checks = {}
    if isinstance(model, AFTVisionTransformer | AFTPyramid):
        if 'onnx' in parts:
            checks['model.onnx'] = export_onnx(model, folder / 'model.onnx', choose_shape(model, size))
        has_code = 'code' in parts and model.num_classes > 0
        if has_code or 'pt2' in parts:
            checks['model.pt2'] = export_pt2(model, folder / 'model.pt2', choose_shape(model, size), aten=True)
        if has_code:
            _write_code(model, folder, size)
    return checks


def _write_code(model: nn.Module, folder: Path, size: tuple[int, int]) -> None:
    # What transformers needs to load model.pt2 where this package and timm are not installed.
    shutil.copyfile(Path(__file__).with_name(f'{MODELING}.py'), folder / f'{MODELING}.py')
    names = {'AutoConfig': 'Config', 'AutoModelForImageClassification': 'ForImageClassification'}
    processor = image_processor(model, size)
    if processor is not None:
        names['AutoImageProcessor'] = 'ImageProcessor'
    auto_map = {auto: f'{MODELING}.AFTVision{name}' for auto, name in names.items()}
    config = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
    (folder / 'config.json').write_text(json.dumps({**config, 'auto_map': auto_map}, indent=2), encoding='utf-8')
    if processor is not None:
        text = json.dumps({'auto_map': auto_map, **processor}, indent=2)
        (folder / 'preprocessor_config.json').write_text(text, encoding='utf-8')


def image_processor(model: nn.Module, size: tuple[int, int]) -> dict[str, Any] | None:
    """Return the options of transformers' BitImageProcessor for a model's evaluation transform at (H, W) pixels.

    None if no options give such a transform.
    """
    config = resolve_input_data_config(model)
    scaled = tuple(math.floor(side / config['crop_pct']) for side in size)
    mode = config.get('crop_mode') or 'center'
    square = mode == 'center' and scaled[0] == scaled[1]
    # The processors of transformers give three channels.
    if config['input_size'][0] != 3 or config['interpolation'] not in RESAMPLE or not (square or mode == 'squash'):
        return None
    return {
        'do_convert_rgb': True,
        'do_resize': True,
        'size': {'shortest_edge': scaled[0]} if square else {'height': scaled[0], 'width': scaled[1]},
        'resample': RESAMPLE[config['interpolation']],
        'do_center_crop': True,
        'crop_size': {'height': size[0], 'width': size[1]},
        'do_rescale': True,
        'rescale_factor': 1 / 255,
        'do_normalize': True,
        'image_mean': list(config['mean']),
        'image_std': list(config['std']),
    }


def model_card(
    model: nn.Module,
    results: Mapping[str, str] | None = None,
    license: str | None = None,
    data_config: dict[str, Any] | None = None,
    files: Collection[str] = (),
) -> str:
    """Write the README.md of a hub folder: description, results, usage and citation.

    Args:
        results: Metrics with their conditions: `{'Top-1 (validation, 100 epochs)': '74.8 %'}`.
        license: Licence of the weights, by the hub's names (`mit`, `apache-2.0`); None takes the one of the model's
            `pretrained_cfg`, or `unknown`.
        data_config: Preprocessing, as in `export_model`.
        files: Names of the folder's files, of which the card explains those for users without this package.

    Returns:
        Markdown with the hub's metadata header.
    """
    cfg: Any = model.pretrained_cfg
    config = resolve_input_data_config(model, data_config)
    is_aft = isinstance(model, AFTVisionTransformer | AFTPyramid)
    height, width = config['input_size'][-2:]
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
        'license': license or cfg.get('license') or 'unknown',
        'description': 'An image classifier of timm' + (' without attention, made with aft_vision.' if is_aft else '.'),
        'details': details,
        'usage': _usage(model, files),
        **({'citation': CITATION} if is_aft else {}),
    }
    return generate_readme(card, cfg['architecture'])


def _usage(model: nn.Module, files: Collection[str]) -> str:
    # The ways of loading the folder, first those without this package.
    mode = 'mode L' if channels(model) == 1 else 'RGB'
    if not isinstance(model, AFTVisionTransformer | AFTPyramid):
        return TIMM_USAGE.format(import_aft='', mode=mode).rstrip()
    sizes = 'any height and width' if takes_any_size(model) else 'one image size'
    sections = [CODE_USAGE.format(modeling=MODELING)] if f'{MODELING}.py' in files else []
    sections += [PROCESSOR_USAGE] if 'preprocessor_config.json' in files else []
    sections += [ONNX_USAGE.format(sizes=sizes)] if 'model.onnx' in files else []
    if 'model.pt2' in files:
        minimum = ' of at least {} x {} pixels'.format(*smallest_size(model)) if takes_any_size(model) else ''
        sections.append(PT2_USAGE.format(sizes=sizes + minimum))
    return ''.join([*sections, NEEDS_PACKAGE, TIMM_USAGE.format(import_aft=IMPORT_AFT, mode=mode)]).rstrip()


@contextlib.contextmanager
def _replacing_files(directory: Path) -> Iterator[Path]:
    # Yield a folder whose files then replace the files of an earlier export in the directory; after an error nothing
    # changes.
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f'.{directory.name}.', suffix='.tmp', dir=directory.parent))
    try:
        yield temporary
        directory.mkdir(parents=True, exist_ok=True)
        written = [file.name for file in temporary.iterdir()]
        for name in written:
            os.replace(temporary / name, directory / name)
        # The files of an earlier export would be of another model.
        for name in MODEL_FILES.difference(written):
            (directory / name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_directory(directory)


def _write_weights(
    model: nn.Module,
    folder: Path,
    class_names: Sequence[str],
    data_config: dict[str, Any] | None,
    license: str | None = None,
) -> None:
    classes: Any = model.num_classes
    if class_names and len(class_names) != classes:
        raise ValueError(
            f'expected a name for each of the {classes} classes, got {len(class_names)} names: correct the class names '
            "(label_names of the model's pretrained_cfg), or remove them"
        )
    if data_config and 'input_size' in data_config:
        model = copy.deepcopy(model)
        record_size(model, data_config['input_size'][-2:])
    # safetensors takes no other layout, such as channels_last.
    if not all(tensor.is_contiguous() for tensor in model.state_dict().values()):
        model = copy.deepcopy(model)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.contiguous()
    _check_rebuilt(model)
    timm.models.save_for_hf(
        model,
        str(folder),
        model_config={'label_names': in_words(class_names)},
        safe_serialization=True,
        data_config=data_config,
    )
    _correct_config(folder / 'config.json', license)
    # safetensors 0.8 lets only the owner read what it writes.
    shutil.copymode(folder / 'config.json', folder / 'model.safetensors')


def _check_rebuilt(model: nn.Module) -> None:
    # A model that was changed after it was built, such as by timm's prune_intermediate_layers, is not the one of its
    # arguments.
    if isinstance(model, AFTVisionTransformer | AFTPyramid):
        cfg: Any = model.pretrained_cfg
        rebuilt = timm.create_model(cfg['architecture'], device='meta', **get_model_args(model))
        try:
            rebuilt.load_state_dict(model.state_dict(), assign=True)
        except RuntimeError as error:
            raise ValueError(
                'expected a model that timm can rebuild, got one changed after it was built, which export_onnx and '
                f'export_pt2 write as it is: {shorten(str(error), 300)}'
            ) from error


def _correct_config(config: Path, license: str | None) -> None:
    # timm 1.0.31 also writes num_classes to the model's arguments, and transformers 5 would pass it twice.
    content = json.loads(config.read_text(encoding='utf-8'))
    content.get('model_args', {}).pop('num_classes', None)
    if license is not None:
        content['pretrained_cfg']['license'] = license
    config.write_text(json.dumps(content, indent=2), encoding='utf-8')
