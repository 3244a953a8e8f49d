"""Export a model to ONNX, torch.export, a hub folder or a page for browsers.

python -m tools.export --checkpoint FILE_OR_DIR --format onnx --out model.onnx
python -m tools.export --checkpoint FILE_OR_DIR --format hf --out FOLDER
python -m tools.export --checkpoint FILE_OR_DIR --format web --out FOLDER --runtime node_modules/onnxruntime-web
python -m tools.export --model aft_conv_small_k11_h16 --format onnx --lowering matmul --fixed-size --out model.onnx

FILE_OR_DIR is a run or a checkpoint of train.imagenet, or an exported folder; --model is a timm model name, with random
weights unless --pretrained is given. Formats:

onnx   input `images` (B, 3, H, W), output `logits`. Any batch; for AFT-conv also any height and width that are
       multiples of the patch size: one file for every grid. Models with a position embedding or AFT-full's bias have
       the size of --size. Plain operators; Eq. 8 and the exponentials of the bias are constants. Needs the export
       extra.
pt2    torch.export, with the same dynamic sizes. It contains AFT's custom operators, so loading it needs
       `import aft_vision`; with --aten it contains only torch's operators.
hf     a folder for timm (`local-dir:FOLDER`), transformers and the Hugging Face hub, with a model card. It also has
       what loads without this package and timm: model.onnx, and model.pt2 with the code by which transformers runs it
       (trust_remote_code=True); --without leaves some of it out. Needs the export extra for model.onnx.
web    a folder with a page that classifies photographs in the browser, as tools.predict does, with model.onnx and
       model.json. `python -m http.server --directory FOLDER` serves it. It needs the npm package onnxruntime-web, whose
       two files are copied from --runtime, or which `npm install` puts into the folder. Needs the export extra.

Every onnx and pt2 file is compared with PyTorch on random images before it gets its name, at three sizes if sizes are
dynamic. The largest difference is printed, relative to the largest logit; above --tolerance it is an error.

--lowering matmul writes AFT-conv as one constant matrix per head and layer, heads x T x T floats for T tokens, at one
size. Use it for few heads; it loses no digits if the position bias is very negative.

--int8 then replaces the weights and inputs of the projections of an onnx file by int8, by onnxruntime.quantization.
--data is a folder of photographs: it prints how often the most likely class stays the same. --int8 alone means
dynamic, the faster in onnxruntime; static, the faster in OpenVINO, also chooses its scales from half of the
photographs.
"""

import argparse
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tools.arguments import KeyValues, add_decoding, add_license, add_size, check_out, decoding, parse_positive
from train.command_line import CommandParser, run_command

# These are also in aft_vision.export, which is slow to import. Parts of hf for users without this package.
PARTS = ('code', 'onnx', 'pt2')
FORMATS = ('onnx', 'pt2', 'hf', 'web')
INT8_MODES = ('dynamic', 'static')
LOWERINGS = ('conv', 'matmul')
# Photographs of --data that are read, evenly spaced.
MAX_PHOTOGRAPHS = 1000


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument('--checkpoint', type=Path, help='a checkpoint file, a run or an exported folder')
    source.add_argument('--model', help='a timm model name')
    parser.add_argument('--model-arg', nargs='+', action=KeyValues, default={}, metavar='KEY=VALUE', help='of --model')
    parser.add_argument('--pretrained', action='store_true', help='load the published weights of --model')
    parser.add_argument('--format', required=True, choices=FORMATS)
    parser.add_argument('--out', type=Path, required=True, help='the file, or the folder for hf and web')
    add_size(parser)
    add_decoding(parser)
    parser.add_argument('--fixed-size', action='store_true', help='fix the image size')
    parser.add_argument('--batch', type=parse_positive, help='fix the batch size (default: any)')
    parser.add_argument('--lowering', choices=LOWERINGS, help='AFT-conv in onnx, pt2 --aten (default: conv)')
    parser.add_argument('--aten', action='store_true', help="pt2 with only torch's operators")
    parser.add_argument(
        '--int8', nargs='?', const='dynamic', choices=INT8_MODES, help='projections of the onnx file in int8'
    )
    parser.add_argument('--data', type=Path, help='a folder of photographs for --int8')
    parser.add_argument('--opset', type=int, help='ONNX operator set, 18 to 25 (default: 20)')
    parser.add_argument('--tolerance', type=float, help='for onnx and pt2 (default: 1e-5)')
    add_license(parser)
    parser.add_argument(
        '--without', nargs='+', choices=PARTS, default=(), metavar='PART', help=f'of hf: {", ".join(PARTS)}'
    )
    parser.add_argument('--runtime', type=Path, metavar='FOLDER', help='onnxruntime-web from npm, for web')
    args = parser.parse_args(argv)
    owners = {
        'int8': ['onnx'],
        'lowering': ['onnx', 'pt2'],
        'aten': ['pt2'],
        'batch': ['onnx', 'pt2'],
        'opset': ['onnx'],
        'tolerance': ['onnx', 'pt2', 'web'],
        'license': ['hf'],
        'without': ['hf'],
        'runtime': ['web'],
    }
    for option, formats in owners.items():
        if getattr(args, option) != parser.get_default(option) and args.format not in formats:
            parser.error(f'--{option} belongs to --format {" or ".join(formats)}, got {args.format}')
    if args.data and not args.int8:
        parser.error('--data belongs to --int8')
    if args.int8 == 'static' and not args.data:
        parser.error('--int8 static needs --data, photographs from which it chooses the scales')
    if args.checkpoint and (args.model_arg or args.pretrained):
        parser.error('--model-arg and --pretrained belong to --model; a checkpoint says how its model is built')
    args.opset = 20 if args.opset is None else args.opset
    args.tolerance = 1e-5 if args.tolerance is None else args.tolerance
    return args


