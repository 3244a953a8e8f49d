"""Stored outputs of a teacher are the teacher's, and train a student as the teacher does."""

import copy
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from helpers import NO_AUGMENTATION, link_photographs, losses, save_model
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from aft_vision.data import CorruptImageError, Source, create_loaders
from aft_vision.data.checked import CheckedSubset, TorchvisionDataset
from aft_vision.data.datasets import open_train_split
from aft_vision.data.teacher_outputs import SKIPPED, STORED, TeacherOutputs, cut, image_names
from aft_vision.export import export_model
from train.distill import StoredTeacher, load_teacher
from train.imagenet import main as train
from train.store_teacher import main as store

ROOT = Path(__file__).parents[2]
SIZES = dict(depth=1, embed_dim=16, num_heads=4, kernel_size=3, patch_size=8)
RECIPE = f"""
base: {ROOT / 'configs' / 'imagenet' / 'deit_300e.yaml'}
model:
  {{name: aft_conv_tiny, depth: 1, embed_dim: 16, num_heads: 4, kernel_size: 3, patch_size: 8, drop_path_rate: 0.0}}
data: {{img_size: [32, 32], batch_size: 10, num_workers: 0}}
augment:
  {{scale: [0.4, 1.0], auto_augment: null, color_jitter: 0.0, repeats: 1, random_erasing: 0.0, mixup: 0.0, cutmix: 0.0}}
optim: {{lr: 5.0e-2}}
schedule: {{epochs: 2, warmup_epochs: 0, step: update}}
run: {{amp: none, compile: false, tensorboard: false, throughput_batches: 0}}
"""


@pytest.fixture(scope='module')
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four photographs of each of five kinds of clothing to train on, two to validate."""
    return link_photographs(tmp_path_factory.mktemp('photographs'), 4, 2, classes=5)


@pytest.fixture(scope='module')
def teacher_folder(photographs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of eight classes in another order, with other means, among them those of the photographs."""
    torch.manual_seed(5)
    teacher = timm.create_model('aft_conv_tiny', num_classes=8, **{**SIZES, 'embed_dim': 24})
    for parameter in teacher.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    teacher.pretrained_cfg.update(mean=(0.5, 0.5, 0.5), std=(0.4, 0.5, 0.6))
    names = sorted(path.name for path in (photographs / 'train').iterdir())
    export_model(teacher, folder := tmp_path_factory.mktemp('teacher'), ['a', *reversed(names), 'b', 'c'])
    return folder


@pytest.fixture(scope='module')
def options(photographs, teacher_folder) -> list[str]:
    (photographs / 'recipe.yaml').write_text(RECIPE)
    return [
        *('--quiet', '--config', str(photographs / 'recipe.yaml'), f'data.dir={photographs}'),
        f'distill.teacher={teacher_folder}',
    ]


@pytest.fixture(scope='module')
def outputs(options, tmp_path_factory: pytest.TempPathFactory) -> TeacherOutputs:
    folder = tmp_path_factory.mktemp('stored') / 'outputs'
    return store([*options, '--out', str(folder), '--size', '32', '--crops', '3', '--top-k', '5', '--features'])


def teacher_of(outputs: TeacherOutputs) -> torch.nn.Module:
    return load_teacher(outputs.facts.teacher, {}, outputs.facts.class_names, [(32, 32)]).double()


def crop_pixels(photographs: Path, outputs: TeacherOutputs) -> torch.Tensor:
    """All crops as the teacher sees them, in float64."""
    images = [Image.open(photographs / 'train' / name).convert('RGB') for name in outputs.names]
    crops = [
        pil_to_tensor(cut(image, outputs.arrays['boxes'][i, k], outputs.arrays['flips'][i, k], (32, 32)))
        for i, image in enumerate(images)
        for k in range(outputs.facts.crops)
    ]
    mean, std = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in ((0.5, 0.5, 0.5), (0.4, 0.5, 0.6)))
    return (torch.stack(crops).double() / 255 - mean) / std


