"""Every command of `train` answers what a user gets wrong with one line and exit code 2."""

import re
import socket
from pathlib import Path

import pytest
import torch
from helpers import CLOTHING

import train.char
import train.fastformer.__main__
import train.imagenet
import train.pixel
import train.recall
import train.throughput
from aft_vision.models.transfer_source import build_model
from train.build import check_image_sizes, model_arguments
from train.command_line import run_command
from train.config import load_config
from train.fastformer.schema import TextConfig
from train.fastformer.tasks import load_text_config
from train.model_section import WEIGHT_KEYS
from train.sequence_schema import CharConfig, PixelConfig

ROOT = Path(__file__).parents[2]
MAINS = {
    'one_epoch': train.imagenet.main,
    'pixel': train.pixel.main,
    'char': train.char.main,
    '../small/recall': train.recall.main,
    'fastformer': train.fastformer.__main__.main,
}


def line_of(capsys, main, arguments: list[str]) -> str:
    """Run a command that must fail, and return its one line, apart from notes."""
    with pytest.raises(SystemExit) as stop:
        run_command(main, arguments)
    assert stop.value.code == 2
    *notes, line = capsys.readouterr().err.splitlines()
    assert all(note.startswith('note: ') for note in notes)
    assert line.startswith('error: ')
    return line


