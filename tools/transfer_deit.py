"""Initialise an AFT model with the weights of a DeiT or ViT (AFT Table 8).

python -m tools.transfer_deit --source deit_base_patch16_384 --model aft_conv_base_k25_h32_384 --out runs/from_deit
aft-vision train --config CONFIG run.init_from=runs/from_deit

SOURCE is a timm model name, whose weights are downloaded; a file: DeiT's own .pth, a .safetensors, a checkpoint of
train.imagenet; the folder of a run; or an exported folder. The model must have its width and depth. Patch embedding,
values, output projections, norms, MLPs and head are copied, and for AFT-full class token and position embedding too;
queries and keys are left out. A patch embedding of another size and a position embedding on another grid are resampled.
Fine-tune the result: its queries, keys and position biases are new.

Prints which tensors were copied, resampled, merged, left out or kept as initialised, and writes a folder with
model.safetensors, config.json, a model card and transfer_report.json, for run.init_from, the other tools and
timm.create_model('local-dir:FOLDER', pretrained=True). Class names, preprocessing and licence are those of the source
if known. Code in a file is never executed.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.arguments import KeyValues, add_license, check_out, parse_count, parse_size
from train.command_line import CommandParser, run_command


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('--source', required=True, help='a timm model name, a file, a run or an exported folder')
    parser.add_argument('--model', required=True, help='a registered aft_* model of the same width and depth')
    parser.add_argument(
        '--model-arg',
        nargs='*',
        default={},
        action=KeyValues,
        metavar='NAME=VALUE',
        help='keyword arguments of the model, such as kernel_size=15 num_heads=32',
    )
    parser.add_argument('--size', type=parse_size, help="a side in pixels, or HEIGHTxWIDTH (default: the model's own)")
    parser.add_argument('--num-classes', type=parse_count, metavar='N', help='classes (default: those of the source)')
    parser.add_argument('--seed', type=int, default=0, help='seed of tensors that the source lacks (default: 0)')
    add_license(parser)
    parser.add_argument('--out', type=Path, required=True, help='folder to write')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

import timm
from timm.models import clean_state_dict, get_model_input_config
from timm.utils import random_seed
from torch import nn

from aft_vision.export import export_model
from aft_vision.files import write_json
from aft_vision.models.checkpoint import Weights, load_source
from aft_vision.models.deit_transfer import deit_to_aft
from aft_vision.models.transfer_report import Row, TransferReport, summarize_transfer
from aft_vision.models.transfer_source import build_model, did_you_mean, set_license
from aft_vision.sizes import check_image_size, default_size


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Write the folder and print the table.

    Returns:
        The content of transfer_report.json.

    Raises:
        ValueError: there is no such source or model, the weights or the size do not fit the model, or --out is a run.
    """
    args = parse_args(argv)
    check_out(args.out, Path(args.source))
    source = load_source(args.source)
    model = create_target(args, source)
    state_dict, report = deit_to_aft(source.state_dict, model, grid=source.grid)
    model.load_state_dict(state_dict)
    rows = summarize_transfer(report, model)
    print_table(rows, report, model)
    input_size = get_model_input_config(model)['input_size']
    num_classes: Any = model.num_classes
    known = source.pretrained_cfg
    names = known.get('label_names') or []
    if len(names) != num_classes:
        names = [str(index) for index in range(num_classes)]
    # The mean and deviation of other channels do not fit; the model has its own.
    data_config = {
        key: known[key]
        for key in ('mean', 'std', 'interpolation', 'crop_pct')
        if key in known and (key not in ('mean', 'std') or len(known[key]) in (1, input_size[0]))
    }
    set_license(model, args.license or known.get('license'))
    export_model(model, args.out, names, {**data_config, 'input_size': input_size}, card=True)
    result = report_content(args, rows, report)
    write_json(args.out / 'transfer_report.json', result)
    print(f'the model, its card and transfer_report.json are in {args.out}')
    return result


def create_target(args: argparse.Namespace, source: Weights) -> nn.Module:
    """Create the target model, by default with the number of classes of the source."""
    names = timm.list_models(module='aft_vit')
    if args.model not in names:
        hint = did_you_mean(args.model, names)
        raise ValueError(f'expected one of the models {", ".join(names)}, got {args.model}{hint}')
    kwargs = dict(args.model_arg)
    if args.size is not None:
        kwargs['img_size'] = args.size
    head = clean_state_dict(source.state_dict).get('head.weight')
    if args.num_classes is not None:
        kwargs['num_classes'] = args.num_classes
    elif head is not None:
        kwargs.setdefault('num_classes', head.shape[0])
    random_seed(args.seed)
    model = build_model(args.model, **kwargs)
    check_image_size(model, default_size(model))
    return model


def print_table(rows: Sequence[Row], report: TransferReport, model: nn.Module) -> None:
    """Print a line for each kind of tensor, and the totals."""
    print(f'{"":15}  {"what":20}  {"tensors":>7}  {"parameters":>11}')
    for row in rows:
        print(f'{row.action:15}  {row.what:20}  {row.tensors:>7}  {row.parameters:>11,}  {row.note}'.rstrip())
    # Layer scale that only the model has is not a tensor of the source.
    given = [count for outcomes in report.values() if (count := sum(each.numel for each in outcomes))]
    own = sum(tensor.numel() for tensor in model.state_dict().values())
    print(f'the source has {sum(given):,} parameters in {len(given)} tensors, the model {own:,}')


def report_content(args: argparse.Namespace, rows: Sequence[Row], report: TransferReport) -> dict[str, Any]:
    """Return the content of transfer_report.json: the arguments, the table, and the outcome of each tensor."""
    arguments = {**vars(args), 'out': str(args.out)}
    tensors = {key: [each._asdict() for each in outcomes] for key, outcomes in report.items()}
    return {'arguments': arguments, 'table': [row._asdict() for row in rows], 'tensors': tensors}


if __name__ == '__main__':
    run_command(main)
