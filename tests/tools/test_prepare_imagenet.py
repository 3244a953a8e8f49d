import csv
import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets.imagenet import ARCHIVE_META

from aft_vision.data import Source
from aft_vision.data.datasets import open_eval_split, open_train_split
from tools.prepare_imagenet import main

scipy_io = pytest.importorskip('scipy.io')

CLASSES = ['n01440764', 'n01443537', 'n01484850']
# The class of each validation image, in the order of their names.
OF_VALIDATION = [2, 0, 1, 0, 2, 1]
DEVKIT, TRAIN, VAL = (ARCHIVE_META[name][0] for name in ('devkit', 'train', 'val'))
VALIDATION_NAMES = [f'ILSVRC2012_val_{number:08d}' for number in range(1, 7)]


def picture(value: int) -> bytes:
    content = io.BytesIO()
    Image.new('RGB', (4, 4), (value,) * 3).save(content, 'jpeg')
    return content.getvalue()


def write_tar(path: Path, members: dict[str, bytes], mode: str = 'w') -> bytes:
    with tarfile.open(path, mode) as file:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path.read_bytes()


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Archives of the published form: 3 classes of 4, 5 and 6 images, and 6 validation images."""
    folder = tmp_path / 'archives'
    folder.mkdir()
    fields = [*'abcdefgh']
    # One inner node of WordNet, which is no class.
    nodes = [
        *((2 - i, name, f'fish {i}', '', 0, 0, 0, 9) for i, name in enumerate(CLASSES[::-1])),
        *[(9, 'n0', 'x', '', 3, 0, 1, 0)],
    ]
    nodes = [(number + 1, *rest) for number, *rest in nodes]
    synsets = np.array(nodes, dtype=[(name, object) for name in fields])
    meta = io.BytesIO()
    scipy_io.savemat(meta, {'synsets': synsets})
    truth = ''.join(f'{index + 1}\n' for index in OF_VALIDATION).encode()
    top = 'ILSVRC2012_devkit_t12/data'
    kit = {f'{top}/meta.mat': meta.getvalue(), f'{top}/ILSVRC2012_validation_ground_truth.txt': truth}
    write_tar(folder / DEVKIT, kit, 'w:gz')
    inner = {}
    for index, name in enumerate(CLASSES):
        images = {f'{name}_{number}.JPEG': picture(20 * index) for number in range(4 + index)}
        inner[f'{name}.tar'] = write_tar(tmp_path / 'inner.tar', images)
    write_tar(folder / TRAIN, inner)
    order = np.random.default_rng(0).permutation(6)
    write_tar(folder / VAL, {f'{VALIDATION_NAMES[i]}.JPEG': picture(20 * OF_VALIDATION[i]) for i in order})
    for kind, (name, _) in ARCHIVE_META.items():
        monkeypatch.setitem(ARCHIVE_META, kind, (name, hashlib.md5((folder / name).read_bytes()).hexdigest()))
    return folder


def run(archives: Path, out: Path) -> None:
    main(['--archives', str(archives), '--out', str(out)])


def check_labels(out: Path) -> None:
    """Each image has the grey value of its class."""
    source = Source(dir=str(out))
    for split, count in ((open_train_split(source), 15), (open_eval_split(source), 6)):
        assert split.class_names == CLASSES
        assert len(split.dataset) == count
        for image, target in map(split.dataset.__getitem__, range(count)):
            assert abs(np.asarray(image).astype(int) - 20 * target).max() <= 2


def test_archives_become_class_folders(archives, tmp_path, capsys):
    run(archives, tmp_path / 'out')
    check_labels(tmp_path / 'out')
    shown = capsys.readouterr().out
    assert 'train: 15 images, 3 classes' in shown
    assert 'val: 6 images, 3 classes' in shown


def test_an_interrupted_run_is_made_whole(archives, tmp_path):
    out = tmp_path / 'out'
    run(archives, out)
    cut = out / 'train' / CLASSES[0] / f'{CLASSES[0]}_1.JPEG'
    cut.write_bytes(cut.read_bytes()[:100])
    for path in (*(out / 'train' / CLASSES[2]).iterdir(), *(out / 'val').glob('*/*1.JPEG')):
        path.unlink()
    next((out / 'val').glob('*/*2.JPEG')).rename(out / 'val' / f'{VALIDATION_NAMES[1]}.JPEG')
    run(archives, out)
    check_labels(out)


@pytest.mark.parametrize('name', [TRAIN, VAL, DEVKIT])
def test_another_archive_than_the_published_one_is_an_error(archives, tmp_path, name):
    (archives / name).write_bytes((archives / name).read_bytes()[:-700])
    with pytest.raises(ValueError, match=rf'{name} as published'):
        run(archives, tmp_path / 'out')


def test_a_thousand_classes_have_the_published_number_of_images(tmp_path):
    (tmp_path / 'val').mkdir()
    for number in range(1000):
        (tmp_path / 'val' / f'{number}.JPEG').write_bytes(b'an image')
    rows = ''.join(f'{number},n{number:08d} 1 2 3 4\n' for number in range(1000))
    (tmp_path / 'solution.csv').write_text(f'ImageId,PredictionString\n{rows}')
    with pytest.raises(ValueError, match=r'expected 50000 images in .*val, as published, got 1000'):
        main(['--solution', str(tmp_path / 'solution.csv'), '--out', str(tmp_path)])
    with pytest.raises(ValueError, match=r'expected the folder val .* in --out .*other, got none'):
        main(['--solution', str(tmp_path / 'solution.csv'), '--out', str(tmp_path / 'other')])


def test_a_folder_without_archives_is_an_error(archives, tmp_path):
    (archives / TRAIN).unlink()
    (archives / VAL).unlink()
    with pytest.raises(ValueError, match=r'expected .*train\.tar or .*val\.tar in .*, got none'):
        run(archives, tmp_path / 'out')


@pytest.mark.parametrize('labels', ['solution', 'devkit'])
def test_a_flat_validation_folder_is_sorted_where_it_stopped(archives, tmp_path, labels):
    out = tmp_path / 'out'
    run(archives, out)
    for path in list((out / 'val').glob('*/*')):
        if not path.stem.endswith('3'):
            path.rename(out / 'val' / path.name)
    arguments = ['--archives', str(archives)]
    (archives / VAL).unlink()
    if labels == 'solution':
        arguments = ['--solution', str(tmp_path / 'LOC_val_solution.csv')]
        rows = [(name, f'{CLASSES[i]} 1 2 3 4 ') for name, i in zip(VALIDATION_NAMES, OF_VALIDATION, strict=True)]
        with (tmp_path / 'LOC_val_solution.csv').open('w', newline='') as file:
            csv.writer(file).writerows([('ImageId', 'PredictionString'), *reversed(rows)])
    main([*arguments, '--out', str(out)])
    check_labels(out)
    next((out / 'val').glob('*/*1.JPEG')).unlink()
    with pytest.raises(ValueError, match=r'expected 6 validation images in .*val, as have a class, got 5'):
        main([*arguments, '--out', str(out)])


def test_the_validation_images_of_tiny_imagenet_are_sorted(tmp_path):
    for name in CLASSES:
        (tmp_path / 'train' / name / 'images').mkdir(parents=True)
        (tmp_path / 'train' / name / 'images' / f'{name}_0.JPEG').write_bytes(picture(0))
    (tmp_path / 'val' / 'images').mkdir(parents=True)
    for number, index in enumerate(OF_VALIDATION):
        (tmp_path / 'val' / 'images' / f'val_{number}.JPEG').write_bytes(picture(20 * index))
    annotations = tmp_path / 'val' / 'val_annotations.txt'
    lines = [f'val_{number}.JPEG\t{CLASSES[index]}\t0\t32\t44\t62\n' for number, index in enumerate(OF_VALIDATION)]
    annotations.write_text(''.join(lines))
    for _ in range(2):
        main(['--solution', str(annotations), '--out', str(tmp_path)])
    split = open_eval_split(Source(dir=str(tmp_path)))
    assert split.class_names == open_train_split(Source(dir=str(tmp_path))).class_names == CLASSES
    assert [np.asarray(image).mean().round() // 20 for image, _ in map(split.dataset.__getitem__, range(6))] == [
        target for _, target in map(split.dataset.__getitem__, range(6))
    ]
    annotations.write_text('val_0.JPEG,n01440764\n')
    with pytest.raises(ValueError, match=r'expected lines of an image, its class and its box in .*, got others'):
        main(['--solution', str(annotations), '--out', str(tmp_path)])
