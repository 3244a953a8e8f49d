"""Write the tables and pictures of the pages of results from docs/results/data, and keep finished runs there.

python docs/results/build.py
python docs/results/build.py RUN ... --commit COMMIT --processor NAME [--into FOLDER] [--weights] [--data DATA]
python docs/results/build.py FILE --images NAME --commit COMMIT --processor NAME

RUN is the folder of a complete run. One of train.imagenet is named after its row, learning rate and seed, such as
conv_8e-3_seed0: its config.yaml and summary.csv, and its answers to the validation images with float16 weights go to
data/FOLDER/ROW_seedN, where FOLDER is imagenette, imagenette_ablations, tiny_imagenet or tiny_imagenet_front. --weights
also keeps the better of its last weights and their average, as an exported folder. One of train.recall becomes a row of
data/recall/runs.csv.

FILE is eval_resolution_grid.json of tools.eval_resolution, of folders named ROW_seedN. It goes to
data/imagenette_sizes/NAME.json; the page calls the images NAME, with spaces for _.

COMMIT and NAME say where it was trained or evaluated. What is kept of an earlier run of that name is replaced.
"""

import argparse
import csv
import json
import math
import re
import shutil
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from scipy.stats import binomtest, ttest_1samp
from timm.data import resolve_model_data_config

from aft_vision.data import Preprocessing, Source, create_eval_loader
from aft_vision.export import export_model
from aft_vision.files import LAST
from aft_vision.models.checkpoint import load_model, read_checkpoint
from aft_vision.plugins import import_plugins
from aft_vision.resolution import standard_error
from aft_vision.visualize import new_figure, read_history, save_figure

RESULTS = Path(__file__).resolve().parent
# Of the packaged weights, in the order of the folders of data/tiny_imagenet_front's images.
CLASSES = RESULTS.parents[1] / 'aft_vision' / 'weights' / 'tiny_imagenet.txt'
# Of the models, by the first part of the name of a row or by their mixer.
TITLES = {
    **{'attention': 'attention', 'conv': 'AFT-conv', 'full': 'AFT-full', 'local': 'AFT-local', 'simple': 'AFT-simple'},
    **{'axial': 'AFT-axial', 'deit': 'DeiT', 'pyramid': 'AFT-pyramid', 'cpubone': 'CPUBone-B0'},
}
REFERENCE = 'deit'
# Row of an ablation: its words, the row without the change, and the top-1 of the paper's models without and with it.
CHANGES = {
    'conv_k11': ('kernel 11, the default', '', '80.8'),
    'conv_k3': ('kernel 3', 'conv_k11', '80.8, 79.9 (Table 11)'),
    'conv_k7': ('kernel 7', 'conv_k11', '80.8, 80.8 (Table 11)'),
    'conv_k15': ('kernel 15', 'conv_k11', '80.8, 81.0 (Table 11)'),
    'conv_k7_raw': ('kernel 7 without Eq. 8', 'conv_k7', '80.8, 79.4 (Table 10)'),
    'conv_k7_window': ('kernel 7, no weight outside it', 'conv_k7', '80.8, 79.9 (Sec. 5.3)'),
    'conv_noquery': ('no query', 'conv_k11', '80.8, 79.3 (Table 12)'),
    'conv_entropy': ('entropy of the kernels in the loss', 'conv_k11', '80.8, 80.9 (Sec. 8)'),
    'conv_gumbel': ('one offset a head, by Gumbel samples', 'conv_k11', '80.8, 79.9 (Sec. 8)'),
    'conv_transfer': ('from the weights of DeiT', 'conv_k11', '81.6, 83.4 (Table 8)'),
}
# Columns of data/recall/runs.csv from the config, and from the result.
SETTING = {
    **{'dim': 'model.dim', 'pairs': 'data.pairs', 'context': 'data.context', 'vocab_size': 'data.vocab_size'},
    **{'max_updates': 'schedule.max_updates', 'lr': 'optim.lr', 'seed': 'run.seed'},
}
RESULT = ('valid_accuracy', 'test_accuracy', 'test_bits', 'updates', 'parameters')
# The mixers of the models of train.recall whose name says it, in the order of the table.
MIXERS = {'transformer_char': 'attention', 'full': 'full', 'aft_local_char': 'local', 'aft_simple_char': 'simple'}
# Title and colour of the models of `tools.benchmark models`; one without a colour is only in the tables.
MODELS = {
    'deit_tiny_patch16_224': ('DeiT tiny', 'C3'),
    'deit_small_patch16_224': ('DeiT small', 'C1'),
    'aft_conv_tiny': ('AFT-conv tiny', 'C0'),
    'aft_conv_tiny_k11_h32': ('AFT-conv tiny, 32 heads', None),
    'aft_conv_small': ('AFT-conv small', 'C9'),
    'aft_conv_small_k11_h16': ('AFT-conv small, 16 heads', None),
    'aft_full_small': ('AFT-full small', None),
    'aft_full_tiny': ('AFT-full tiny', None),
    'aft_axial_tiny': ('AFT-axial tiny', None),
    'aft_pyramid_nano': ('AFT pyramid nano', 'C2'),
    'cpubone_b0_bfrobust': ('CPUBone-B0', '0.5'),
    'poolformer_s12': ('PoolFormer S12', None),
    'convnext_tiny': ('ConvNeXt tiny', 'C5'),
    'mambaout_tiny': ('MambaOut tiny', None),
    'xcit_small_12_p16_224': ('XCiT small 12', None),
}