if __name__ == '__main__':
    parse_args()

import aft_vision  # noqa: F401
from aft_vision.data import CorruptImageError
from aft_vision.export import (
    Check,
    InputShape,
    choose_shape,
    export_hub_folder,
    export_onnx,
    export_pt2,
    export_web,
    quantize_onnx,
)
from aft_vision.export.web import RUNTIME, RUNTIME_FOLDER
from aft_vision.files import replacing
from aft_vision.models.checkpoint import load_model, read_record
from aft_vision.models.transfer_source import build_model
from aft_vision.visualize import SkippedImages, find_photographs, load_batches


def main(argv: Sequence[str] | None = None) -> Path:
    """Write the file or folder and return its path.

    Raises:
        ValueError: the checkpoint, the model or an option is not valid, the file differs from the model, or the result
            would overwrite the checkpoint or hide the one of a run.
        ImportError: a package that the format needs is not installed.
    """
    args = parse_args(argv)
    named = args.model is not None and args.model.startswith('local-dir:')
    check_out(args.out, Path(args.model.removeprefix('local-dir:')) if named else args.checkpoint)
    if args.format in ('hf', 'web') and args.out.is_file():
        raise ValueError(f'expected a folder for --format {args.format}, got --out {args.out}, a file')
    if args.format in ('onnx', 'pt2') and args.out.is_dir():
        raise ValueError(f'expected a file for --format {args.format}, got --out {args.out}, a folder')
    model: Any
    if args.checkpoint:
        model = load_model(args.checkpoint)
    else:
        model = build_model(args.model, **{'pretrained': args.pretrained, **args.model_arg}).eval()
    lowering = args.lowering or 'conv'
    shape = choose_shape(model, args.size, args.fixed_size, args.batch, lowering)
    if args.format == 'hf':
        content = read_record(args.checkpoint) if args.checkpoint else {}
        parts = [part for part in PARTS if part not in args.without]
        for name, checks in export_hub_folder(model, args.out, args.size, content, args.license, parts).items():
            print(f'{name}: differs from PyTorch by at most {max(check.difference for check in checks):.1e}')
    elif args.format == 'web':
        show_checks(export_web(model, args.out, shape, runtime=args.runtime, tolerance=args.tolerance))
    else:
        write_program(model, shape, lowering, args)
    weights = ', with random weights' if args.model and not args.pretrained else ''
    print(f'{args.out} is written{weights}{describe_inputs(shape, args.format)}')
    if args.format == 'web':
        if not (args.out / RUNTIME_FOLDER).is_dir():
            print(f'The page needs onnxruntime-web: npm install --prefix {shlex.quote(str(args.out))} {RUNTIME}')
        print(f'To see the page: python -m http.server --directory {shlex.quote(str(args.out))}')
    return args.out


def write_program(model: Any, shape: InputShape, lowering: str, args: argparse.Namespace) -> None:
    """Write an onnx or pt2 file, and print how it differs from PyTorch, and from itself in int8."""
    files, skipped = find_photographs(args.data, MAX_PHOTOGRAPHS) if args.data else [], SkippedImages()
    # A file of a fixed batch takes no other.
    batches = load_batches(files, model, shape.size, skipped, decoding(args))
    images = [image.repeat(shape.batch or 1, 1, 1, 1) for batch in batches for image in batch.split(1)]
    if files and not images:
        raise CorruptImageError(f'expected an image that can be decoded in {args.data}, got none of {len(files)}')
    # With --int8 the file has its name only in int8.
    with replacing(args.out) if args.int8 else nullcontext(args.out) as path:
        if args.format == 'onnx':
            checks = export_onnx(model, path, shape, lowering=lowering, opset=args.opset, tolerance=args.tolerance)
        else:
            checks = export_pt2(model, path, shape, aten=args.aten, lowering=lowering, tolerance=args.tolerance)
        show_checks(checks)
        same = quantize_onnx(path, args.int8, images) if args.int8 else None
    if same is not None:
        print(f'int8: the most likely class is that of the float32 file for {100 * same:.1f} % of the photographs')
    if skipped.paths:
        print(skipped.describe())


def show_checks(checks: Sequence[Check]) -> None:
    """Print how a file differs from PyTorch."""
    for check in checks:
        height, width = check.size
        print(f'{check.batch} x {height} x {width}: differs from PyTorch by {check.difference:.1e}')


def describe_inputs(shape: InputShape, file_format: str) -> str:
    """Describe the inputs of the file."""
    if file_format not in ('onnx', 'pt2'):
        return ''
    sizes = f'{shape.size[0]} x {shape.size[1]} only' if shape.fixed_size else 'any height and width'
    return f': it takes {sizes}, {"any batch" if shape.batch is None else f"a batch of {shape.batch}"}'


if __name__ == '__main__':
    run_command(main)
