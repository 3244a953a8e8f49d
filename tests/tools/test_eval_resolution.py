import ctypes
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import timm
import torch
from helpers import generator, link_photographs, make_folder, save_model
from PIL import Image
from timm.data import ImageNetInfo

from aft_vision.data import NativeShape, Preprocessing, create_eval_loader
from aft_vision.evaluate import evaluate
from aft_vision.models.checkpoint import load_model
from tools import eval_resolution
from tools.arguments import parse_sizes
from tools.eval_resolution import main, parse_args

pytestmark = pytest.mark.usefixtures('coarse_pictures')
TINY = dict(depth=1, embed_dim=16, patch_size=16)
AFT = dict(num_heads=4, kernel_size=3)


def make_checkpoint(path: Path, name: str, **kwargs: object) -> Path:
    kwargs = {**TINY, **kwargs}
    return save_model(path, name, timm.create_model(name, **kwargs), kwargs)


@pytest.fixture(scope='module')
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, float]]]:
    """The tool on two photographs of each of ten classes."""
    data = link_photographs(tmp_path_factory.mktemp('photographs'), 0, 2)
    return lambda checkpoint, *sizes: main(
        ['--checkpoint', str(checkpoint), '--data', str(data), '--workers', '0', '--overwrite', '--sizes', *sizes]
    )


def test_each_size_gives_a_row_in_ascending_order(run, tmp_path, capsys):
    rows = run(make_checkpoint(tmp_path / 'best.pth', 'aft_conv_tiny', num_classes=10, **AFT), '48x32', '32')
    assert [(row['height'], row['width'], row['samples']) for row in rows] == [(32, 32, 20), (48, 32, 20)]
    result = json.loads((tmp_path / 'eval_resolution.json').read_text())
    assert result['sizes'] == rows
    assert (tmp_path / 'eval_resolution.png').stat().st_size > 1000
    assert '48x32' in capsys.readouterr().out


def test_without_sizes_a_model_is_evaluated_at_that_of_training(tmp_path):
    data = link_photographs(tmp_path / 'photographs', 0, 1, classes=2)
    model = timm.create_model('aft_conv_tiny', num_classes=2, **TINY, **AFT)
    save_model(
        tmp_path / 'best.pth',
        'aft_conv_tiny',
        model,
        TINY | AFT | {'num_classes': 2},
        data_config={'input_size': (3, 32, 48)},
    )
    (row,) = main(['--checkpoint', str(tmp_path), '--data', str(data), '--workers', '0'])
    assert (row['height'], row['width']) == (32, 48)


def test_an_argument_of_the_model_can_replace_that_of_training(run, tmp_path):
    checkpoint = make_checkpoint(tmp_path / 'best.pth', 'aft_axial_tiny', num_heads=4, window_size=2, num_classes=10)
    # Flat biases would be the same when they are stretched.
    content = torch.load(checkpoint, weights_only=True)
    content['state_dict'] = {
        name: torch.randn(x.shape, generator=generator(1)) for name, x in content['state_dict'].items()
    }
    torch.save(content, checkpoint)
    model = load_model(checkpoint, resample_bias=True)
    images = torch.randn(1, 3, 64, 64, generator=generator())
    assert torch.equal(model(images[..., :32, :32]), load_model(checkpoint)(images[..., :32, :32]))
    assert not torch.allclose(model(images), load_model(checkpoint)(images))
    run(checkpoint, '64', '--model-arg', 'resample_bias=True')
    assert json.loads((tmp_path / 'eval_resolution.json').read_text())['model_args'] == {'resample_bias': True}
    with pytest.raises(ValueError, match='expected a model that can be built'):
        run(checkpoint, '64', '--model-arg', 'resampled_bias=True')


def test_each_size_has_a_peak_memory_of_its_own(run, tmp_path):
    # Memory that was used and freed would serve either size without a new peak.
    trim = ctypes.CDLL(None).malloc_trim
    trim(0)
    checkpoint = make_checkpoint(tmp_path / 'best.pth', 'aft_conv_tiny', num_heads=4, kernel_size=3, num_classes=10)
    small, large = run(checkpoint, '16', '512')
    assert 50 < small['peak_memory_mb'] < large['peak_memory_mb']
    trim(0)
    assert run(checkpoint, '16')[0]['peak_memory_mb'] < large['peak_memory_mb']


