"""Prune the position biases of an AFT-conv model, and print the resulting accuracy and cost.

python -m tools.prune_bias --checkpoint FILE_OR_DIR --data DIR --thresholds 0.01 0.03 0.1 0.3
python -m tools.prune_bias --checkpoint FILE_OR_DIR --data DIR --keep-fraction 0.5 0.2 0.1 --save 0.1

FILE_OR_DIR is a run or a checkpoint of train.imagenet, or an exported folder; DIR is a folder or tar file with a val,
validation or test split, or with --name the root of a data set of torchvision, Hugging Face or WebDataset by timm's
name. Nothing is trained.

A kernel entry is pruned, w = 0, where |exp(w) - 1| is below a threshold: its source then has the weight 1 of the global
sum. --keep-fraction finds the threshold that keeps this share of all entries. All thresholds and the unpruned model are
evaluated in one pass over the images. A model with one offset per head (gumbel=True) is pruned from these offsets. A
model without global context (global_context=False) is an error, because there w = 0 is not neutral.

Prints for each threshold the share of pruned entries, top-1, the offsets that a head keeps (mean, min, max), and the
multiply-adds of the kept offsets relative to whole kernels. Writes prune_bias.json, which also has offsets and entropy
of each layer. --save THRESHOLD also writes the model pruned at this threshold into the folder pruned/, which
`timm.create_model('local-dir:DIR/pruned', pretrained=True)` loads.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.arguments import add_data_arguments, add_device, add_license, add_overwrite, add_size, check_new
from train.command_line import CommandParser, run_command


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('--checkpoint', type=Path, required=True, help='a checkpoint file, a run or an exported folder')
    add_data_arguments(parser)
    parser.add_argument('--thresholds', type=float, nargs='+', help='for |exp(w) - 1| (default: 0.01 0.03 0.1 0.3)')
    parser.add_argument('--keep-fraction', type=float, nargs='+', default=[], help='shares of all entries to keep')
    parser.add_argument('--save', type=float, metavar='THRESHOLD', help='write the model pruned at this threshold')
    add_license(parser)
    add_size(parser)
    add_device(parser)
    parser.add_argument('--out', type=Path, help='folder of the results (default: next to the checkpoint)')
    add_overwrite(parser)
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

from timm.data import resolve_model_data_config
from torch import nn

from aft_vision.devices import use_device
from aft_vision.evaluate import evaluate_all, known_classes
from aft_vision.export import export_model
from aft_vision.files import write_json
from aft_vision.models.checkpoint import load_model
from aft_vision.models.transfer_source import set_license
from aft_vision.regularizers import (
    conv_mixers,
    layer_entropies,
    prune,
    sparsity_metrics,
    threshold_that_keeps,
)
from aft_vision.sizes import check_image_size
from tools.data import create_data_loader

THRESHOLDS = [0.01, 0.03, 0.1, 0.3]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Print one line per threshold, from the unpruned model to the sparsest.

    Returns:
        The content of prune_bias.json.

    Raises:
        ValueError: the checkpoint, the data set, the device or a threshold is not valid, the classes differ, or the
            model has no AFT-conv kernels that can be pruned.
        FileExistsError: a file of the results exists and --overwrite is not given.
    """
    args = parse_args(argv)
    out = args.out or (args.checkpoint if args.checkpoint.is_dir() else args.checkpoint.parent)
    check_new(args, out / 'prune_bias.json', *([] if args.save is None else [out / 'pruned']))
    device = use_device(args.device)
    model: Any = load_model(args.checkpoint, device)
    # First: a model without them may have no grid of tokens either.
    conv_mixers(model)
    trained = resolve_model_data_config(model)
    if args.size is not None:
        trained['input_size'] = (3, *args.size)
    trained['crop_pct'] = trained['crop_pct'] if args.crop_pct is None else args.crop_pct
    size = trained['input_size'][1:]
    check_image_size(model, size)
    thresholds = choose_thresholds(model, args)
    loader, class_names, classes = create_data_loader(model, size, args, device)
    rows = measure_pruned(model, loader, thresholds, classes)
    result = {
        'checkpoint': str(args.checkpoint),
        'data': args.name or args.data,
        'device': str(device),
        'input_size': trained['input_size'],
        'batch_size': args.batch_size,
        'kernel_entropy_nats': [entropy.mean().item() for entropy in layer_entropies(model)],
        'rows': rows,
    }
    print_table(rows)
    write_json(out / 'prune_bias.json', result)
    print(f'prune_bias.json is in {out}')
    if args.save is not None:
        pruned = prune(model, args.save)
        set_license(pruned, args.license or model.pretrained_cfg.get('license'))
        names = known_classes(model) or class_names
        export_model(pruned, out / 'pruned', names, trained, card=True)
        print(f'the model pruned at {args.save:g} is in {out / "pruned"}')
    return result


def choose_thresholds(model: nn.Module, args: argparse.Namespace) -> list[float]:
    """Return the thresholds of the command line in ascending order, after 0 for the unpruned model."""
    chosen = args.thresholds or ([] if args.keep_fraction else THRESHOLDS)
    by_share = [threshold_that_keeps(model, share) for share in args.keep_fraction]
    return sorted({0.0, *chosen, *by_share, *([] if args.save is None else [args.save])})


def measure_pruned(
    model: nn.Module, loader: Any, thresholds: Sequence[float], classes: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Evaluate the model pruned at all thresholds in one pass, and measure the size of its kernels.

    Args:
        classes: From `find_classes`.
    """
    pruned = [prune(model, threshold) for threshold in thresholds]
    device = next(model.parameters()).device
    metrics = evaluate_all(pruned, loader, device, progress=sys.stderr.isatty(), classes=classes)
    rows = []
    for threshold, each, measured in zip(thresholds, pruned, metrics, strict=True):
        accuracy: dict[str, Any] = {
            name: measured[name] for name in ('top1', 'top5', 'loss', 'samples') if name in measured
        }
        rows.append({'threshold': threshold, **accuracy, **sparsity_metrics(each)})
    return rows


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print one line per threshold."""
    print('threshold  pruned %  top-1 %    offsets a head  multiply-adds')
    for row in rows:
        offsets = f'{row["offsets_mean"]:.1f} ({row["offsets_min"]}-{row["offsets_max"]})'
        print(
            f'{row["threshold"]:>9.4g}  {100 * row["sparsity"]:>8.2f}  {row["top1"]:>7.2f}  {offsets:>16}  '
            f'{row["madds_sparse"] / row["madds_dense"]:>13.3f}'
        )


if __name__ == '__main__':
    run_command(main)
