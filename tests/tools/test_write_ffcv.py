import sys

import pytest
from helpers import make_folder, pretend_terminal, require_ffcv

require_ffcv()

from aft_vision.data.ffcv.loader import BetonDataset
from tools.write_ffcv import main

pytestmark = pytest.mark.ffcv


def test_each_split_becomes_a_file_with_its_class_names(tmp_path, capsys, monkeypatch):
    pretend_terminal(monkeypatch)
    folder = make_folder(tmp_path / 'images', {'train': ['a', 'b'], 'val': ['a', 'b']}, images=3)
    out = tmp_path / 'out'
    main(['--data', str(folder), '--out', str(out), '--raw-share', '1', '--max-resolution', '20', '--workers', '0'])
    for split in ('train', 'val'):
        dataset = BetonDataset(out / f'{split}.beton')
        assert dataset.class_names == ['a', 'b']
        assert dataset.labels.tolist() == [0, 0, 0, 1, 1, 1]
        assert dataset[5][0].shape == (15, 20, 3)
        assert (dataset[5][0] == 20).all()
    shown = capsys.readouterr()
    assert f'{out / "train.beton"}: 6 images' in shown.out
    assert 'train.beton: 100%' in shown.err


def test_a_file_that_is_there_is_kept_unless_it_is_to_be_replaced(tmp_path):
    folder = make_folder(tmp_path / 'images', {'val': ['a']})
    arguments = ['--data', str(folder), '--out', str(tmp_path), '--splits', 'val', '--workers', '0', '--quiet']
    main(arguments)
    with pytest.raises(FileExistsError, match=r'got .*val\.beton, .*val\.json, which exist; give --overwrite'):
        main(arguments)
    main([*arguments, '--overwrite'])
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other' / 'val.json').write_text('mine')
    with pytest.raises(FileExistsError, match=r'val\.json'):
        main([*arguments, '--out', str(tmp_path / 'other')])
    assert (tmp_path / 'other' / 'val.json').read_text() == 'mine'


def test_an_image_that_cannot_be_decoded_is_named_and_counted(tmp_path, capsys, caplog):
    folder = make_folder(tmp_path / 'images', {'train': ['a', 'b'], 'val': ['a', 'b']}, images=3)
    (folder / 'train' / 'a' / '1.png').write_bytes(b'no image')
    main(['--data', str(folder), '--out', str(tmp_path), '--workers', '0', '--quiet', '--skip-corrupt'])
    assert BetonDataset(tmp_path / 'train.beton').labels.tolist() == [0, 0, 1, 1, 1]
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith('; 1 image that cannot be decoded is left out')
    assert 'left out' not in second
    assert caplog.text.count('train/a/1.png') == 1


def test_ffcv_files_are_not_written_again(tmp_path):
    folder = make_folder(tmp_path / 'images', {'val': ['a']})
    arguments = ['--splits', 'val', '--workers', '0', '--quiet']
    main(['--data', str(folder), '--out', str(tmp_path / 'out'), *arguments])
    with pytest.raises(ValueError, match='a data set of images, got FFCV files'):
        main(['--data', str(tmp_path / 'out'), '--out', str(tmp_path / 'again'), *arguments])


@pytest.mark.parametrize(
    ('more', 'error', 'message'),
    [
        (['--max-resolution', '20000'], ValueError, r'max_resolution to be in \[1, 18918\], or null, got 20000'),
        (['--num-classes', '7'], SystemExit, '2'),
        (['--name', 'wds/', '--num-classes', '0'], SystemExit, '2'),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path, more, error, message):
    folder = make_folder(tmp_path / 'images', {'val': ['a']})
    with pytest.raises(error, match=message):
        main(['--data', str(folder), '--out', str(tmp_path / 'out'), '--splits', 'val', '--workers', '0', *more])
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ([], 'expected the folder, the tar file or the name of a data set'),
        (['--name', 'torch/cifar10'], 'expected the folder of torch/cifar10'),
        (['--name', 'torch/cifar10', '--data', 'missing'], 'check its name, .* or download it'),
        (['--name', 'other/x'], 'name of a data set must begin with one of torch/'),
        (['--data', 'train_only'], '--splits names those to write'),
    ],
)
def test_errors_of_the_data_set_have_no_keys_of_a_config(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / 'train_only', {'train': ['a']})
    with pytest.raises(ValueError, match=message) as caught:
        main([*options, '--out', 'out', '--workers', '0'])
    assert 'data.' not in str(caught.value)


def test_nothing_is_written_where_a_split_is_missing_and_val_is_whatever_it_is_called(tmp_path):
    folder = make_folder(tmp_path / 'images', {'train': ['a'], 'validation': ['a']})
    arguments = ['--data', str(folder), '--out', str(tmp_path / 'out'), '--workers', '0', '--quiet']
    with pytest.raises(ValueError, match=r'extra in .*, got only train, validation'):
        main([*arguments, '--splits', 'train', 'extra'])
    assert not (tmp_path / 'out').exists()
    main(arguments)
    assert sorted(path.name for path in (tmp_path / 'out').glob('*.beton')) == ['train.beton', 'val.beton']


def test_splits_with_different_classes_are_refused_before_anything_is_written(tmp_path):
    folder = make_folder(tmp_path / 'images', {'train': ['a', 'b'], 'val': ['a', 'c']})
    with pytest.raises(ValueError, match=r"the same classes in both splits.*\['b'\].*\['c'\]"):
        main(['--data', str(folder), '--out', str(tmp_path / 'out'), '--workers', '0'])
    assert not (tmp_path / 'out').exists()


def test_a_data_set_of_torchvision_is_written(tmp_path, capsys):
    import pickle

    import numpy as np

    root = tmp_path / 'cifar' / 'cifar-10-batches-py'
    root.mkdir(parents=True)
    pixels = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    for name in (*(f'data_batch_{number}' for number in range(1, 6)), 'test_batch'):
        (root / name).write_bytes(pickle.dumps({'data': pixels, 'labels': [3, 8]}))
    (root / 'batches.meta').write_bytes(pickle.dumps({'label_names': [f'class {index}' for index in range(10)]}))
    from torchvision.datasets import CIFAR10

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CIFAR10, '_check_integrity', lambda self: True)
        patch.setattr('torchvision.datasets.cifar.check_integrity', lambda path, md5=None: True)
        main(
            [
                *('--name', 'torch/cifar10', '--data', str(tmp_path / 'cifar'), '--splits', 'train', 'test'),
                *('--out', str(tmp_path), '--raw-share', '1', '--workers', '0', '--quiet'),
            ]
        )
    dataset = BetonDataset(tmp_path / 'train.beton')
    assert len(dataset) == 10
    assert dataset.class_names[9] == 'class 9'
    image, label = dataset[1]
    assert label == 8
    np.testing.assert_array_equal(image, pixels[1].reshape(3, 32, 32).transpose(1, 2, 0))


def test_without_ffcv_the_error_says_what_to_install(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if 'ffcv' in name.split('.')]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'ffcv', None)
    make_folder(tmp_path, {'val': ['a']})
    with pytest.raises(ImportError, match=r"apt-get install libopencv-dev .* pip install 'aft-vision\[ffcv\]'"):
        main(['--data', str(tmp_path), '--out', str(tmp_path), '--splits', 'val'])