def test_a_chosen_split_of_another_layout_is_accepted(tmp_path, caplog):
    checkpoint = make_checkpoint(tmp_path / 'best.pth', 'aft_conv_tiny', num_heads=4, kernel_size=3, num_classes=2)
    with tarfile.open(tmp_path / 'all.tar', 'w') as file:
        file.add(make_folder(tmp_path / 'images', {'extra': ['a', 'b']}), arcname='set')
    (tmp_path / 'images' / 'extra' / 'a' / '0.png').write_text('damaged')
    arguments = ['--checkpoint', str(checkpoint), '--workers', '0', '--sizes', '32', '--split', 'extra', '--overwrite']
    (row,) = main([*arguments, '--data', str(tmp_path / 'all.tar')])
    assert row['samples'] == 4
    rows = main([*arguments, '--data', str(tmp_path / 'images'), '--sizes', '32', '48'])
    assert [row['samples'] for row in rows] == [3, 3]
    assert caplog.text.count('a/0.png') == 1


def test_the_crop_is_that_of_the_training_unless_told(run, tmp_path, monkeypatch):
    used = []
    monkeypatch.setattr(
        'tools.data.create_eval_loader', lambda *a, **k: used.append(a[1].crop_pct) or create_eval_loader(*a, **k)
    )
    checkpoint = make_checkpoint(tmp_path / 'best.pth', 'aft_conv_tiny', num_classes=10, **AFT)
    torch.save({**torch.load(checkpoint, weights_only=True), 'data_config': {'crop_pct': 0.7}}, checkpoint)
    run(checkpoint, '32')
    run(checkpoint, '32', '--crop-pct', '1')
    assert used == [0.7, 1.0]


def test_a_model_of_timm_with_weights_is_evaluated_by_its_name(tmp_path):
    # Numbers as class names are those of any model.
    data = make_folder(tmp_path / 'data', {'val': [str(index) for index in range(10)]}, 1)
    arguments = ['--checkpoint', 'aft_conv_nano', '--data', str(data), '--workers', '0', '--sizes', '32']
    (row,) = main([*arguments, '--out', str(tmp_path)])
    assert 0 <= row['top1'] <= row['top5'] <= 100
    assert json.loads((tmp_path / 'eval_resolution.json').read_text())['checkpoint'] == 'aft_conv_nano'


@pytest.mark.parametrize(
    ('words', 'kind'),
    [
        ('0 -3 1x2x3 big 3x 1.5', 'size'),
        ('192:288 288:192:16 192:288:0 a:b:c 1:2:3:4 32x32:64x64:16', 'range of sizes'),
    ],
)
def test_a_wrong_size_is_rejected(run, words, kind, tmp_path, capsys):
    for text in words.split():
        with pytest.raises(SystemExit):
            run(tmp_path, text)
        assert kind in capsys.readouterr().err


@pytest.mark.parametrize(
    ('text', 'sides'), [('192:288:32', [192, 224, 256, 288]), ('16:40:16', [16, 32]), ('32:32:8', [32]), ('48', [48])]
)
def test_a_range_of_sizes_includes_its_end(text, sides):
    assert parse_sizes(text) == [(side, side) for side in sides]


def test_ranges_sides_and_rectangles_are_mixed_without_repetition():
    args = parse_args('--checkpoint a --data b --sizes 32:64:16 48 32X48 64 32x48'.split())
    assert args.sizes == [(32, 32), (32, 48), (48, 48), (64, 64)]


def make_noise(root: Path) -> Path:
    """Two classes of two images in which left and right, and sizes, differ."""
    for index in range(4):
        path = root / 'val' / 'ab'[index % 2] / f'{index}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(256, (60, 80, 3), generator=generator(index), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(path)
    return root


def run_on(data: Path, checkpoints: Sequence[Path], *arguments: str) -> list[dict[str, float]]:
    paths = map(str, checkpoints)
    return main(['--checkpoint', *paths, '--data', str(data), '--workers', '0', '--overwrite', '--sizes', *arguments])


