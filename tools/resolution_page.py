"""Keep evaluations of published runs at several image sizes, and write the tables and the picture of their page.

python -m tools.resolution_page FILE --images NAME --commit COMMIT --processor NAME
python -m tools.resolution_page

FILE is eval_resolution_grid.json of tools.eval_resolution, of folders named ROW_seedN, as tools.publish writes them.
Its accuracies become docs/results/data/imagenette_sizes/NAME.json; NAME is what the page calls the images, with _ for
spaces. Then the tables and the picture of docs/results/resolution.md are written from all that was kept. Without FILE,
only these are written again.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.arguments import CommandParser
from tools.pages import add_origin, require_origin, row_title, spread, wrap, write_blocks

PAGE, PICTURE = 'resolution.md', 'imagenette_sizes.png'


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add('file', nargs='?', type=Path, metavar='FILE', help='eval_resolution_grid.json')
    add('--images', metavar='NAME', help='what the images are called, such as squares_160')
    add_origin(parser, 'evaluation')
    args = parser.parse_args(argv)
    if args.file:
        require_origin(parser, args, 'FILE', 'images')
    return args


if __name__ == '__main__':
    parse_args()

from aft_vision.commandline import run_command
from aft_vision.files import replacing
from aft_vision.resolution import size_label, standard_error
from aft_vision.visualize import new_figure, save_figure
from tools.results import read_json

# Top-1 in percent of the runs of a row, by side and then by seed.
Found = dict[int, dict[int, float]]


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Write what is kept and the page, and return all that was kept.

    Raises:
        ValueError: the file is not one of `read_runs`, or the page lacks its markers.
    """
    args = parse_args(argv)
    data = args.docs / 'data' / 'imagenette_sizes'
    if args.file:
        kept = {'images': args.images, 'commit': args.commit, 'processor': args.processor, 'runs': read_runs(args.file)}
        with replacing(data / f'{args.images}.json') as written:
            written.write_text(json.dumps(kept, indent=1) + '\n')
    evaluations = [read_json(path) for path in sorted(data.glob('*.json'))]
    page = args.docs / PAGE
    write_blocks(page, sizes=format_page(evaluations))
    if evaluations:
        save_figure(draw_sizes(evaluations), args.docs.parent / 'images' / PICTURE)
    print(f'{page} is written')
    return evaluations


def read_runs(file: Path) -> list[dict[str, Any]]:
    """Return the row, the seed, the size of training and the accuracy at each size of the runs of an evaluation.

    Raises:
        ValueError: the file has no runs named ROW_seedN, other sizes than squares, figures of mirrored or padded
            images, or runs that were trained at other sizes or evaluated on other numbers of images.
    """
    found, content = [], read_json(file)
    for option in ('flip', 'pad'):
        if content.get(option):
            raise ValueError(f'{file}: expected figures of the images as they are, got --{option}; evaluate without it')
    for table in content.get('checkpoints', []):
        row, _, seed = table['name'].rpartition('_seed')
        if not row or not seed.isdecimal():
            raise ValueError(f'{file}: expected runs named ROW_seedN, got {table["name"]}')
        for each in table['sizes']:
            # Also a mean over several squares has a height and a width.
            if not size_label(each).isdecimal():
                raise ValueError(f'{file}: expected squares, got {size_label(each)}; evaluate them apart')
        sizes = [{key: each[key] for key in ('height', 'width', 'top1', 'samples')} for each in table['sizes']]
        found.append({'row': row, 'seed': int(seed), 'train_size': table['train_size'], 'sizes': sizes})
    if not found:
        raise ValueError(f'{file}: expected eval_resolution_grid.json, of several checkpoints')
    trained = {size_label({'scales': [run['train_size']]}) for run in found}
    counts = {f'{each["samples"]:,}' for run in found for each in run['sizes']}
    for values, wanted in ((trained, 'one size of training'), (counts, 'one number of images')):
        if len(values) > 1:
            raise ValueError(f'{file}: expected {wanted}, got {" and ".join(sorted(values))}; evaluate them apart')
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


def format_page(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Format the tables and the picture of all evaluations."""
    if not evaluations:
        return 'Nothing has been evaluated yet.\n'
    picture = f'![Top-1 against the size of the image](../images/{PICTURE})'
    caption = 'Bars: the standard error of one run over the images, also where a point is the mean of several seeds.'
    return '\n'.join([*map(format_sizes, evaluations), picture, '', caption, ''])


def format_sizes(evaluation: Mapping[str, Any]) -> str:
    """Format the table of an evaluation, and what it was measured on."""
    rows = by_row(evaluation)
    sides = sorted({side for found in rows.values() for side in found})
    lines = [f'| model | runs | {" | ".join(f"{side} px" for side in sides)} |', '|---|---|' + '---|' * len(sides)]
    for row, found in rows.items():
        cells = [spread([*found[side].values()]) if side in found else '-' for side in sides]
        count = max(map(len, found.values()))
        lines.append(f'| {row_title(row)} | {count} | {" | ".join(cells)} |')
    measured = [each for run in evaluation['runs'] for each in run['sizes']]
    error = statistics.fmean(map(standard_error, measured))
    about = (
        f'Top-1 in percent of {measured[0]["samples"]:,} validation images ({title_of(evaluation)}), after training at '
        f'{size_label({"scales": [evaluation["runs"][0]["train_size"]]})} px; the standard error of one run is '
        f'{error:.1f} points. {evaluation["processor"]}, commit {evaluation["commit"]}.'
    )
    return '\n'.join([*lines, '', wrap(about), ''])


def draw_sizes(evaluations: Sequence[Mapping[str, Any]]) -> Any:
    """Draw top-1, with the standard error of one run, by the side of the image: a panel an evaluation, a line a row."""
    figure = new_figure(5 * len(evaluations) + 1.5, 3.6)
    panels = figure.subplots(1, len(evaluations), squeeze=False, sharey=True)[0]
    for axes, evaluation in zip(panels, evaluations, strict=True):
        samples = evaluation['runs'][0]['sizes'][0]['samples']
        for row, found in by_row(evaluation).items():
            means = [statistics.fmean(found[side].values()) for side in sorted(found)]
            errors = [standard_error({'top1': mean, 'samples': samples}) for mean in means]
            axes.errorbar(sorted(found), means, errors, fmt='o-', capsize=3, label=row_title(row))
        axes.axvline(evaluation['runs'][0]['train_size'][0], color='0.5', linestyle=':', label='size of training')
        axes.set(xlabel='side of the image (pixels)', title=f'{title_of(evaluation)}, {samples:,} images')
        axes.grid(alpha=0.3)
    panels[0].set_ylabel('top-1 and standard error of one run (%)')
    # Outside the panels: with every row there is no room between the curves.
    figure.legend(*panels[0].get_legend_handles_labels(), loc='outside right center')
    return figure


if __name__ == '__main__':
    run_command(main)
