"""Keep evaluations of published runs at several image sizes, and write the tables and the picture of their page.

python -m tools.resolution_page FILE --images NAME --commit COMMIT --processor NAME
python -m tools.resolution_page

FILE is eval_resolution_grid.json of tools.eval_resolution, of folders named ROW_seedN, as tools.publish writes them.
Its accuracies become docs/results/data/imagenette_sizes/NAME.json; NAME is what the page calls the images, with _ for
spaces. Then, or without FILE only, the tables and the picture of docs/results/resolution.md are written from all that
was kept.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.arguments import CommandParser

DOCS = Path('docs/results')
PAGE, PICTURE = 'resolution.md', 'imagenette_sizes.png'


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add('file', nargs='?', type=Path, metavar='FILE', help='eval_resolution_grid.json')
    add('--images', metavar='NAME', help='what the images are called, such as squares_160')
    add('--commit', help='commit that was evaluated at')
    add('--processor', help='processor that was evaluated on')
    add('--docs', type=Path, default=DOCS, help=f'folder of the results pages (default: {DOCS})')
    args = parser.parse_args(argv)
    if args.file and not (args.images and args.commit and args.processor):
        parser.error('FILE needs --images, --commit and --processor')
    return args


# Before the slow imports, so that --help and errors of the command line are immediate.
if __name__ == '__main__':
    parse_args()

from aft_vision.commandline import run_command
from aft_vision.resolution import size_label, standard_error
from aft_vision.visualize import new_figure, save_figure
from tools.imagenette_page import TITLES, replace_block, spread, wrap

# Top-1 in percent of the runs of a row, by side and then by seed.
Found = dict[int, dict[int, float]]


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Write what is kept and the page, and return all that was kept.

    Raises:
        ValueError: a name is not ROW_seedN, or the page lacks its markers.
    """
    args = parse_args(argv)
    data = args.docs / 'data' / 'imagenette_sizes'
    if args.file:
        data.mkdir(parents=True, exist_ok=True)
        kept = {'images': args.images, 'commit': args.commit, 'processor': args.processor, 'runs': read_runs(args.file)}
        (data / f'{args.images}.json').write_text(json.dumps(kept, indent=1) + '\n')
    evaluations = [json.loads(path.read_text()) for path in sorted(data.glob('*.json'))]
    page = args.docs / PAGE
    blocks = '\n'.join(map(format_sizes, evaluations)) or 'Nothing has been evaluated yet.\n'
    picture = f'![Top-1 against the size of the image](../images/{PICTURE})\n'
    page.write_text(replace_block(page.read_text(encoding='utf-8'), 'sizes', f'{blocks}\n{picture}'), encoding='utf-8')
    if evaluations:
        save_figure(draw_sizes(evaluations), args.docs.parent / 'images' / PICTURE)
    print(f'{page} is written')
    return evaluations


def read_runs(file: Path) -> list[dict[str, Any]]:
    """Return the row, the seed, the size of training and the accuracy at each size of the runs of an evaluation.

    Raises:
        ValueError: the file has no runs named ROW_seedN, or sizes that are not squares.
    """
    found = []
    for table in json.loads(file.read_text()).get('checkpoints', []):
        row, _, seed = table['name'].rpartition('_seed')
        if not row or not seed.isdecimal():
            raise ValueError(f'{file}: expected runs named ROW_seedN, got {table["name"]}')
        sizes = [{key: each[key] for key in ('height', 'width', 'top1', 'samples')} for each in table['sizes']]
        for each in sizes:
            if each['height'] != each['width']:
                raise ValueError(f'{file}: expected squares, got {size_label(each)}')
        found.append({'row': row, 'seed': int(seed), 'train_size': table['train_size'], 'sizes': sizes})
    if not found:
        raise ValueError(f'{file}: expected eval_resolution_grid.json, of several checkpoints')
    return found


def title_of(evaluation: Mapping[str, Any]) -> str:
    """Return what the page calls the images."""
    return str(evaluation['images']).replace('_', ' ')


def by_row(evaluation: Mapping[str, Any]) -> dict[str, Found]:
    """Return what was found of each row."""
    rows: dict[str, Found] = {}
    for run in evaluation['runs']:
        for each in run['sizes']:
            rows.setdefault(run['row'], {}).setdefault(each['height'], {})[run['seed']] = each['top1']
    return rows


def format_sizes(evaluation: Mapping[str, Any]) -> str:
    """Format the table of an evaluation, and what it was measured on."""
    rows = by_row(evaluation)
    sides = sorted({side for found in rows.values() for side in found})
    lines = [f'| model | runs | {" | ".join(f"{side} px" for side in sides)} |', '|---|---|' + '---|' * len(sides)]
    for row, found in rows.items():
        cells = [spread([*found[side].values()]) if side in found else '-' for side in sides]
        count = max(map(len, found.values()))
        lines.append(f'| {TITLES.get(row, row)} | {count} | {" | ".join(cells)} |')
    measured = [each for run in evaluation['runs'] for each in run['sizes']]
    error = statistics.fmean(map(standard_error, measured))
    about = (
        f'Top-1 in percent of {measured[0]["samples"]:,} validation images ({title_of(evaluation)}), after training at '
        f'{size_label({"scales": [evaluation["runs"][0]["train_size"]]})} px; the standard error of one figure is '
        f'{error:.1f} points. {evaluation["processor"]}, commit {evaluation["commit"]}.'
    )
    return '\n'.join([*lines, '', wrap(about), ''])


def draw_sizes(evaluations: Sequence[Mapping[str, Any]]) -> Any:
    """Draw top-1 with its standard error against the side of the image: a panel an evaluation, a line a row."""
    figure = new_figure(5 * len(evaluations), 3.6)
    panels = figure.subplots(1, len(evaluations), squeeze=False, sharey=True)[0]
    for axes, evaluation in zip(panels, evaluations, strict=True):
        samples = evaluation['runs'][0]['sizes'][0]['samples']
        for row, found in by_row(evaluation).items():
            means = [statistics.fmean(found[side].values()) for side in sorted(found)]
            errors = [standard_error({'top1': mean, 'samples': samples}) for mean in means]
            axes.errorbar(sorted(found), means, errors, fmt='o-', capsize=3, label=TITLES.get(row, row))
        axes.axvline(evaluation['runs'][0]['train_size'][0], color='0.5', linestyle=':', label='size of training')
        axes.set(xlabel='side of the image (pixels)', title=f'{title_of(evaluation)}, {samples:,} images')
        axes.grid(alpha=0.3)
    panels[0].set_ylabel('top-1 and standard error (%)')
    panels[0].legend()
    return figure


if __name__ == '__main__':
    run_command(main)