@pytest.mark.parametrize(
    ('name', 'kwargs'),
    [('aft_conv_tiny', AFT), ('vit_tiny_patch16_224', dict(num_heads=1, img_size=32, dynamic_img_size=True))],
)
def test_sizes_that_no_patches_fill_are_padded_if_asked_and_rejected_first_if_not(tmp_path, capsys, name, kwargs):
    path = make_checkpoint(tmp_path / 'best.pth', name, num_classes=2, **kwargs)
    data = make_noise(tmp_path)
    with pytest.raises(ValueError, match=r'multiples of the patch size \(16, 16\), got \(40, 40\)'):
        run_on(data, [path], '32', '40')
    assert 'top-1' not in capsys.readouterr().out
    rows = run_on(data, [path], '32', '40', '--model-arg', 'dynamic_img_pad=True')
    assert [(row['height'], row['samples']) for row in rows] == [(32, 4), (40, 4)]


def test_several_checkpoints_make_a_grid_of_training_and_test_sizes(tmp_path, capsys):
    paths = []
    for name in ('small', 'large'):
        (tmp_path / name).mkdir()
        path = make_checkpoint(tmp_path / name / 'best.pth', 'aft_conv_tiny', num_classes=2, **AFT)
        content = torch.load(path, weights_only=True)
        # One has the config of its run, whose evaluation may have had another size.
        size_of_run = {'config': {'data': {'img_size': (32, 32)}}} if name == 'small' else {}
        size = 64 if name == 'small' else 48
        torch.save({**content, **size_of_run, 'data_config': {'input_size': (3, size, size)}}, path)
        paths.append(path)
    data = make_noise(tmp_path)
    rows = run_on(data, paths, '32:48:16', '--out', str(tmp_path / 'out'))
    assert [(row['checkpoint'], row['height']) for row in rows] == [
        ('small', 32),
        ('small', 48),
        ('large', 32),
        ('large', 48),
    ]
    result = json.loads((tmp_path / 'out' / 'eval_resolution_grid.json').read_text())
    assert [table['train_size'] for table in result['checkpoints']] == [[32, 32], [48, 48]]
    assert [table['checkpoint'] for table in result['checkpoints']] == list(map(str, paths))
    assert [row for table in result['checkpoints'] for row in table['sizes']] == [
        {key: value for key, value in row.items() if key != 'checkpoint'} for row in rows
    ]
    # A row of the grid is what its checkpoint gives alone.
    (alone,) = run_on(data, paths[1:], '48')
    assert alone['loss'] == pytest.approx(rows[3]['loss'], rel=1e-6)


def test_native_shapes_are_evaluated_next_to_the_squares_of_as_many_tokens(tmp_path, capsys):
    data = link_photographs(tmp_path / 'photographs', 0, 2)
    path = make_checkpoint(tmp_path / 'best.pth', 'aft_conv_tiny', num_classes=10, **AFT)
    arguments = ['--data', str(data), '--workers', '0', '--native', '--max-tokens', '10', '5']
    rows = main(['--checkpoint', str(path), *arguments, '--sizes', '64'])
    sizes = [(row.get('height'), row.get('max_tokens')) for row in rows]
    assert sizes == [(32, None), (48, None), (64, None), (None, 5), (None, 10)]
    model = load_model(path)
    for row, size in zip(
        rows[1:], [(48, 48), (64, 64), *(NativeShape(count, (16, 16)) for count in (5, 10))], strict=True
    ):
        expected = evaluate(model, create_eval_loader(data, Preprocessing(size), 64, num_workers=0)[0])
        assert row['loss'] == pytest.approx(expected['loss'], rel=1e-6)
        assert (row['top1'], row['samples']) == (expected['top1'], 20)
    assert 'native 10' in capsys.readouterr().out
    assert json.loads((tmp_path / 'eval_resolution.json').read_text())['sizes'] == rows
    other = make_checkpoint(tmp_path / 'other.pth', 'aft_conv_tiny', num_classes=10, **AFT)
    grid = main(['--checkpoint', str(path), str(other), *arguments, '--out', str(tmp_path)])
    assert [row.get('height') for row in grid] == [32, 48, None, None] * 2


