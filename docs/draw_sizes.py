"""Draw docs/images/image_sizes.png from docs/results/data/image_sizes.json: python docs/draw_sizes.py"""

import json
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent
# Colour and line of each model that is drawn; the table has all.
STYLES = {
    'AFT-conv small': ('C0', '-'),
    'DeiT small': ('C3', '-'),
    'DeiT small, attention weights in memory': ('C3', ':'),
    'ConvNeXt tiny': ('0.5', '--'),
}


def main() -> None:
    """Draw time and memory of one image against its side."""
    data = json.loads((DOCS / 'results' / 'data' / 'image_sizes.json').read_text())
    figure = Figure(figsize=(9, 3.8), layout='constrained')
    panels = zip(figure.subplots(1, 2), ('milliseconds', 'peak_mib'), ('time (ms)', 'peak memory (MiB)'), strict=True)
    for axes, key, label in panels:
        for name, (color, line) in STYLES.items():
            axes.loglog(data['sizes_px'], data['models'][name][key], line, color=color, marker='o', label=name)
        axes.set_xticks(data['sizes_px'], map(str, data['sizes_px']))
        axes.set_xticks([], minor=True)
        axes.set_xlabel('side of one image (px)')
        axes.set_title(label, fontsize=12)
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc='outside lower center', ncols=4, fontsize=9)
    figure.suptitle(data['processor'], fontsize=10)
    figure.savefig(DOCS / 'images' / 'image_sizes.png', dpi=150)


if __name__ == '__main__':
    main()
