"""The options of tools that cannot be, or not together: an error of the parser, before anything is read."""

import shlex
from importlib import import_module

import pytest

# What each tool needs; no such file is read.
NEEDED = {
    'benchmark.__main__': '',
    'eval_resolution': '--checkpoint . --data a',
    'export': '--checkpoint best.pth --out out',
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
    ],
    'eval_resolution': [
        ('--native', '--native needs --max-tokens'),
        ('--max-tokens 9 --sizes 32', '--max-tokens needs --native'),
        ('--native --max-tokens 0', 'at least 1'),
        ('--sizes 32 --checkpoint a b/../a', 'each once, got a b/../a'),
        ('--val-share 0.1 --split validation', 'argument --split: not allowed with argument --val-share'),
        ('--workers -1', "argument --workers: expected a number from 0 on, got '-1'"),
        ('--val-share 1', "argument --val-share: expected a share above 0 and below 1, got '1'"),
    ],
    'export': [
        ('--format tflite', "invalid choice: 'tflite' (choose from "),
        ('--format onnx --aten', '--aten belongs to --format pt2, got onnx'),
        ('--format pt2 --int8 dynamic', '--int8 belongs to --format onnx, got pt2'),
        ('--format onnx --int8 static', '--int8 static needs --data'),
        ('--format onnx --data .', '--data belongs to --int8'),
        ('--format hf --lowering conv', '--lowering belongs to --format onnx or pt2, got hf'),
        ('--format onnx --model-arg depth=2', '--model-arg and --pretrained belong to --model'),
    ],
    'predict': [
        ('--out found.txt', 'expected a .csv or .json file, got --out found.txt'),
    ],
    'rank_news': [('--top 0', "--top: expected a number from 1 on, got '0'")],
    'report': [
        ('--only attention', '--images is missing: a photograph for --only attention'),
        ('--images a --layers 1', '--layers belongs to --only biases or --only keys or --only attention;'),
        ('--images a --exponentiated', '--exponentiated belongs to --only biases;'),
        ('--only biases --images a', '--images belongs to the page or --only keys or --only attention, got'),
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


@pytest.mark.parametrize(
    ('tool', 'options'),
    [
        ('continue_text', '--checkpoint READ'),
        ('continue_text', '--checkpoint other --prompt-file READ'),
        ('harden_gumbel', '--checkpoint READ'),
        ('report', '--checkpoint READ --images missing'),
        ('report', '--checkpoint other --images missing --before READ'),
        ('report', '--checkpoint other --images missing --vit READ'),
        ('report', '--checkpoint other --only keys --images READ'),
        ('sample_pixels', '--checkpoint other --images READ'),
        ('sample_pixels', '--checkpoint other --images FOLDER'),
        ('sample_pixels', '--checkpoint other --mask READ --data FOLDER'),
        ('transfer_deit', '--source READ --model aft_conv_tiny'),
    ],
)
def test_what_is_read_is_not_overwritten(tool, options, tmp_path):
    path = tmp_path / 'read.png'
    path.write_bytes(b'read')
    words = options.replace('READ', str(path)).replace('FOLDER', str(tmp_path)).split()
    with pytest.raises(ValueError, match=r'expected another place than that of .*read\.png, which is read, got --out'):
        import_module(f'tools.{tool}').main([*words, '--out', str(path)])
    assert path.read_bytes() == b'read'
