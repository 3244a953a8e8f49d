"""The options of tools that cannot be, or not together: an error of the parser, before anything is read."""

import shlex
from importlib import import_module

import pytest

# What each tool needs; no such file is read.
NEEDED = {
    'benchmark.__main__': '',
    'eval_resolution': '--checkpoint . --data a',
    'export': '--checkpoint best.pth --out out',
    'harden_gumbel': '--checkpoint . --out out',
    'predict': 'any.jpg --model aft_conv_nano',
    'rank_news': '--model m --news n --history N1',
    'report': '--checkpoint best.pth',
    'sample_pixels': '--checkpoint x.pt --out x.png',
}
REJECTED = {
    'benchmark.__main__': [
        ('table 7 --png x.png', 'unrecognized arguments: --png'),
        ('table 9', 'invalid choice'),
        ('ops --groups conv2', 'invalid choice'),
        ('', 'required: SECTION'),
        ('loader folder --rounds 0', "expected a number from 1 on, got '0'"),
        ('ops --training', '--training of ops goes only with --tokens'),
        ('ops --tokens --groups full', '--groups of ops goes only without --tokens'),
        ('text --tokens 16 --behaviors', '--tokens of text goes only without --behaviors'),
        ('models --runtimes onnxruntime openvino --dtype bfloat16', '--dtype of models goes only with torch'),
        ('models --runtimes onnxruntime openvino --training', '--training of models goes only with torch'),
        ('models --runtimes onnxruntime openvino --compile', '--compile of models goes only with torch'),
        ('models --runtimes onnxruntime openvino --device cuda', '--device of models goes only with torch'),
    ],
    'eval_resolution': [
        ('--native', '--native needs --max-tokens'),
        ('--max-tokens 9 --sizes 32', '--max-tokens needs --native'),
        ('--native --max-tokens 0', 'at least 1'),
        ('--native --max-tokens 9 --pad', '--native takes no --pad'),
        ('--sizes 32 --checkpoint a b/../a', 'each once, got a b/../a'),
        ('--val-share 0.1 --split validation', 'argument --split: not allowed with argument --val-share'),
        ('--workers -1', "argument --workers: expected a number from 0 on, got '-1'"),
        ('--val-share 1', "argument --val-share: expected a share above 0 and below 1, got '1'"),
        ('--val-share x', "argument --val-share: expected a share above 0 and below 1, got 'x'"),
        ('--num-classes 0', "argument --num-classes: expected a number from 1 on, got '0'"),
    ],
    'export': [
        ('--format tflite', "invalid choice: 'tflite' (choose from "),
        ('--format openvino', "timmx.export_model('openvino', 'local-dir:FOLDER', ...) writes it from a folder"),
        ('--format onnx --aten', '--aten belongs to --format pt2, got onnx'),
        ('--format pt2 --int8 dynamic', '--int8 belongs to --format onnx, got pt2'),
        ('--format onnx --int8 static', '--int8 static needs --data'),
        ('--format onnx --data .', '--data belongs to --int8'),
        ('--format hf --lowering conv', '--lowering belongs to --format onnx or pt2, got hf'),
        ('--format onnx --model-arg depth=2', '--model-arg and --pretrained belong to --model'),
        ('--format hf --batch 4', '--batch belongs to --format onnx or pt2, got hf'),
        ('--format hf --tolerance 0', '--tolerance belongs to --format onnx or pt2 or web, got hf'),
        ('--format onnx --runtime .', '--runtime belongs to --format web, got onnx'),
        ('--format pt2 --opset 20', '--opset belongs to --format onnx, got pt2'),
        ('--format onnx --batch 0', 'argument --batch: expected a number from 1 on'),
    ],
    'harden_gumbel': [
        ('--split val', '--split belongs to the images of --data or --name'),
        ('--batch-size 8', '--batch-size belongs to the images of --data or --name'),
    ],
    'predict': [
        ('--out found.txt', 'expected a .csv or .json file, got --out found.txt'),
        ('--out found', 'expected a .csv or .json file, got --out found'),
    ],
    'rank_news': [('--top 0', "--top: expected a number from 1 on, got '0'")],
    'report': [
        ('--only attention', '--images is missing: a photograph for --only attention'),
        ('--images a --layers 1', '--layers belongs to --only biases or --only keys or --only attention;'),
        ('--images a --exponentiated', '--exponentiated belongs to --only biases;'),
        ('--only biases --images a', '--images belongs to the page or --only keys or --only attention, got'),
        ('--only biases --bits 8', '--bits belongs to the page or --only keys or --only attention, got'),
        ('--only biases --vit a', '--vit belongs to the page, got --only biases;'),
        ('--only biases --query 1 1', '--query belongs to the page or --only attention, got'),
        ('--only keys --images a --before a', '--before belongs to the page or --only biases, got'),
        ('--only keys --images a --max-images 2', '--max-images belongs to the page, got --only keys'),
        ('--only keys --images .', 'expected a photograph, got the folder .;'),
    ],
    'sample_pixels': [
        ('--images x.png --indices 1', '--indices are of the images of --data'),
        ('--images x.png --columns 2', '--columns is for use without --images or --data'),
        ('--num-samples 2', '--num-samples is for use with --images or --data'),
        ('--images x.png --scale 0', '--scale: expected a number from 1 on'),
    ],
}
ROWS = [(tool, *row) for tool, rows in REJECTED.items() for row in rows]


@pytest.mark.parametrize(('tool', 'options', 'words'), ROWS, ids=[f'{tool} {options}' for tool, options, _ in ROWS])
def test_options_that_cannot_be_are_an_error_of_the_parser(tool, options, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        import_module(f'tools.{tool}').main(shlex.split(f'{NEEDED[tool]} {options}'))
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err
