"""Publish finished runs of configs/small/imagenette.yaml, and write the tables and the picture of their pages.

python -m tools.publish RUN [--row NAME] [--package]
python -m tools.publish RUN ... --ablation
python -m tools.publish [RUN ...]

RUN is the folder of a complete run of train.imagenet, named after its row, learning rate and seed, such as
conv_8e-3_seed0. What later work needs goes to docs/results/data/imagenette/ROW_seedN: summary.csv, config.yaml, the
weights of the last epoch or their moving average, whichever is better, in float16 (config.json and model.safetensors,
which load as every exported folder), and result.json: accuracy of the float16 weights, the answer to each validation
image, commit and processor. --no-weights leaves the weights out. --commit and --processor say where it was trained;
without them the page and the card say where it was published.

--package also puts the weights of RUN into the package, with a model card: aft_vision/weights/NAME.TAG.safetensors,
which `timm.create_model(NAME, pretrained=True)` then loads.

--ablation keeps the results of runs that change AFT-conv for docs/results/ablations.md, without weights.

Without RUN only the pages and the picture are written, from what is in the folders of the data.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tools.arguments import CommandParser, add_device, parse_count
from tools.pages import add_origin


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add('runs', nargs='*', type=Path, metavar='RUN', help='the folder of a complete run')
    add('--row', help='name of the row in the tables, for one RUN (default: of its folder, without rate and seed)')
    add('--data', help='the data set to answer (default: data.dir of the run)')
    add('--workers', type=parse_count, default=1, help='decoding processes (default: 1)')
    add('--no-weights', dest='weights', action='store_false', help='publish the results only')
    add('--package', action='store_true', help='put the weights of one RUN into the package')
    add('--ablation', action='store_true', help='keep the results for the table of ablations, without weights')
    add_origin(parser, 'training')
    add_device(parser)
    args = parser.parse_args(argv)
    if (args.package or args.row) and len(args.runs) != 1:
        parser.error(f'--row and --package belong to one RUN, got {len(args.runs)}')
    if args.package and not (args.weights and not args.ablation):
        parser.error(f'--package needs the weights, got {"--ablation" if args.ablation else "--no-weights"}')
    return args


if __name__ == '__main__':
    parse_args()

import torch
import yaml
from timm.data import resolve_model_data_config
from timm.task.evaluator import ClassificationEvaluator
from torch import nn

from aft_vision.commandline import run_command
from aft_vision.data import Preprocessing, Source, create_eval_loader
from aft_vision.devices import resolve_device
from aft_vision.evaluate import check_classes, evaluate_all
from aft_vision.export import export_model
from aft_vision.files import LAST
from aft_vision.models.checkpoint import load_model, read_checkpoint
from aft_vision.visualize import read_history
from tools import ablation_page, imagenette_page
from tools.machine import describe_processor, read_commit
from tools.package_weights import package
from tools.results import flatten_config, read_config, read_json

RESULT = 'result.json'


def main(argv: Sequence[str] | None = None) -> list[Path]:
    """Publish the runs, write the page, and return the folders of the published runs.

    Raises:
        ValueError: a run is not complete, is not the one kept of that row and seed, is no row of the ablations, or
            keeps the shapes of images; the data set is another one; or the weights may not be packaged.
    """
    args = parse_args(argv)
    pages = [imagenette_page]
    if args.ablation or (args.docs / 'data' / ablation_page.DATA).exists():
        pages.append(ablation_page)
    for page in pages:
        if not (args.docs / page.PAGE).is_file():
            raise ValueError(f'expected the page {args.docs / page.PAGE}, got no such file; give its folder by --docs')
    folders = [publish(run, args) for run in args.runs]
    if args.package:
        print(f'{package(folders[0])} is written: commit it with its model card')
    for page in pages:
        page.write_page(args.docs)
        print(f'{args.docs / page.PAGE} is written')
    return folders


def publish(run: Path, args: argparse.Namespace) -> Path:
    """Write what is kept of a run and return its folder."""
    config, content, last = read_run(run)
    row = args.row or re.sub(r'(_\d+(\.\d+)?e-\d+)?(_seed\d+)?$', '', run.resolve().name)
    if not re.fullmatch(r'\w[\w.-]*', row):
        raise ValueError(f'expected a row of letters, digits, ".", "_" and "-", got {row!r}: name it by --row')
    data = ablation_page.DATA if args.ablation else imagenette_page.DATA
    if args.ablation and row not in ablation_page.CHANGES:
        raise ValueError(f'expected one of the rows {", ".join(ablation_page.CHANGES)}, got {row}: name it by --row')
    folder = args.docs / 'data' / data / f'{row}_seed{config["run"]["seed"]}'
    kept = without_places(config)
    check_same_run(folder, kept, run / 'summary.csv')
    models = load_weights(run, content)
    right, top1 = answer(models, config, args)
    for other in (each for row in imagenette_page.read_rows(folder.parent) for each in row.runs):
        if len(other.right) != len(right['weights']):
            raise ValueError(
                f'expected answers to {len(other.right)} images, as {other.row} with seed {other.seed} has, got '
                f'{len(right["weights"])}: --data must be the data set of the other runs'
            )
    top1_of = {'weights': last['eval_top1'], 'average': last.get('eval_ema_top1', -1.0)}
    best = max(models, key=lambda name: top1_of[name])
    result = {
        'parameters': sum(x.numel() for x in models[best].parameters()),
        'best': best,
        'top1_float16': top1,
        'right': right,
        **describe_training(args, folder),
    }
    with replacing_folder(folder) as written:
        if args.weights and not args.ablation:
            export_model(models[best].half(), written, content['class_names'], content['data_config'])
        shutil.copy(run / 'summary.csv', written)
        (written / 'config.yaml').write_text(yaml.safe_dump(kept, sort_keys=False))
        (written / RESULT).write_text(json.dumps(result, indent=1) + '\n')
    found = ', '.join(f'{name} {value:.2f} %' for name, value in top1.items())
    print(f'{folder} is written: top-1 in float16: {found}; the better in the last epoch: {best}')
    return folder


def read_run(run: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, float]]:
    """Return the resolved config, the last checkpoint and the figures of the last epoch of a complete run.

    Raises:
        ValueError: the folder has no run, a damaged config, figures of other epochs, or a run that has not ended, is
            of another trainer or of images of their own shapes.
    """
    missing = [name for name in (LAST, 'config.yaml', 'summary.csv') if not (run / name).is_file()]
    if missing:
        raise ValueError(f'expected the folder of a run of train.imagenet, got {run} without {missing[0]}')
    config, content = read_config(run / 'config.yaml', 'train.imagenet'), read_checkpoint(run / LAST)
    # Those of pixels have no size, those of characters no augmentation.
    if 'augment' not in config or 'img_size' not in config['data']:
        raise ValueError(f'expected a run of train.imagenet, got {run}, which is of another trainer')
    tokens, epochs = config['data'].get('max_tokens'), config['schedule']['epochs']
    if tokens is not None:
        raise ValueError(
            f'expected a run of squares, which are what is answered here, got {run} with data.max_tokens={tokens}: '
            'measure it by tools.eval_resolution --native, or train with data.max_tokens=null'
        )
    if content['epoch'] != epochs:
        raise ValueError(f'expected a complete run of {epochs} epochs, got {run} after {content["epoch"]}')
    history = read_history(run / 'summary.csv')
    if len(history) != epochs:
        raise ValueError(f'expected the figures of {epochs} epochs, got {len(history)} in {run / "summary.csv"}')
    return config, content, history[-1]


def without_places(config: Any) -> Any:
    """Return a config without the places of files: `run.dir` is None, every other path its last part."""
    kept = _shorten(config)
    kept['run']['dir'], kept['data']['dir'] = None, Path(config['data']['dir']).name
    return kept


def _shorten(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shorten(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shorten(each) for each in value]
    # Absolute ones, also of an exported folder by timm's name. Others mean the same to everyone.
    found = re.fullmatch(r'(local-dir:)?(~?/.*)', value) if isinstance(value, str) else None
    return value if found is None else f'{found[1] or ""}{Path(found[2]).name}'


def check_same_run(folder: Path, config: dict[str, Any], summary: Path) -> None:
    """Raise a ValueError if the folder holds another run than that of a config, wherever the two and their data were.

    Args:
        summary: Figures of every epoch, which tell apart two runs whose configs differ only in the places of files.
    """
    path = folder / 'config.yaml'
    if not path.is_file():
        return
    before, now = (flatten_config(each) for each in (read_config(path, 'train.imagenet'), config))
    for key in dict.fromkeys([*before, *now]):
        if key not in ('run.dir', 'run.resume', 'data.dir') and before.get(key) != now.get(key):
            raise ValueError(
                f'expected the run of {folder} again, got one with {key}={now.get(key)} instead of {before.get(key)}: '
                'give it another row by --row NAME, or remove that folder'
            )
    if (folder / summary.name).read_bytes() != summary.read_bytes():
        raise ValueError(
            f'expected the run of {folder} again, got one with other figures in {summary}: give it another row by '
            '--row NAME, or remove that folder'
        )


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, which then replaces `folder`; after an error nothing changes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f'.{folder.name}.', suffix='.tmp', dir=folder.parent) as temporary:
        written = Path(temporary) / folder.name
        written.mkdir()
        yield written
        if folder.exists():
            os.replace(folder, Path(temporary) / 'before')
        os.replace(written, folder)


def load_weights(run: Path, content: dict[str, Any]) -> dict[str, nn.Module]:
    """Return the models with the last weights and with their average, if there is one, rounded to float16."""
    models = {'weights': load_model(run / LAST)}
    if content['ema_state_dict'] is not None:
        models['average'] = load_model(run / LAST)
        models['average'].load_state_dict(content['ema_state_dict'])
    return {name: model.half().float() for name, model in models.items()}


class Answers(ClassificationEvaluator):
    """An evaluator that also keeps whether each image was answered right, as the characters 0 and 1."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.right = ''

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Count a batch of logits and classes."""
        super().update(output, target)
        self.right += ''.join(map(str, (output.argmax(1) == target).int().tolist()))


def answer(
    models: dict[str, nn.Module], config: dict[str, Any], args: argparse.Namespace
) -> tuple[dict[str, str], dict[str, float]]:
    """Classify the validation images of a run; return the right answers and the top-1 in percent of each model."""
    device, data = resolve_device(args.device), config['data']
    chosen = {field.name: data[field.name] for field in fields(Source) if field.name in data}
    source = Source(**{**chosen, 'dir': args.data or data['dir']})
    known = resolve_model_data_config(models['weights'])
    size = tuple(data['eval_img_size'] or data['img_size'])
    preprocessing = Preprocessing(size, known['crop_pct'], known['mean'], known['std'])
    loader, class_names = create_eval_loader(
        source, preprocessing, data['eval_batch_size'] or data['batch_size'], num_workers=args.workers, device=device
    )
    evaluators: list[Answers] = []

    def evaluator() -> Answers:
        evaluators.append(Answers(device))
        return evaluators[-1]

    check_classes(models['weights'], class_names, source.dir)
    metrics = evaluate_all([model.to(device) for model in models.values()], loader, device, evaluator=evaluator)
    right = {name: each.right for name, each in zip(models, evaluators, strict=True)}
    return right, {name: each['top1'] for name, each in zip(models, metrics, strict=True)}


def describe_training(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Return where a run was trained, as far as it is said now or in its folder, else where it is published."""
    before = read_json(folder / RESULT) if (folder / RESULT).is_file() else {}
    commit, processor = args.commit or before.get('commit'), args.processor or before.get('processor')
    return {
        **({'commit': commit} if commit else {'published_at': read_commit()}),
        **(
            {'processor': processor} if processor else {'published_on': describe_processor(resolve_device(args.device))}
        ),
    }


if __name__ == '__main__':
    run_command(main)