@pytest.mark.parametrize(
    ('config', 'arguments', 'said'),
    [
        ('one_epoch', 'data.dir=/nowhere', 'got /nowhere'),
        ('one_epoch', 'data.dir=FOLDER', 'FOLDER, which is not one'),
        ('one_epoch', 'data.dir=TEXT', 'got TEXT'),
        ('one_epoch', 'data.dir=UNDIVIDED', 'got only shoes; data.val_share=0.1 holds out a tenth'),
        ('one_epoch', 'optim.args=[1]', 'command line: optim.args = [1]: '),
        ('one_epoch', 'optim.lr=1e300', 'command line: expected optim.lr to be in (0, 1e4]'),
        ('one_epoch', 'model.act_layer=foo', 'got aft_conv_tiny with num_classes=10, '),
        ('one_epoch', 'model.num_heads=7', 'num_heads must divide dim'),
        ('one_epoch', 'model.pretrained=true', 'No pretrained weights exist for aft_conv_tiny'),
        ('one_epoch', 'data.img_size=50', 'data.img_size: expected an image size of multiples of the patch size'),
        ('one_epoch', 'optim.args.betas=[2,3]', "optimizer adamw, got {'betas': [2, 3]}"),
        ('one_epoch', 'run.init_from=TEXT', 'expected a whole file of weights, got TEXT'),
        ('one_epoch', 'run.init_from=WEIGHTS', 'got WEIGHTS with model; aft-vision transfer-deit converts'),
        ('one_epoch', 'run.resume=/nowhere', 'got /nowhere, which does not exist'),
        ('one_epoch', 'run.device=tpu9', "got 'tpu9'"),
        ('one_epoch', '--epochs 3', 'unrecognized arguments: --epochs;'),
        ('one_epoch', '--eval', 'expected weights to evaluate'),
        ('one_epoch', '--eval model.pretrained=true data.dir=UNDIVIDED', 'got only shoes; data.val_share=0.1'),
        ('pixel', 'data.dir=/nowhere', 'expected CIFAR10 in /nowhere'),
        ('pixel', 'data.dir=TEXT', 'got TEXT'),
        ('pixel', 'model.name=resnet18', "command line: model.name = 'resnet18'"),
        ('char', 'data.file=/nowhere', 'got /nowhere'),
        ('char', 'data.file=FOLDER', 'got FOLDER'),
        ('../small/recall', 'data.pairs=17', 'command line: expected data.pairs to be at most 4,'),
        ('fastformer', 'data.path=/nowhere.csv', '/nowhere.csv'),
        ('fastformer', 'task=foo', "command line: task = 'foo' is not a task"),
        ('fastformer', 'model.hidden_act=foo', "command line: model.hidden_act = 'foo'"),
        ('fastformer', 'model.num_attention_heads=3', 'command line: model: hidden_size must be a multiple of'),
        ('fastformer', 'run.init_from=/nowhere', 'got /nowhere'),
    ],
)
def test_a_wrong_value_is_one_line(tmp_path, capsys, config, arguments, said):
    places = {'FOLDER': tmp_path / 'folder', 'TEXT': tmp_path / 'text', 'UNDIVIDED': tmp_path / 'images'}
    places['FOLDER'].mkdir()
    (places['UNDIVIDED'] / 'shoes').mkdir(parents=True)
    places['TEXT'].write_text('text')
    places['WEIGHTS'] = tmp_path / 'weights.pth'
    torch.save({'model': {'cls_token': torch.zeros(1, 1, 8)}}, places['WEIGHTS'])
    for name, place in places.items():
        arguments, said = arguments.replace(name, str(place)), said.replace(name, str(place))
    file = ROOT / 'configs' / 'smoke' / f'{config}.yaml'
    first = [f'data.dir={CLOTHING}', 'run.throughput_batches=0'] if config == 'one_epoch' else []
    run = ['--quiet', '--config', str(file), *first, f'run.dir={tmp_path / "run"}', *arguments.split()]
    assert said in line_of(capsys, MAINS[config], run)
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    ('rows', 'arguments', 'said'),
    [
        (120, 'data.label_column=title', 'got 120 rows with 120 labels, each once, so they are no classes; '),
        (120, 'data.test_share=0.001', "the split 'test' to hold out at least one row, got 0.001 of 120 rows; "),
        (120, 'data.max_texts=5', "the split 'test' to hold out at least one row, got 0.1 of 5 rows; "),
        (3, 'data.split_seed=1', "the split 'test' to hold out at least one row, got 0.1 of 3 rows; "),
        (120, 'data.label_column=stars', 'text, stars, got title, text, label'),
        (120, 'data.text_columns=body', "data.text_columns = 'body': expected a list, such as [body]"),
    ],
)
def test_a_table_that_cannot_be_divided_is_one_line(tmp_path, capsys, rows, arguments, said):
    table = tmp_path / 'table.csv'
    table.write_text('title,text,label\n' + ''.join(f't{row},a b,{"xy"[row % 2]}\n' for row in range(rows)))
    config = ROOT / 'configs' / 'smoke' / 'fastformer.yaml'
    run = ['--quiet', '--config', str(config), f'data.path={table}', f'run.dir={tmp_path / "run"}', arguments]
    assert said in line_of(capsys, train.fastformer.__main__.main, run)


def test_a_group_that_cannot_be_joined_is_one_line(tmp_path, capsys, monkeypatch):
    arguments = ['--config', str(ROOT / 'configs' / 'smoke' / 'one_epoch.yaml'), f'run.dir={tmp_path / "run"}']
    # The port of the first process is taken.
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = str(server.getsockname()[1])
        group = {'RANK': '0', 'LOCAL_RANK': '0', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port}
        for name, value in group.items():
            monkeypatch.setenv(name, value)
        line = line_of(capsys, train.imagenet.main, [*arguments, 'run.device=cpu'])
    assert f'could not join the group of 2 processes at 127.0.0.1:{port}: ' in line
    assert 'EADDRINUSE' in line


@pytest.mark.parametrize('main', [*MAINS.values(), train.throughput.main])
@pytest.mark.parametrize('config', ['none.yaml', 'folder', 'binary'])
def test_a_config_that_cannot_be_read_is_one_line(tmp_path, capsys, main, config):
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'binary').write_bytes(bytes(range(128, 256)))
    assert str(tmp_path / config) in line_of(capsys, main, ['--config', str(tmp_path / config)])


