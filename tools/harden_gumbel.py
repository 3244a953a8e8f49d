"""Turn an AFT-conv trained with gumbel=True into its one-hot form: one learned offset per head (AFT Eq. 10).

python -m tools.harden_gumbel --checkpoint FILE_OR_DIR --out DIR [--data IMAGES]

FILE_OR_DIR is a run or a checkpoint of train.imagenet, or an exported folder, of a model with gumbel=true. DIR becomes
an exported folder with the same classes and preprocessing, and a model card. After `import aft_vision`,
`timm.create_model('local-dir:DIR', pretrained=True)` loads it, and so do tools.eval_resolution (--checkpoint DIR) and
the trainer (run.init_from=DIR with model.mixer=onehot).

Prints the parameters before and after; the largest difference of logits on random images at several sizes, to the
Gumbel model in evaluation, to the one-hot kernels as a convolution, and to the model without offsets (w = 0), which
shows their effect; the offsets of the heads of each layer; and with --data the accuracy before and after. Writes the
same to DIR/harden_gumbel.json.
"""

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.arguments import CommandParser, add_data_arguments, add_device, add_license, check_out, parse_size


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('--checkpoint', type=Path, required=True, help='a checkpoint file, a run or an exported folder')
    parser.add_argument('--out', type=Path, required=True, help='the folder to export to')
    parser.add_argument(
        '--sizes',
        type=parse_size,
        nargs='+',
        help='image sizes of the comparison: a side in pixels, or HEIGHTxWIDTH (default: that of the training, half of '
        'it, twice its width, and a single patch)',
    )
    add_license(parser)
    options = add_data_arguments(parser, required=False)
    add_device(parser)
    args = parser.parse_args(argv)
    for name in options:
        if getattr(args, name) != parser.get_default(name) and not (args.data or args.name):
            parser.error(f'--{name.replace("_", "-")} belongs to the images of --data or --name')
    return args


if __name__ == '__main__':
    parse_args()

import torch
from torch import nn

from aft_vision.commandline import run_command
from aft_vision.devices import resolve_device
from aft_vision.evaluate import evaluate_all
from aft_vision.export import export_model
from aft_vision.files import write_json
from aft_vision.layers import AFTOnehot
from aft_vision.models.checkpoint import load_model
from aft_vision.models.harden import compare_logits, convolution_form, describe_offsets, harden
from aft_vision.models.transfer_source import set_license
from aft_vision.sizes import check_image_size, default_size
from tools.data import create_data_loader


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Export the one-hot form, and print the comparison.

    Returns:
        The content of harden_gumbel.json.

    Raises:
        ValueError: the checkpoint, the data set, the device or a size is not valid, the model was not trained with
            gumbel=True, or the result would overwrite it or hide that of another run.
    """
    args = parse_args(argv)
    check_out(args.out, args.checkpoint)
    if args.out.is_file():
        raise ValueError(f'expected a folder, got --out {args.out}, a file')
    device = resolve_device(args.device)
    model: Any = load_model(args.checkpoint, device)
    onehot = harden(model)
    sizes = args.sizes or default_sizes(model)
    for size in sizes:
        check_image_size(model, size)
    result: dict[str, Any] = {
        'checkpoint': str(args.checkpoint),
        'device': str(device),
        'parameters': {'gumbel': count_parameters(model), 'onehot': count_parameters(onehot)},
        'logits': compare(model, onehot, sizes),
        'offsets': describe_offsets(onehot),
    }
    if args.data or args.name:
        # In one pass over the data set, at the training size.
        loader, _ = create_data_loader(model, default_size(model), args, device)
        before, after = evaluate_all([model, onehot], loader, device, progress=sys.stderr.isatty())
        result['accuracy'] = {'gumbel': before, 'onehot': after}
    set_license(onehot, args.license or model.pretrained_cfg.get('license'))
    export_model(onehot, args.out, model.pretrained_cfg.get('label_names') or [], card=True)
    write_json(args.out / 'harden_gumbel.json', result)
    print_result(result)
    print(f'the one-hot model and harden_gumbel.json are in {args.out}')
    return result


def default_sizes(model: Any) -> list[tuple[int, int]]:
    """Return sizes (H, W) of whole patches: the training size, half of it, twice its width, and a single patch."""
    patch = model.patch_embed.patch_size
    height, width = (max(side // step, 1) for side, step in zip(default_size(model), patch, strict=True))
    grids = [(1, 1), (max(height // 2, 1), max(width // 2, 1)), (height, width), (height, 2 * width)]
    return [(rows * patch[0], columns * patch[1]) for rows, columns in dict.fromkeys(grids)]


def count_parameters(model: nn.Module) -> int:
    """Count the parameters of a model, without offsets, which are buffers."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def compare(model: nn.Module, onehot: nn.Module, sizes: Sequence[tuple[int, int]]) -> list[dict[str, float]]:
    """Return one row per size: the differences of the one-hot form from other forms, and the largest logit."""
    simple: Any = copy.deepcopy(onehot)
    for module in simple.modules():
        if isinstance(module, AFTOnehot):
            module.weight.zero_()
    others = {'gumbel': model, 'convolution': convolution_form(onehot), 'without_offsets': simple}
    rows: list[dict[str, float]] = [{'height': size[0], 'width': size[1]} for size in sizes]
    for name, other in others.items():
        for row, found in zip(rows, compare_logits(onehot, other, sizes), strict=True):
            row |= {'largest_logit': found['magnitude'], f'difference_from_{name}': found['difference']}
    return rows


def print_result(result: dict[str, Any]) -> None:
    """Print the content of the JSON file as tables."""
    before, after = result['parameters']['gumbel'], result['parameters']['onehot']
    print(f'parameters: {before:,} before, {after:,} after ({100 * (after / before - 1):.1f} %)')
    print(f'\n{"":22}  largest difference of logits from')
    print(f'{"size":>9}  {"largest":>11}  {"Gumbel":>7}  {"convolution":>11}  without offsets')
    for row in result['logits']:
        print(
            f'{row["height"]:>4}x{row["width"]:<4}  {row["largest_logit"]:>11.3f}  '
            f'{row["difference_from_gumbel"]:>7.1e}  {row["difference_from_convolution"]:>11.1e}  '
            f'{row["difference_from_without_offsets"]:>15.1e}'
        )
    print(f'\n{"":41}  distance in tokens')
    print('layer  heads  at centre  distinct offsets  mean  largest  mean w')
    for row in result['offsets']:
        print(
            f'{row["layer"]:>5}  {row["heads"]:>5}  {row["at_centre"]:>9}  {row["distinct_offsets"]:>16}  '
            f'{row["mean_distance"]:>4.1f}  {row["largest_distance"]:>7.1f}  {row["mean_bias"]:>6.3f}'
        )
    for name, metrics in result.get('accuracy', {}).items():
        top5 = f'  top-5 {metrics["top5"]:.2f} %' if 'top5' in metrics else ''
        print(f'{name:>6}: top-1 {metrics["top1"]:.2f} %{top5}  loss {metrics["loss"]:.4f}')


if __name__ == '__main__':
    run_command(main)