def test_each_patch_size_has_the_squares_of_its_own_native_shapes(tmp_path):
    data = link_photographs(tmp_path / 'photographs', 0, 1)
    paths = [
        make_checkpoint(tmp_path / f'{patch}.pth', 'aft_conv_tiny', num_classes=10, patch_size=patch, **AFT)
        for patch in (16, 12)
    ]
    arguments = ['--data', str(data), '--workers', '0', '--native', '--max-tokens', '9', '--out', str(tmp_path)]
    rows = main(['--checkpoint', *map(str, paths), *arguments])
    # Sides of three patches: 36 is no multiple of 16.
    assert [row.get('height') for row in rows] == [48, None, 36, None]


def test_the_table_has_the_standard_error_of_top_1(run, tmp_path, capsys):
    checkpoint = make_checkpoint(tmp_path / 'best.pth', 'aft_conv_tiny', num_classes=10, **AFT)
    (row,) = run(checkpoint, '32')
    header, line = (line.split() for line in capsys.readouterr().out.splitlines()[:2])
    assert header[1:4] == ['top-1', '%', '+-']
    error = 100 * ((row['top1'] / 100) * (1 - row['top1'] / 100) / 20) ** 0.5
    assert [float(number) for number in line[1:3]] == [row['top1'], pytest.approx(error, abs=0.005)]


@pytest.mark.parametrize('several', [False, True])
def test_an_earlier_table_is_replaced_only_on_request(tmp_path, several):
    kwargs, data = dict(depth=1, embed_dim=8, num_heads=4, num_classes=2), make_noise(tmp_path)
    model = timm.create_model('aft_conv_nano', **kwargs)
    paths = [save_model(tmp_path / f'{name}.pth', 'aft_conv_nano', model, kwargs) for name in 'ab'[: 1 + several]]
    table = tmp_path / ('eval_resolution_grid.json' if several else 'eval_resolution.json')
    table.write_text('{}')
    with pytest.raises(FileExistsError, match=r'eval_resolution.*\.json, which exist; give --overwrite'):
        main(['--checkpoint', *map(str, paths), '--data', str(data), '--sizes', '32'])
    assert table.read_text() == '{}'
    rows = run_on(data, paths, '32')
    assert len(rows) == len(paths)
    assert table.read_text() != '{}'


def test_an_error_leaves_the_rows_that_were_measured_and_the_earlier_table(tmp_path, monkeypatch):
    kwargs, data = dict(depth=1, embed_dim=8, num_heads=4, num_classes=2), make_noise(tmp_path)
    path = save_model(tmp_path / 'a.pth', 'aft_conv_nano', timm.create_model('aft_conv_nano', **kwargs), kwargs)
    rows, original = run_on(data, [path], '32'), eval_resolution.evaluate_at
    earlier = (tmp_path / 'eval_resolution.json').read_text()

    def evaluate_at(model, view, *args):
        if view == (64, 64):
            raise torch.OutOfMemoryError
        return original(model, view, *args)

    with monkeypatch.context() as patch:
        patch.setattr(eval_resolution, 'evaluate_at', evaluate_at)
        with pytest.raises(torch.OutOfMemoryError):
            run_on(data, [path], '32', '64')
    part = tmp_path / 'eval_resolution.json.part'
    (table,) = json.loads(part.read_text())['checkpoints']
    assert [row['top1'] for row in table['sizes']] == [rows[0]['top1']]
    assert (tmp_path / 'eval_resolution.json').read_text() == earlier
    run_on(data, [path], '32')
    assert not part.exists()


def save_named(path: Path, names: Sequence[str], best: str) -> Path:
    """A model that takes every image for this class."""
    kwargs = dict(depth=1, embed_dim=8, num_heads=4, num_classes=len(names))
    model = timm.create_model('aft_conv_nano', **kwargs)
    with torch.no_grad():
        torch.nn.init.zeros_(model.head.weight)
        model.head.bias.copy_(torch.linspace(1, 0, len(names)))
        model.head.bias[list(names).index(best)] = 2
    return save_model(path, 'aft_conv_nano', model, kwargs, class_names=list(names))