WARMUPS = [
    (CharConfig, 'char/enwik8_100e', ['schedule.max_updates=100'], 20),
    (CharConfig, 'char/enwik8_100e', ['schedule.max_updates=1'], 1),
    (CharConfig, 'smoke/char', ['schedule.max_updates=4'], 4),
    (PixelConfig, 'pixel/cifar10_200e', ['schedule.max_updates=100'], 20),
    (TextConfig, 'fastformer/small_bbc', ['schedule.max_updates=10'], 2),
    (TextConfig, 'fastformer/small_bbc', ['schedule.max_updates=100'], 100),
]


def load(schema, path, overrides):
    file = ROOT / 'configs' / f'{path}.yaml'
    return load_text_config(file, overrides) if schema is TextConfig else load_config(file, overrides, schema)


@pytest.mark.parametrize(('schema', 'path', 'tweaks', 'warmup'), WARMUPS)
def test_a_warm_up_of_a_file_is_shortened_to_fit_the_updates_and_said(capsys, schema, path, tweaks, warmup):
    before = load(schema, path, []).schedule.warmup_updates
    assert load(schema, path, tweaks).schedule.warmup_updates == warmup
    said = capsys.readouterr().err
    assert said.startswith(f'note: schedule.warmup_updates = {warmup} in place of {before}, ') == (warmup != before)
    assert said.count('\n') == (warmup != before)


@pytest.mark.parametrize(('schema', 'path'), [(CharConfig, 'smoke/char'), (TextConfig, 'fastformer/small_bbc')])
def test_a_warm_up_longer_than_the_updates_given_with_it_is_refused(schema, path):
    with pytest.raises(
        ValueError, match=r'^command line: expected schedule\.warmup_updates to be at most schedule\.max_u'
    ):
        load(schema, path, ['schedule.max_updates=10', 'schedule.warmup_updates=1000'])


TWEAKS = [
    ('imagenet/aft_conv_small_k11_h384', 'data.batch_size=1', 'set data.batch_size=2, or augment.mix_prob=0'),
    ('imagenet/aft_conv_small_k11_h384', 'data.batch_size=2', ''),
    ('imagenet/aft_conv_small_k11_h384', 'schedule.epochs=1', ''),
    ('imagenet/aft_conv_small_k11_h384', 'model.name=resnet10t', ''),
    ('imagenet/deit_300e', 'model.name=aft_full_tiny data.img_size=32', ''),
    ('imagenet/deit_300e', 'model.name=aft_full_tiny data.img_size=50', 'expected an image size of multiples'),
    ('imagenet/recipes/ffcv_88e', 'data.img_size=64', ''),
    ('imagenet/recipes/plain_90e', 'schedule.epochs=5', ''),
    ('imagenet/recipes/deit_finetune_384', 'data.batch_size=32', ''),
    ('small/cifar10', 'model.name=deit_tiny_patch16_224 model.num_heads=4', ''),
    ('smoke/clothing_demo', 'model.name=efficientnet_b0', ''),
    ('smoke/deit_recipe', 'data.batch_size=7', 'set data.batch_size=8, or augment.mix_prob=0'),
]


@pytest.mark.parametrize(('path', 'tweak', 'advice'), TWEAKS)
def test_a_first_tweak_works_or_the_error_says_what_to_set(path, tweak, advice):
    def build() -> None:
        shallow = [] if tweak.startswith('model.name') else ['model.depth=1']
        config = load_config(ROOT / 'configs' / f'{path}.yaml', [*tweak.split(), *shallow])
        name, kwargs = model_arguments(config, num_classes=10)
        with torch.device('meta'):
            model = build_model(name, **{key: value for key, value in kwargs.items() if key not in WEIGHT_KEYS})
        check_image_sizes(model, config)

    if not advice:
        return build()
    with pytest.raises(ValueError, match=re.escape(advice)):
        build()