def test_the_outputs_are_those_of_the_teacher_for_each_crop(photographs, outputs, capsys):
    teacher, seen = teacher_of(outputs), crop_pixels(photographs, outputs)
    with torch.no_grad():
        features = teacher.forward_head(teacher.forward_features(seen), pre_logits=True)
        logs = teacher(seen).log_softmax(-1)
    stored = {
        name: torch.from_numpy(np.array(array)).flatten(0, 1)
        for name, array in outputs.arrays.items()
        if name != 'state'
    }
    torch.testing.assert_close(stored['features'].double(), features, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(
        stored['log_probabilities'].double(), logs.sort(-1, descending=True)[0], rtol=2e-3, atol=2e-3
    )
    found = logs.gather(1, stored['classes'].long())
    torch.testing.assert_close(found, stored['log_probabilities'].double(), rtol=2e-3, atol=2e-3)
    # Crops of an image differ, have the area that augment.scale allows, and are flipped about every second time.
    areas = stored['boxes'][:, 2] * stored['boxes'][:, 3]
    assert 0.35 < areas.min() < 0.6 < areas.max() <= 1
    assert len(stored['boxes'].unique(dim=0)) > 50
    assert 0.2 < stored['flips'].float().mean() < 0.8


def stored_teacher(outputs: TeacherOutputs, hard: bool = False) -> StoredTeacher:
    return StoredTeacher(outputs, np.arange(len(outputs.names)) // 4, hard)


def test_the_probability_that_is_not_stored_is_spread_evenly(options, tmp_path):
    outputs = store(
        [*options, '--out', str(tmp_path / 'two'), '--size', '32', '--crops', '1', '--top-k', '2', '--no-accuracy']
    )
    stored = stored_teacher(outputs)
    stored.see(torch.arange(20))
    found, first = stored(torch.zeros(20, 3, 1, 1)).softmax(-1), outputs.arrays['classes'][:, 0].astype(np.int64)
    torch.testing.assert_close(found.sum(-1), torch.ones(20))
    kept = found.gather(1, torch.from_numpy(first))
    torch.testing.assert_close(
        kept.log(), torch.tensor(outputs.arrays['log_probabilities'][:, 0]).float(), rtol=1e-3, atol=1e-3
    )
    others = found.scatter(1, torch.from_numpy(first), 0.0)
    torch.testing.assert_close(others.amax(-1), others.sum(-1) / 3)


@pytest.mark.parametrize('kind', ['hard', 'soft', 'feature', 'soft_feature'])
def test_a_student_trains_as_with_the_teacher(kind, options, outputs, tmp_path, monkeypatch):
    # The same run, once with the stored outputs, once with the teacher on the same crops.
    distill = [f'distill.stored={outputs.folder}', f'distill.kind={kind}', f'run.dir={tmp_path / "stored"}']
    train([*options, *distill])
    teacher = teacher_of(outputs).float()

    def see_live(self: StoredTeacher, crops: torch.Tensor) -> torch.Tensor:
        self.crops = crops
        return self.classes[crops // self.outputs.facts.crops]

    def both(self: StoredTeacher, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = [torch.tensor(x)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
        its = [torch.tensor(x)[:, None, None] for x in ((0.5, 0.5, 0.5), (0.4, 0.5, 0.6))]
        seen = (images * own[1] + own[0] - its[0]) / its[1]
        features = teacher.forward_features(seen)
        logits = teacher.forward_head(features)
        if self.hard:
            logits = 1e4 * torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1])
        return logits, teacher.forward_head(features, pre_logits=True)

    monkeypatch.setattr(StoredTeacher, 'see', see_live)
    monkeypatch.setattr(StoredTeacher, 'both', both)
    monkeypatch.setattr(StoredTeacher, 'forward', lambda self, x, return_features=False: both(self, x)[return_features])
    train([*options, *distill, f'run.dir={tmp_path / "live"}'])
    rows = zip(losses(tmp_path / 'stored'), losses(tmp_path / 'live'), strict=True)
    for row, expected in rows:
        assert float(row['train_loss']) == pytest.approx(float(expected['train_loss']), rel=2e-3)


def test_an_interrupted_command_continues_where_it_was(options, outputs, tmp_path, capsys):
    arguments = [*options, '--out', str(tmp_path / 'again'), *'--size 32 --crops 3 --top-k 5 --features'.split()]
    again = store(arguments)
    assert 'at 32 px: top-1' in capsys.readouterr().out
    expected = {name: np.array(array) for name, array in again.arrays.items()}
    for name, array in outputs.arrays.items():
        assert np.array_equal(expected[name], array), name
    lost = [1, 5, 19]
    zeros = {
        name: np.zeros((3, *array.shape[1:]), array.dtype) for name, array in again.arrays.items() if name != 'state'
    }
    again.write(lost, 0, **zeros)
    assert again.missing().tolist() == lost
    done = store(arguments)
    # It is not measured twice.
    assert 'top-1' not in capsys.readouterr().out
    for name, array in done.arrays.items():
        assert np.array_equal(expected[name], array), name
    with pytest.raises(ValueError, match='got others: crops'):
        store([*arguments, '--crops', '2'])
    with pytest.raises(ValueError, match='got others: scale, seed'):
        store([*arguments, 'augment.scale=[0.5,1.0]', 'run.seed=3'])


def load(photographs: Path, outputs: TeacherOutputs, **more: Any) -> Any:
    options: dict[str, Any] = dict(augment=NO_AUGMENTATION, outputs=outputs, num_workers=0, seed=3)
    return create_loaders(more.pop('source', photographs), (16, 24), 10, **{**options, **more})


def test_a_student_sees_the_crops_of_the_teacher_at_its_own_size(photographs, outputs):
    loaders = load(photographs, outputs)
    loaders.set_epoch(0)
    epochs = [list(loaders.train)]
    loaders.set_epoch(1)
    epochs.append(list(loaders.train))
    mean, std = (torch.tensor(x)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    for images, crops in epochs[0]:
        for image, code in zip(images, crops.tolist(), strict=True):
            with Image.open(photographs / 'train' / outputs.names[code // 3]) as file:
                expected = pil_to_tensor(outputs.cut(file, code, (16, 24)))
            torch.testing.assert_close((image * std + mean) * 255, expected.float(), atol=1e-3, rtol=0)
    codes = [torch.cat([crops for _, crops in epoch]) for epoch in epochs]
    for each in codes:
        assert sorted((each // 3).tolist()) == list(range(20))
    by_image = [dict(zip((each // 3).tolist(), (each % 3).tolist(), strict=True)) for each in codes]
    assert by_image[0] != by_image[1]
    classes = loaders.classes_of_outputs
    assert classes.tolist() == [index // 4 for index in range(20)]


def test_loading_processes_draw_the_same_crops(photographs, outputs):
    here, there = load(photographs, outputs), load(photographs, outputs, num_workers=1)
    for one, other in zip(here.train, there.train, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def relink(photographs: Path, folder: Path, prefix: str = '') -> None:
    """Link the photographs into another folder, by their names behind a prefix."""
    for path in sorted(photographs.rglob('*.jpg')):
        place = folder / path.relative_to(photographs)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.with_name(f'{prefix}{path.name}').symlink_to(path.resolve())


def test_images_are_found_by_name(photographs, outputs, tmp_path):
    # The folder is elsewhere.
    moved = tmp_path / 'moved'
    moved.mkdir()
    (moved / 'train').symlink_to(photographs / 'train')
    (moved / 'validation').symlink_to(photographs / 'validation')
    loaders = load(moved, outputs)
    assert len(torch.cat([crops for _, crops in loaders.train])) == 20
    renamed = tmp_path / 'renamed'
    relink(photographs, renamed, 'x')
    with pytest.raises(ValueError, match=r'got 20 others, such as .*x'):
        load(renamed, outputs)


def test_an_image_that_the_teacher_could_not_read_is_no_crop_of_a_student_and_is_read_again(
    photographs, options, tmp_path, capsys
):
    folder = tmp_path / 'photographs'
    relink(photographs, folder)
    broken = sorted((folder / 'train').rglob('*.jpg'))[6]
    original = broken.resolve()
    broken.unlink()
    broken.write_bytes(b'no image')
    arguments = [*options, f'data.dir={folder}']
    again = [*arguments, '--out', str(tmp_path / 'out'), '--size', '32', '--no-accuracy']
    outputs = store(again)
    assert '1 image that cannot be decoded is left out' in capsys.readouterr().out
    name = str(broken.relative_to(folder / 'train'))
    assert [outputs.names[index] for index in np.flatnonzero(outputs.arrays['state'] == SKIPPED)] == [name]
    run = [*arguments, f'distill.stored={outputs.folder}', f'run.dir={tmp_path / "run"}', 'run.overwrite=true']
    assert train([*run, 'data.on_corrupt_image=skip']).progress.updates == 4
    # The file is whole again, and the teacher has not seen it.
    broken.unlink()
    broken.symlink_to(original)
    with pytest.raises(ValueError, match=r'got none of 1 that could not be read, such as .*train\.store_teacher again'):
        train(run)
    loaders = load(folder, outputs, source=Source(str(folder), on_corrupt_image='skip'))
    codes = torch.cat([crops for _, crops in loaders.train])
    place = outputs.names.index(name)
    assert len(codes) == 20
    assert place not in (codes // outputs.facts.crops).tolist()
    outputs = store(again)
    assert outputs.count(STORED) == 20
    assert train(run).progress.updates == 4


def save_vit(folder: Path, num_classes: int = 5) -> Path:
    sizes = dict(patch_size=8, img_size=32, depth=1, embed_dim=16, num_heads=1, num_classes=num_classes)
    model = timm.create_model('vit_tiny_patch16_224', **sizes)
    return save_model(folder / 'best.pth', 'vit_tiny_patch16_224', model, sizes)


def test_a_data_set_without_readable_images_is_an_error(photographs, options, tmp_path):
    folder = tmp_path / 'gone'
    for index in range(60):
        for split in ('train', 'validation'):
            (folder / split / str(index % 2)).mkdir(parents=True, exist_ok=True)
            (folder / split / str(index % 2) / f'{index}.jpg').write_bytes(b'no image')
    path = save_vit(tmp_path, num_classes=2)
    with pytest.raises(CorruptImageError, match='in a row'):
        store(
            [
                *options,
                f'distill.teacher={path}',
                f'data.dir={folder}',
                '--out',
                str(tmp_path / 'out'),
                *'--size 32 --no-accuracy'.split(),
            ]
        )


def test_a_teacher_of_fixed_size_has_its_own_by_default(options, tmp_path):
    outputs = store(
        [*options, f'distill.teacher={save_vit(tmp_path)}', '--out', str(tmp_path / 'out'), '--no-accuracy']
    )
    assert outputs.facts.size == [224, 224]


def test_images_without_names_are_those_of_a_data_set_of_as_many(photographs):
    split = open_train_split(Source(str(photographs)))
    unnamed = TorchvisionDataset([split.dataset[index] for index in range(20)])
    unnamed.targets = split.dataset.targets
    names = image_names(replace(split, dataset=unnamed))
    part = CheckedSubset(unnamed, np.arange(10))
    assert image_names(replace(split, dataset=part)) == names[:10]
    fewer = TorchvisionDataset(unnamed.dataset[1:])
    fewer.targets = unnamed.targets[1:]
    assert not {*image_names(replace(split, dataset=fewer))} & {*names}
    unnamed.targets = None
    with pytest.raises(ValueError, match='lists the classes'):
        image_names(replace(split, dataset=unnamed))


def test_names_of_files_may_be_any(photographs, options, tmp_path):
    folder, strange = tmp_path / 'strange', ['\u2028.jpg', 'a\rb.jpg', 'a\x0c.jpg', os.fsdecode(b'\xff.jpg')]
    for split in ('train', 'validation'):
        for source in sorted((photographs / split).iterdir()):
            (folder / split / source.name).mkdir(parents=True)
            for path, name in zip(sorted(source.iterdir()), strange, strict=False):
                (folder / split / source.name / name).symlink_to(path.resolve())
    arguments = [*options, f'data.dir={folder}']
    outputs = store([*arguments, '--out', str(tmp_path / 'out'), '--size', '32', '--no-accuracy'])
    assert {Path(name).name for name in TeacherOutputs(outputs.folder).names} == {*strange}
    state = train([*arguments, f'distill.stored={outputs.folder}', f'run.dir={tmp_path / "run"}'])
    assert state.progress.updates == 4


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        ('augment.mixup=0.8', r'augment\.mix_prob'),
        ('distill.kind=blocks', 'another one with distill.stored'),
        ('distill.teacher=vit_tiny_patch16_224', 'expected distill.stored to have the outputs of distill.teacher'),
        ('distill.stored=/nowhere', 'expected the outputs of a teacher in /nowhere'),
    ],
)
def test_what_does_not_fit_stored_outputs_is_an_error(given, message, options, outputs, tmp_path):
    with pytest.raises(ValueError, match=message):
        train([*options, f'distill.stored={outputs.folder}', f'run.dir={tmp_path / "run"}', given])


def test_features_that_were_not_stored_are_an_error(options, tmp_path):
    plain = store([*options, '--out', str(tmp_path / 'plain'), '--size', '32', '--no-accuracy'])
    with pytest.raises(ValueError, match=r'store them with train\.store_teacher --features'):
        train([*options, f'distill.stored={plain.folder}', 'distill.kind=feature', f'run.dir={tmp_path / "run"}'])


def test_an_incomplete_or_damaged_folder_is_an_error(options, photographs, tmp_path):
    outputs = store([*options, '--out', str(tmp_path / 'out'), '--size', '32', '--no-accuracy'])
    outputs.write([3], 0)
    with pytest.raises(ValueError, match=r'got those of 19; run train\.store_teacher again'):
        load(photographs, TeacherOutputs(outputs.folder))
    (outputs.folder / 'boxes.npy').write_bytes(b'')
    with pytest.raises(ValueError, match='expected the outputs of a teacher'):
        TeacherOutputs(outputs.folder)


def save_weights(path: Path, prefix: str = '', num_classes: int = 5) -> torch.nn.Module:
    torch.manual_seed(2)
    model = timm.create_model('test_efficientnet', num_classes=num_classes)
    torch.save({f'{prefix}{name}': tensor for name, tensor in model.state_dict().items()}, path)
    return model


@pytest.mark.parametrize('prefix', ['', 'other.'])
def test_weights_of_a_file_or_a_package_are_taken_by_name_or_in_their_order(prefix, tmp_path, monkeypatch):
    package = tmp_path / 'weights_package'
    package.mkdir()
    (package / '__init__.py').write_text('')
    expected = save_weights(package / 'weights.pth', prefix)
    monkeypatch.syspath_prepend(str(tmp_path))
    for weights in ('weights_package', str(package / 'weights.pth')):
        found = load_teacher('test_efficientnet', {'num_classes': 5}, None, [(32, 32)], weights=weights)
        torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert 'weights_package' not in sys.modules
    save_weights(package / 'second.pth')
    with pytest.raises(ValueError, match='expected one file of weights in the package weights_package'):
        load_teacher('test_efficientnet', {'num_classes': 5}, None, [(32, 32)], weights='weights_package')


def test_weights_of_another_model_are_an_error(tmp_path):
    model = save_weights(tmp_path / 'weights.pth')
    with pytest.raises(ValueError, match='by name or in the same order'):
        load_teacher('resnet10t', {}, None, [(32, 32)], weights=str(tmp_path / 'weights.pth'))
    # One tensor more, in the order of the others.
    more = {f'x.{name}': tensor for name, tensor in copy.deepcopy(model.state_dict()).items()} | {'y': torch.zeros(1)}
    torch.save(more, tmp_path / 'more.pth')
    with pytest.raises(ValueError, match='by name or in the same order'):
        load_teacher('test_efficientnet', {'num_classes': 5}, None, [(32, 32)], weights=str(tmp_path / 'more.pth'))
    with pytest.raises(ValueError, match='to be a file or an installed package'):
        load_teacher('test_efficientnet', {}, None, [(32, 32)], weights='no_such_package')
