"""Turn an AFT-conv trained with gumbel=True into a one-hot model: one learned offset per head (AFT Eq. 10).

python -m tools.harden_gumbel --checkpoint FILE_OR_DIR --out DIR

FILE_OR_DIR is a run or a checkpoint of train.imagenet, or an exported folder, of a model with gumbel=true. DIR becomes
an exported folder with the same classes and preprocessing, and a model card. After `import aft_vision`,
`timm.create_model('local-dir:DIR', pretrained=True)` loads it, and so do tools.eval_resolution (--checkpoint DIR) and
the trainer (run.init_from=DIR with model.mixer=onehot).

Prints the parameters before and after, and writes them to DIR/harden_gumbel.json. tools.eval_resolution --checkpoint
FILE_OR_DIR DIR measures the accuracy of both.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.arguments import add_device, add_license, check_out
from train.command_line import CommandParser, run_command


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('--checkpoint', type=Path, required=True, help='a checkpoint file, a run or an exported folder')
    parser.add_argument('--out', type=Path, required=True, help='the folder to export to')
    add_license(parser)
    add_device(parser)
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

from torch import nn

from aft_vision.devices import use_device
from aft_vision.export import export_model
from aft_vision.files import write_json
from aft_vision.models.checkpoint import load_model
from aft_vision.models.harden import harden
from aft_vision.models.transfer_source import set_license


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Export the one-hot model, and print what has changed.

    Returns:
        The content of harden_gumbel.json.

    Raises:
        ValueError: the checkpoint or the device is not valid, the model was not trained with gumbel=True, or the result
            would overwrite it or hide the one of another run.
    """
    args = parse_args(argv)
    check_out(args.out, args.checkpoint)
    if args.out.is_file():
        raise ValueError(f'expected a folder, got --out {args.out}, a file')
    device = use_device(args.device)
    model: Any = load_model(args.checkpoint, device)
    onehot = harden(model)
    result: dict[str, Any] = {
        'checkpoint': str(args.checkpoint),
        'device': str(device),
        'parameters': {'gumbel': count_parameters(model), 'onehot': count_parameters(onehot)},
    }
    set_license(onehot, args.license or model.pretrained_cfg.get('license'))
    export_model(onehot, args.out, model.pretrained_cfg.get('label_names') or [], card=True)
    write_json(args.out / 'harden_gumbel.json', result)
    print_result(result)
    print(f'the one-hot model and harden_gumbel.json are in {args.out}')
    return result


def count_parameters(model: nn.Module) -> int:
    """Count the parameters of a model, without offsets, which are buffers."""
    return sum(parameter.numel() for parameter in model.parameters())


def print_result(result: dict[str, Any]) -> None:
    """Print the content of the JSON file as tables."""
    before, after = result['parameters']['gumbel'], result['parameters']['onehot']
    print(f'parameters: {before:,} before, {after:,} after ({100 * (after / before - 1):.1f} %)')


if __name__ == '__main__':
    run_command(main)
