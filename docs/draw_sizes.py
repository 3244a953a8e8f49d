"""Draw docs/images/image_sizes.png from docs/results/data/image_sizes.json, and print tables of docs/results/speed.md.

They are those of these figures, and of the files of TABLES beside them, of other models and of another machine.

python -m tools.benchmark models --baseline deit_tiny_patch16_224 --batch-size 1 --threads 1 \
    --models aft_conv_tiny aft_conv_tiny_k11_h32 aft_axial_tiny aft_full_tiny aft_pyramid_nano cpubone_b0_bfrobust \
    --runtimes torch onnxruntime --json docs/results/data/image_sizes.json
python docs/draw_sizes.py
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent
TABLES = ('image_sizes.json', 'image_sizes_xeon.json', 'image_sizes_small.json')
# Title and colour of each model; one without a colour is only in the tables.
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
LINES = {'torch': '-', 'onnxruntime': '--'}


def read_curves(name: str) -> tuple[dict[str, Any], dict[tuple[str, str], list[dict[str, Any]]]]:
    """Return the report of the benchmark, and its rows by model and runtime, of one image in the order of its side."""
    report = json.loads((DOCS / 'results' / 'data' / name).read_text())
    curves: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in report['rows']:
        runtime = 'torch' if row['form'] == 'eager' else row['form']
        curves.setdefault((row['name'], runtime), []).append(row)
    return report, curves


def tables(name: str) -> str:
    """Return the Markdown tables of milliseconds with ratios and their quartiles, and of peak memory in MiB."""
    report, curves = read_curves(name)
    sides = ''.join(f' {row["size"][0]} px |' for row in next(iter(curves.values())))
    lines: tuple[list[str], list[str]] = ([], [])
    for (name, runtime), rows in curves.items():
        model, _, form = name.partition(', ')
        words = [MODELS[model][0], 'attention weights in memory' if form.startswith('materialised') else form]
        title = ', '.join(filter(None, [*words, '' if runtime == 'torch' else runtime]))
        times = map(format_time, rows)
        peaks = (f'{row["peak_bytes"] / 2**20:.1f}' for row in rows)
        for block, cells in zip(lines, (times, peaks), strict=True):
            block.append(f'| {title} | {" | ".join(cells)} |')
    head = f'| one image |{sides}\n|---|{"---|" * sides.count("|")}\n'
    return f'{report["machine"]}\n\n' + '\n\n'.join(head + '\n'.join(block) for block in lines)


def format_time(row: dict[str, Any]) -> str:
    """Return the milliseconds of a row, and its ratio to the baseline with the quartiles, if they were kept."""
    low, high = row.get('ratio_quartiles', (1.0, 1.0))
    quartiles = f' [{low:.2f}, {high:.2f}]' if low < high else ''
    return f'{row["milliseconds"]:.2f} ({row["ratio"]:.2f}{quartiles})'


def main() -> None:
    """Draw speed and memory of one image against its side, and print the tables."""
    report, curves = read_curves('image_sizes.json')
    figure = Figure(figsize=(9, 4.2), layout='constrained')
    panels = (('per_second', 1, 'images a second'), ('peak_bytes', 2**20, 'peak memory (MiB)'))
    for axes, (key, unit, title) in zip(figure.subplots(1, 2), panels, strict=True):
        for (name, runtime), rows in curves.items():
            label, color = MODELS.get(name, (name, None))
            if color is not None:
                sides, values = zip(*((row['size'][0], row[key] / unit) for row in rows), strict=True)
                axes.loglog(sides, values, LINES[runtime], color=color, marker='o', label=f'{label}, {runtime}')
        axes.set_xticks(sides, map(str, sides))
        axes.set_xticks([], minor=True)
        axes.set_xlabel('side of one image (px)')
        axes.set_title(title, fontsize=12)
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc='outside lower center', ncols=4, fontsize=9)
    figure.suptitle(report['machine'].partition('; torch')[0], fontsize=10)
    figure.savefig(DOCS / 'images' / 'image_sizes.png', dpi=150)
    print(*map(tables, TABLES), sep='\n\n')


if __name__ == '__main__':
    main()