# Validation images of Imagenette's classes; every other class of data/tiny_imagenet_front is one of Tiny-ImageNet.
IMAGENETTE = {
    **{'n01440764': 387, 'n02102040': 395, 'n02979186': 357, 'n03000684': 386, 'n03028079': 409},
    **{'n03394916': 394, 'n03417042': 389, 'n03425413': 419, 'n03445777': 399, 'n03888257': 390},
}
# Validation images of a class of Tiny-ImageNet.
TINY_IMAGES = 50
# Of the runtimes and the files of data/runtimes.csv.
RUNTIMES = {
    'opencv': 'OpenCV',
    'opencv4': 'OpenCV',
    'openvino': 'OpenVINO',
    'onnxruntime_web': 'onnxruntime-web',
    'iree': 'IREE',
    'mnn': 'MNN',
    'ncnn': 'ncnn, by pnnx',
    'tvm': 'TVM',
    'coreml': 'coremltools',
    'litert_torch': 'litert-torch',
    'executorch': 'ExecuTorch, XNNPACK',
}
FILES = {
    'any.onnx': 'ONNX, any size',
    'fixed.onnx': 'ONNX, one size',
    'trace.pt': '`torch.jit.trace`',
    'program.pt2': '`pt2 --aten`, one size',
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('runs', nargs='*', type=Path, metavar='RUN', help='the folder of a complete run, or FILE')
    add('--commit', help='commit of the training or the evaluation')
    add('--processor', metavar='NAME', help='processor of the training or the evaluation')
    folders = ('imagenette', 'imagenette_ablations', 'tiny_imagenet', 'tiny_imagenet_front')
    add('--into', choices=folders, default=folders[0], help='the folder of its table (default: imagenette)')
    add('--weights', action='store_true', help='keep the weights too')
    add('--data', help='the data set of the answers (default: data.dir of the run)')
    add('--images', metavar='NAME', help='what the images of FILE are called, such as squares_of_160_px')
    args = parser.parse_args(argv)
    if args.runs and not (args.commit and args.processor):
        parser.error('RUN and FILE need --commit and --processor')
    if any(path.suffix == '.json' for path in args.runs) and not args.images:
        parser.error('FILE needs --images')
    return args


def main(argv: Sequence[str] | None = None, results: Path = RESULTS) -> None:
    """Keep the runs, and write the pages and pictures.

    Args:
        results: The folder of the pages, with `data`; pictures are in `images` next to it.

    Raises:
        ValueError: a run is not complete, its name is no row, or it differs from the other runs of its table.
    """
    args = parse_args(argv)
    for run in args.runs:
        if run.suffix == '.json':
            keep_sizes(run, args, results / 'data' / 'imagenette_sizes')
        elif 'pairs' in read_yaml(run / 'config.yaml')['data']:
            keep_recall(run, args, results / 'data' / 'recall')
        else:
            keep_run(run, args, results / 'data' / args.into)
    build_imagenette(results)
    build_ablations(results)
    build_resolution(results)
    build_recall(results)
    build_speed(results)
    build_goals(results)
    build_runtimes(results)
    build_front(results)


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read a table with a head."""
    with path.open(newline='', encoding='utf-8') as file:
        return list(csv.DictReader(file))


def read_yaml(path: Path) -> Any:
    """Read a config."""
    return yaml.safe_load(path.read_text(encoding='utf-8'))


def flatten(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of a config by `section.key`."""
    return {f'{section}.{key}': value for section, keys in config.items() for key, value in keys.items()}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a table of Markdown."""
    head = list(head)
    lines = [f'| {" | ".join(cells)} |' for cells in (head, *rows)]
    return '\n'.join([lines[0], '|' + '---|' * len(head), *lines[1:]]) + '\n'


def wrap(text: str) -> str:
    """Break a paragraph into lines, without breaking a link."""
    return textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False) + '\n'


def write_blocks(page: Path, **blocks: str) -> None:
    """Replace the lines between `<!-- NAME: ... -->` and `<!-- end -->` of a page, for each name.

    Raises:
        ValueError: the page does not have these markers once.
    """
    text = page.read_text(encoding='utf-8')
    for name, block in blocks.items():
        pattern = re.compile(rf'(<!-- {name}: [^\n]* -->\n).*?(<!-- end -->)', re.DOTALL)
        text, count = pattern.subn(lambda match, block=block: f'{match[1]}\n{block}\n{match[2]}', text)
        if count != 1:
            raise ValueError(f'{page}: expected one block from <!-- {name}: ... --> to <!-- end -->, got {count}')
    page.write_text(text, encoding='utf-8')


class Panel(NamedTuple):
    """A plot of curves, (x, y, standard errors or None, style) each; `trained` is the size of training, a line."""

    curves: Sequence[tuple[Sequence[float], Sequence[float], Sequence[float] | None, dict[str, Any]]]
    labels: dict[str, Any]
    trained: int | None = None


def draw(path: Path, size: tuple[float, float], panels: Sequence[Panel], share: bool, **legend: Any) -> None:
    """Draw panels side by side, with one legend outside."""
    figure = new_figure(*size)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False, sharey=share)[0], panels, strict=True):
        for x, y, errors, style in panel.curves:
            axes.errorbar(x, y, errors, capsize=3, **style)
        if panel.trained is not None:
            axes.axvline(panel.trained, color='0.5', linestyle=':', label='size of training')
        axes.set(**panel.labels)
        axes.tick_params(axis='x', which='minor', bottom=False, labelbottom=False)
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), fontsize='small', **legend)
    save_figure(figure, path)


def spread(values: Sequence[float]) -> str:
    """Format mean and standard deviation."""
    deviation = f' +- {statistics.stdev(values):.2f}' if len(values) > 1 else ''
    return f'{statistics.fmean(values):.2f}{deviation}'


def row_title(name: str, *unsaid: str) -> str:
    """Return the words for the name of a row: `AFT-conv ln` for conv_ln; parts that are unsaid are left out."""
    kind, *rest = name.split('_')
    return ' '.join([TITLES.get(kind, kind), *(part for part in rest if part not in unsaid)])


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> float:
    """Return the two-sided p-value of McNemar's exact test, from whether two models are right on the same images."""
    pairs = list(zip(first, second, strict=True))
    only_first, only_second = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    both = only_first + only_second
    return float(binomtest(only_first, both).pvalue) if both else 1.0


def format_p(p: float) -> str:
    """Format a p-value."""
    return '-' if math.isnan(p) else '< 0.001' if p < 0.001 else f'{p:.3f}'


def averaged(epoch: Mapping[str, float]) -> float:
    """Return the top-1 of the moving average after an epoch in percent, or of the weights if there is none."""
    average = epoch.get('eval_ema_top1', math.nan)
    return epoch['eval_top1'] if math.isnan(average) else average


@dataclass(frozen=True)
class Run:
    """A kept run: one seed of a row."""

    row: str
    seed: int
    config: dict[str, Any]
    history: list[dict[str, float]]
    result: dict[str, Any]

    @property
    def top1(self) -> float:
        """Return the top-1 of the last weights in percent."""
        return self.history[-1]['eval_top1']

    @property
    def average(self) -> float:
        """Return the top-1 of the moving average in percent."""
        return averaged(self.history[-1])

    @property
    def right(self) -> list[bool]:
        """Return whether each validation image was answered right by the moving average, in float16."""
        answers = self.result['right']
        return [x == '1' for x in answers.get('average', answers['weights'])]


@dataclass(frozen=True)
class Row:
    """The runs of a row, by seed."""

    name: str
    runs: list[Run]

    @property
    def epochs(self) -> int:
        """Return the length of the runs."""
        return int(self.runs[0].config['schedule']['epochs'])

    @property
    def title(self) -> str:
        """Return the name in the tables."""
        return row_title(self.name, str(self.epochs))

    def accuracies(self) -> list[str]:
        """Format the number of runs, the top-1 of the last weights and that of the average."""
        columns = zip(*((run.top1, run.average) for run in self.runs), strict=True)
        return [str(len(self.runs)), *map(spread, columns)]

    def differences(self, reference: 'Row | None') -> tuple[list[float], str]:
        """Return the differences of the averages from the runs of the same seeds, and McNemar's p of each."""
        seeds = {run.seed: run for run in reference.runs} if reference and reference is not self else {}
        pairs = [(run, seeds[run.seed]) for run in self.runs if run.seed in seeds]
        tests = ', '.join(format_p(mcnemar(run.right, other.right)) for run, other in pairs)
        return [run.average - other.average for run, other in pairs], tests or '-'


def read_rows(data: Path) -> list[Row]:
    """Read the kept runs, shorter ones first, the reference first among those of a length."""
    rows: dict[str, Row] = {}
    for path in sorted(data.glob('*/result.json')):
        name, _, seed = path.parent.name.rpartition('_seed')
        history, result = read_history(path.parent / 'summary.csv'), json.loads(path.read_text())
        run = Run(name, int(seed), read_yaml(path.parent / 'config.yaml'), history, result)
        rows.setdefault(name, Row(name, [])).runs.append(run)
    return sorted(rows.values(), key=lambda row: (row.epochs, not row.name.startswith(REFERENCE), row.name))


def describe_origin(rows: Sequence[Row], data: str) -> str:
    """Name the processors and the commits of the runs in the folder of this name."""
    runs = [run for row in rows for run in row.runs]
    processors, commits = (sorted({run.result[key] for run in runs}) for key in ('processor', 'commit'))
    words = '; '.join(f'commit {commit}' for commit in commits)
    return f'{"; ".join(processors)}. C{words[1:]}. [Every run](data/{data}).'


def build_imagenette(results: Path) -> None:
    """Write the tables of accuracy and of learning rates, and the picture of the runs."""
    data = results / 'data' / 'imagenette'
    rows, images = read_rows(data), results.parent / 'images' / 'imagenette_runs.png'
    lines = []
    for row in rows:
        reference = next((x for x in rows if x.name.startswith(REFERENCE) and x.epochs == row.epochs), None)
        differences, tests = row.differences(reference)
        p = float(ttest_1samp(differences, 0).pvalue) if len(set(differences)) > 1 else math.nan
        mean = f'{statistics.fmean(differences):+.2f}' if differences else '-'
        rates = ', '.join(f'{rate:g}' for rate in sorted({run.config['optim']['lr'] for run in row.runs}))
        cells = [row.title, f'{row.runs[0].result["parameters"]:,}', rates, str(row.epochs)]
        lines.append([*cells, *row.accuracies(), mean, format_p(p), tests])
    count = len(rows[0].runs[0].right)
    about = (
        f'Top-1 of the last epoch on {count:,} validation images; +- is the standard deviation over runs with '
        'different seeds, and the standard error of a single figure is '
        f'{standard_error({"top1": 80, "samples": count}):.1f} points at 80 %. Against DeiT of the same seeds and '
        'epochs, of the moving averages in points: p of runs is the paired t test over seeds; p of images is the exact '
        'test of McNemar for each seed, of the moving averages in float16. The weights kept of a run are the better of '
        f'the last ones and their average, on these same images. {describe_origin(rows, data.name)}'
    )
    titles = ['model', 'parameters', 'learning rate', 'epochs', 'runs', 'top-1 %', 'of the average %', 'against DeiT']
    picture = f'![Top-1 by epoch and by minutes of training](../images/{images.name})\n'
    parts = [table([*titles, 'p, runs', 'p, images'], lines), wrap(about), picture]
    write_blocks(results / 'imagenette.md', runs='\n'.join(parts), search=format_search(results))
    draw_runs(rows, images)


def format_search(results: Path) -> str:
    """Format the table of the learning rates, whose files are named MODEL_RATE.csv."""
    rates = ('4e-3', '8e-3', '16e-3')
    lines: dict[str, dict[str, str]] = {}
    for path in sorted((results / 'data' / 'imagenette_search').glob('*.csv')):
        model, _, rate = path.stem.rpartition('_')
        last = read_history(path)[-1]
        cell = f'[{last["eval_top1"]:.1f}]({path.relative_to(results).as_posix()}), {averaged(last):.1f}'
        lines.setdefault(model, dict.fromkeys(rates, '-'))[rate] = cell
    return table(['model', *rates], [[row_title(model), *cells.values()] for model, cells in lines.items()])


def draw_runs(rows: Sequence[Row], path: Path) -> None:
    """Draw top-1 of the average by epoch and by minutes of training: a line a run, dashed if it is a longer one."""
    curves: tuple[list[Any], list[Any]] = ([], [])
    titles = [row.title for row in rows]
    for number, row in enumerate(rows):
        first = titles.index(row.title)
        style = {'color': f'C{first % 10}', 'ls': '-' if first == number else '--', 'lw': 1}
        for run in row.runs:
            minutes = accumulate(each['train_seconds'] / 60 for each in run.history)
            points = [(i, x, averaged(y)) for i, (x, y) in enumerate(zip(minutes, run.history, strict=True), 1)]
            # Not every epoch need be evaluated.
            epochs, times, top1 = zip(*(point for point in points if not math.isnan(point[-1])), strict=True)
            label = {'label': f'{row.title}, {row.epochs} epochs'} if run is row.runs[0] else {}
            for panel, places in zip(curves, (epochs, times), strict=True):
                panel.append((places, top1, None, style | label))
    panels = [
        Panel(curves[0], {'xlabel': 'epoch', 'ylabel': 'top-1 of the averaged weights (%)'}),
        Panel(curves[1], {'xlabel': 'minutes of training'}),
    ]
    draw(path, (12, 4), panels, share=True, loc='outside right center')


def build_ablations(results: Path) -> None:
    """Write the table of the ablations."""
    data = 'imagenette_ablations'
    found = {row.name: row for row in read_rows(results / 'data' / data)}
    lines = []
    for name, (title, reference, paper) in CHANGES.items():
        if row := found.get(name):
            differences, tests = row.differences(found.get(reference))
            mean = f'{statistics.fmean(differences):+.2f}' if differences else '-'
            lines.append([title, *row.accuracies(), mean, tests, paper])
    about = (
        'Top-1 of the last epoch; the difference is that of the averages in points, from the row without the change; '
        'p is the exact test of McNemar for each seed, of the averages in float16. '
        f'{describe_origin(sorted(found.values(), key=lambda row: row.name), data)}'
    )
    titles = ['model', 'runs', 'top-1 %', 'of the average %', 'difference', 'p, images', 'paper, without and with it']
    write_blocks(results / 'ablations.md', runs=f'{table(titles, lines)}\n{wrap(about)}')


def build_resolution(results: Path) -> None:
    """Write the tables and the picture of images of other sizes."""
    parts, panels = [], []
    path = results.parent / 'images' / 'imagenette_sizes.png'
    for file in sorted((results / 'data' / 'imagenette_sizes').glob('*.json')):
        kept = json.loads(file.read_text())
        # Top-1 of the runs of a row by side.
        rows: dict[str, dict[int, list[float]]] = {}
        measured = [(run['row'], each) for run in kept['runs'] for each in run['sizes']]
        for row, each in measured:
            rows.setdefault(row, {}).setdefault(each['height'], []).append(each['top1'])
        sides = sorted({each['height'] for _, each in measured})
        samples, images = measured[0][1]['samples'], kept['images'].replace('_', ' ')
        lines = [
            [row_title(row), str(max(map(len, found.values())))]
            + [spread(found[side]) if side in found else '-' for side in sides]
            for row, found in rows.items()
        ]
        trained, _ = kept['runs'][0]['train_size']
        about = (
            f'Top-1 in percent of {samples:,} validation images ({images}), after training at {trained} px; the '
            f'standard error of one run is {statistics.fmean(standard_error(each) for _, each in measured):.1f} '
            f'points. {kept["processor"]}, commit {kept["commit"]}.'
        )
        parts += [table(['model', 'runs', *(f'{side} px' for side in sides)], lines), wrap(about)]
        curves = []
        for row, found in rows.items():
            means = [statistics.fmean(found[side]) for side in sorted(found)]
            errors = [standard_error({'top1': mean, 'samples': samples}) for mean in means]
            curves.append((sorted(found), means, errors, {'fmt': 'o-', 'label': row_title(row)}))
        unit = '' if panels else 'top-1 and standard error of one run (%)'
        labels = {'xlabel': 'side of the image (pixels)', 'ylabel': unit, 'title': f'{images}, {samples:,} images'}
        panels.append(Panel(curves, labels, trained))
    parts += [f'![Top-1 against the size of the image](../images/{path.name})\n']
    parts += ['Bars: the standard error of one run over the images, also where a point is the mean of several seeds.\n']
    write_blocks(results / 'resolution.md', sizes='\n'.join(parts))
    draw(path, (5 * len(panels) + 1.5, 3.6), panels, share=True, loc='outside right center')


def build_recall(results: Path) -> None:
    """Write the table of associative recall: of the learning rates, the one with the best validation counts."""
    rows = read_csv(results / 'data' / 'recall' / 'runs.csv')
    cells: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in sorted(rows, key=lambda row: (float(row['valid_accuracy']), -int(row['updates'])), reverse=True):
        setting = tuple(row[name] for name in ('pairs', 'context', 'vocab_size', 'dim'))
        cells.setdefault(setting, {}).setdefault(row['mixer'], row)
    lines = []
    for setting, found in sorted(cells.items(), key=lambda each: [*map(int, each[0])]):
        results_ = [format_recall(found[mixer]) if mixer in found else '-' for mixer in MIXERS.values()]
        pairs = int(setting[0])
        lines.append([*setting, *results_, f'{100 / pairs:.1f}, {math.log2(pairs):.2f} bits'])
    origin = '; '.join(sorted({f'{row["processor"]}, commit {row["commit"]}' for row in rows}))
    about = (
        'Right answers of the test examples in percent and bits per answer, by the weights with the best validation; '
        'in brackets the learning rate, chosen by validation of those tried, and the updates. "One of the values" is a '
        f'guess among the values of a sequence. All {len(rows)} runs: '
        f'[runs.csv](data/recall/runs.csv). {origin}.'
    )
    titles = ['pairs', 'tokens', 'symbols', 'width', *map(TITLES.__getitem__, MIXERS.values()), 'one of the values']
    write_blocks(results / 'recall.md', runs=f'{table(titles, lines)}\n{wrap(about)}')


def format_recall(row: Mapping[str, str]) -> str:
    """Format the result of a run of recall."""
    accuracy, bits, rate = (float(row[name]) for name in ('test_accuracy', 'test_bits', 'lr'))
    return f'{accuracy:.1f}, {bits:.2f} bits ({rate:g}, {row["updates"]})'


def build_speed(results: Path) -> None:
    """Write the tables of one image, and the picture of the first of them.

    Their files are those of `tools.benchmark models --json`.
    """
    tables: dict[str, str] = {}
    for path in (results / 'data').glob('image_sizes*.json'):
        report = json.loads(path.read_text())
        curves: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in report['rows']:
            curves.setdefault((row['name'], row['form'].replace('eager', 'torch')), []).append(row)
        sides = [row['size'][0] for row in next(iter(curves.values()))]
        lines = [
            [
                speed_title(*names),
                *(f'{row["milliseconds"]:.2f} ({row["ratio"]:.2f})' for row in rows),
                f'{rows[-1]["peak_bytes"] / 2**20:.1f}',
            ]
            for names, rows in curves.items()
        ]
        head = ['one image', *(f'{side} px' for side in sides), f'MiB at {sides[-1]} px']
        tables[path.stem] = table(head, lines)
        if path.stem == 'image_sizes':
            draw_image_sizes(curves, results.parent / 'images' / 'image_sizes.png')
    write_blocks(results / 'speed.md', **tables)


def speed_title(name: str, runtime: str) -> str:
    """Return the words for a model, its form and its runtime."""
    model, _, form = name.partition(', ')
    form = 'attention weights in memory' if form.startswith('materialised') else form
    return ', '.join(filter(None, [MODELS[model][0], form, '' if runtime == 'torch' else runtime]))


def build_goals(results: Path) -> None:
    """Write how many goals and floors each processor reaches, and the figures below a floor."""
    rows = read_csv(results / 'data' / 'goals.csv')
    found = {row['processor']: Counter() for row in rows}
    below: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        found[row['processor']][row['verdict']] += 1
        if row['verdict'] == 'below':
            line = below.setdefault((row['row'], row['what'], row['floor']), [])
            line.append(f'{row["figure"]} ({row["processor"]})')
    counts = [[name, *(str(each[verdict]) for verdict in ('goal', 'floor', 'below'))] for name, each in found.items()]
    summary = table(['processor', 'reach the goal', 'hold the floor', 'below it'], counts)
    lines = [[*key, ', '.join(figures)] for key, figures in below.items()]
    write_blocks(
        results / 'goals.md', goals=f'{summary}\n{table(["row", "below the floor", "floor", "figures"], lines)}'
    )


def build_runtimes(results: Path) -> None:
    """Write how much exported files differ from PyTorch in other runtimes, and what these say where they fail."""
    rows = read_csv(results / 'data' / 'runtimes.csv')
    models = list(dict.fromkeys(row['model'] for row in rows))
    cells: dict[tuple[str, str], dict[str, list[dict[str, str]]]] = {}
    failures: dict[tuple[str, ...], dict[str, None]] = {}
    for row in rows:
        title = f'{RUNTIMES.get(row["runtime"], row["runtime"])} {row["version"]}', FILES[row['file']]
        cells.setdefault(title, {}).setdefault(row['model'], []).append(row)
        if row['error']:
            failures.setdefault((*title, f'`{row["error"].replace("|", "/")}`'), {})[f'`{row["model"]}`'] = None
    lines = [[*title, *(differences(found.get(model, [])) for model in models)] for title, found in cells.items()]
    head = ['runtime', 'files', *(f'`{model}`' for model in models)]
    reasons = [[*title, ', '.join(names)] for title, names in failures.items()]
    block = table(head, lines)
    block += '\n' + table(['runtime', 'files', 'error', 'models'], reasons) if reasons else ''
    write_blocks(results / 'exported.md', runtimes=block)


def build_front(results: Path) -> None:
    """Write the table of models that learned from the same teacher, and the picture of their accuracy against time.

    The file of times is that of `tools.benchmark models --json` with every size of the runs.
    """
    data = results / 'data' / 'tiny_imagenet_front'
    times: dict[tuple[str, str], dict[int, float]] = {}
    for row in json.loads((data / 'times.json').read_text())['rows']:
        runtime = row['form'].replace('eager', 'torch')
        times.setdefault((row['name'], runtime), {})[row['size'][0]] = row['milliseconds']
    classes = CLASSES.read_text().split()
    is_tiny = [name not in IMAGENETTE for name in classes for _ in range(IMAGENETTE.get(name, TINY_IMAGES))]
    lines, curves = [], {'torch': [], 'onnxruntime': []}
    found = sorted(read_rows(data), key=lambda row: -statistics.fmean(tiny_top1(run, is_tiny) for run in row.runs))
    for number, row in enumerate(found):
        first = row.runs[0]
        name, side = first.config['model']['name'], first.config['data']['img_size'][0]
        top1 = [tiny_top1(run, is_tiny) for run in row.runs]
        own = [times[name, runtime][side] for runtime in curves]
        large = [times[name, runtime][max(times[name, runtime])] for runtime in curves]
        cells = [f'`{name}`', f'{first.result["parameters"]:,}', f'{side} px', str(len(top1)), spread(top1)]
        lines.append([*cells, *(f'{x:.2f}' for x in [*own, *large])])
        style = {'color': f'C{number % 10}', 'marker': '*' if name.startswith('aft') else 'o', 'ls': '', 'label': name}
        for runtime, x in zip(curves, own, strict=True):
            curves[runtime].append(([x], [statistics.fmean(top1)], None, style | {'ms': 10}))
    head = ['model', 'parameters', 'input', 'runs', 'top-1 %', 'torch', 'onnxruntime']
    block = table([*head, 'torch, 224 px', 'onnxruntime, 224 px'], lines)
    picture = results.parent / 'images' / 'tiny_imagenet_front.png'
    origin = wrap(describe_origin(found, data.name))
    image = f'![Top-1 against the time of an image](../images/{picture.name})\n'
    write_blocks(results / 'tiny_imagenet.md', front='\n'.join([block, origin, image]))
    panels = [
        Panel(drawn, {'xlabel': f'milliseconds of an image, {runtime}', 'ylabel': 'top-1 of Tiny-ImageNet (%)'})
        for runtime, drawn in curves.items()
    ]
    draw(picture, (10, 4), panels, share=True, loc='outside right center')


def tiny_top1(run: Run, is_tiny: Sequence[bool]) -> float:
    """Return the top-1 in percent of the images of Tiny-ImageNet, of the average in float16."""
    return 100 * statistics.fmean(right for right, tiny in zip(run.right, is_tiny, strict=True) if tiny)


def differences(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the largest difference of a file's batches, and the number of those that fail, with the file's size."""
    if not rows:
        return ''
    failed = [row for row in rows if row['error']]
    if len(failed) == len(rows):
        return 'fails'
    found = [row['difference'] for row in rows if row['difference']]
    worst = 'converts' if 'converts' in found else max(found, key=float)
    share = f', {len(failed)} of {len(rows)} fail' if failed else ''
    share += f', {len(rows)} of 3 shapes' if len(rows) < 3 else ''
    return f'{worst}{share} ({int(rows[0]["bytes"] or 0) / 1e6:.1f} MB)'


def draw_image_sizes(curves: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw speed and memory of one image against its side."""
    panels = []
    for key, unit, title in (('per_second', 1, 'images a second'), ('peak_bytes', 2**20, 'peak memory (MiB)')):
        drawn = []
        for (name, runtime), rows in curves.items():
            label, color = MODELS.get(name, (name, None))
            if color is not None:
                sides, values = zip(*((row['size'][0], row[key] / unit) for row in rows), strict=True)
                style = {'color': color, 'ls': '-' if runtime == 'torch' else '--', 'marker': 'o'}
                drawn.append((sides, values, None, style | {'label': f'{label}, {runtime}'}))
        ticks = {'xscale': 'log', 'yscale': 'log', 'xticks': sides, 'xticklabels': sides}
        panels.append(Panel(drawn, {**ticks, 'xlabel': 'side of one image (px)', 'title': title}))
    draw(path, (9, 4.2), panels, share=False, loc='outside lower center', ncols=4)


def keep_run(run: Path, args: argparse.Namespace, data: Path) -> None:
    """Keep a run of train.imagenet.

    Raises:
        ValueError: it is not complete, or not named after a row of the ablations.
    """
    config = read_yaml(run / 'config.yaml')
    import_plugins(config['run'].get('imports', ()))
    content = read_checkpoint(run / LAST)
    if content['epoch'] != config['schedule']['epochs']:
        raise ValueError(f'expected a complete run, got {run} after {content["epoch"]} epochs')
    row = re.sub(r'(_\d+(\.\d+)?e-\d+)?(_seed\d+)?$', '', run.resolve().name)
    if args.into == 'imagenette_ablations' and row not in CHANGES:
        raise ValueError(f'expected a folder named after one of {", ".join(CHANGES)}, got {run}: rename it')
    models = {'weights': load_model(run / LAST)}
    if content['ema_state_dict'] is not None:
        models['average'] = load_model(run / LAST)
        models['average'].load_state_dict(content['ema_state_dict'])
    answers = {key: answer(model.half().float(), config, args.data) for key, model in models.items()}
    last = read_history(run / 'summary.csv')[-1]
    best = 'average' if 'average' in models and last['eval_ema_top1'] > last['eval_top1'] else 'weights'
    folder = data / f'{row}_seed{config["run"]["seed"]}'
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if args.weights:
        export_model(models[best].half(), folder, content['class_names'], content['data_config'])
    shutil.copy(run / 'summary.csv', folder)
    config['run']['dir'] = None
    (folder / 'config.yaml').write_text(yaml.safe_dump(without_places(config), sort_keys=False))
    result = {
        'parameters': sum(x.numel() for x in models[best].parameters()),
        'best': best,
        'top1_float16': {key: 100 * right.count('1') / len(right) for key, right in answers.items()},
        'right': answers,
        'commit': args.commit,
        'processor': args.processor,
    }
    (folder / 'result.json').write_text(json.dumps(result, indent=1) + '\n')


@torch.inference_mode()
def answer(model: Any, config: Mapping[str, Any], place: str | None) -> str:
    """Return whether each validation image of a run is answered right, as the characters 0 and 1."""
    data, known = config['data'], resolve_model_data_config(model)
    chosen = {field.name: data[field.name] for field in fields(Source) if field.name in data}
    source = Source(**{**chosen, 'dir': place or data['dir']})
    size = tuple(data['eval_img_size'] or data['img_size'])
    preprocessing = Preprocessing(size, known['crop_pct'], known['mean'], known['std'])
    loader, _ = create_eval_loader(source, preprocessing, data['batch_size'], num_workers=0, device=torch.device('cpu'))
    right = [(model(images).argmax(1) == targets).int().tolist() for images, targets in loader]
    return ''.join(str(each) for batch in right for each in batch)


def without_places(value: Any) -> Any:
    """Return a config whose paths are their last part, so that no folder of a machine is kept."""
    if isinstance(value, dict):
        return {key: without_places(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_places(each) for each in value]
    # Absolute ones, also of an exported folder by timm's name. Others mean the same to everyone.
    found = re.fullmatch(r'(local-dir:)?(~?/.*)', value) if isinstance(value, str) else None
    return value if found is None else f'{found[1] or ""}{Path(found[2]).name}'


def keep_sizes(file: Path, args: argparse.Namespace, data: Path) -> None:
    """Keep an evaluation at several sizes of squares."""
    runs = []
    for each in json.loads(file.read_text())['checkpoints']:
        row, _, seed = each['name'].rpartition('_seed')
        sizes = [{key: size[key] for key in ('height', 'width', 'top1', 'samples')} for size in each['sizes']]
        runs.append({'row': row, 'seed': int(seed), 'train_size': each['train_size'], 'sizes': sizes})
    kept = {'images': args.images, 'commit': args.commit, 'processor': args.processor, 'runs': runs}
    (data / f'{args.images}.json').write_text(json.dumps(kept, indent=1) + '\n')


def keep_recall(run: Path, args: argparse.Namespace, data: Path) -> None:
    """Keep a run of train.recall, in place of an earlier one of the same setting.

    Raises:
        ValueError: its config differs from the kept one of its mixer in a key that is no column.
    """
    config, result = read_yaml(run / 'config.yaml'), json.loads((run / 'result.json').read_text())
    values = flatten(config)
    mixer = values.get('model.mixer') or MIXERS[values['model.name']]
    known = flatten(read_yaml(data / f'{mixer}.yaml'))
    for key in sorted(known.keys() & values.keys() - {*SETTING.values(), 'data.eval_batch_size'}):
        if not key.startswith('run.') and known[key] != values[key]:
            raise ValueError(f'{run}: expected {key}={known[key]} as in {mixer}.yaml, got {values[key]}; leave it out')
    cells = {'mixer': mixer, **{name: values[key] for name, key in SETTING.items()}, **{x: result[x] for x in RESULT}}
    row = {name: f'{x:g}' if isinstance(x, float) else str(x) for name, x in cells.items()}
    row |= {'commit': args.commit, 'processor': args.processor}
    others = [old for old in read_csv(data / 'runs.csv') if any(old[name] != row[name] for name in ('mixer', *SETTING))]
    with (data / 'runs.csv').open('w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, row, lineterminator='\n')
        writer.writeheader()
        writer.writerows([*others, row])


if __name__ == '__main__':
    main()