def test_class_folders_without_splits_are_evaluated_as_a_whole(tmp_path, capsys):
    make_folder(tmp_path / 'data', {'.': ['a', 'b', 'c']}, images=2)
    path = save_named(tmp_path / 'best.pth', 'abc', 'b')
    rows = run_on(tmp_path / 'data', [path], '32', '64')
    assert [(row['samples'], row['top1']) for row in rows] == [(6, pytest.approx(100 / 3))] * 2
    assert capsys.readouterr().err.count('has no splits: all of it is evaluated') == 1
    with tarfile.open(tmp_path / 'data.tar', 'w') as file:
        file.add(tmp_path / 'data', arcname='data')
    (row,) = run_on(tmp_path / 'data.tar', [path], '32')
    assert row['samples'] == 6


@pytest.mark.parametrize('splits', [{'train': ['a', 'b']}, {'train': ['a', 'b'], 'more': ['a', 'b']}])
def test_training_images_are_not_evaluated_as_a_whole(tmp_path, splits):
    make_folder(tmp_path / 'data', splits)
    path = save_named(tmp_path / 'best.pth', 'ab', 'b')
    with pytest.raises(ValueError, match='--val-share'):
        run_on(tmp_path / 'data', [path], '32')
    with pytest.raises(ValueError, match='without splits'):
        run_on(tmp_path / 'data', [path], '32', '--split', '.')


def test_some_synsets_of_the_model_are_compared_among_themselves(tmp_path, capsys):
    names = ImageNetInfo().label_names()
    # As in ImageNet-A: the best of all classes is none of these, the first one is the best of them.
    make_folder(tmp_path / 'data', {'.': names[6:9]})
    path = save_named(tmp_path / 'best.pth', names, names[500])
    (row,) = run_on(tmp_path / 'data', [path], '32')
    assert (row['samples'], row['top1']) == (6, pytest.approx(100 / 3))
    assert 'has 3 of the 1000 classes of the model' in capsys.readouterr().err


def test_the_labels_of_real_are_those_of_the_images_by_their_names(tmp_path):
    names = ImageNetInfo().label_names()
    # Whatever the folders say.
    for number, label in ((1, 9), (2, 1), (3, 2), (4, 3)):
        (tmp_path / 'data' / names[label]).mkdir(parents=True)
        Image.new('RGB', (40, 30)).save(tmp_path / 'data' / names[label] / f'ILSVRC2012_val_{number:08}.JPEG')
    path, real = save_named(tmp_path / 'best.pth', names, names[500]), tmp_path / 'real.json'
    # The third image has no label; the likeliest classes are 500, 0, 1, 2, 3.
    real.write_text(json.dumps([[7, 500], [3, 9], [], [8], []]))
    (row,) = run_on(tmp_path / 'data', [path], '32', '--real-labels', str(real))
    assert (row['samples'], row['top1'], row['top5']) == (3, pytest.approx(100 / 3), pytest.approx(200 / 3))


@pytest.mark.parametrize(
    ('name', 'labels', 'message'),
    [
        ('ILSVRC2012_val_00000003.JPEG', '[[1], [2]]', 'the labels of 3 images in .*real.json, got 2'),
        ('cat.jpg', '[[1]]', 'images named ILSVRC2012_val_NUMBER for --real-labels, got .*cat.jpg'),
        ('ILSVRC2012_val_00000001.JPEG', '[[1000]]', 'a list of the labels of each image'),
        ('ILSVRC2012_val_00000001.JPEG', '[[1]', 'a list of labels in .*real.json, got'),
    ],
)
def test_what_is_wrong_with_the_labels_of_real_is_named(tmp_path, name, labels, message):
    names = ImageNetInfo().label_names()
    (tmp_path / 'data' / names[0]).mkdir(parents=True)
    Image.new('RGB', (40, 30)).save(tmp_path / 'data' / names[0] / name)
    (tmp_path / 'real.json').write_text(labels)
    path = save_named(tmp_path / 'best.pth', names, names[500])
    with pytest.raises(ValueError, match=message):
        run_on(tmp_path / 'data', [path], '32', '--real-labels', str(tmp_path / 'real.json'))
