import contextlib
import re
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from helpers import NO_AUGMENTATION
from stream_files import encode, numbered, write_shards

from aft_vision.data import (
    Augmentation,
    CorruptImageError,
    Preprocessing,
    Shard,
    Source,
    create_eval_loader,
    create_loaders,
)

pytest.importorskip('webdataset')
PLAIN = Preprocessing((16, 16), crop_pct=1.0, mean=(0, 0, 0), std=(1, 1, 1))


def values(batches) -> list[int]:
    """The numbers of grey images of `numbered`, in their order; those of the classes must agree."""
    images, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    found = (images.mean(dim=(1, 2, 3)) * 255 / 5).round().int().tolist()
    assert [value % 2 for value in found] == targets.tolist()
    return found


def evaluate(source: Source, batch_size: int = 3, **options) -> list[int]:
    return values(create_eval_loader(source, PLAIN, batch_size, **{'num_workers': 0, **options})[0])


def train(source: Source, batch_size: int = 4, epochs: int = 1, **options) -> list[list[int]]:
    """The numbers of the images of each epoch, after checking that it has the batches that the schedule counts."""
    options = {'augment': NO_AUGMENTATION, 'num_workers': 0, **options}
    loaders = create_loaders(source, (16, 16), batch_size, evaluation=PLAIN, **options)
    found = []
    for epoch in range(epochs):
        loaders.set_epoch(epoch)
        batches = list(loaders.train)
        assert len(batches) == len(loaders.train) > 0
        found.append(values(batches))
    return found


@pytest.mark.parametrize('ending', ['jpg', 'jpeg', 'JPG', 'JPEG', 'png', 'webp'])
def test_images_of_any_ending_are_found_and_named_as_in_the_file(tmp_path, ending):
    source = write_shards(tmp_path, [numbered(0, 4, ending), numbered(4, 4, ending)])
    for key in (None, ending, f'.{ending}', f'bmp;{ending}'):
        assert evaluate(replace(source, input_key=key)) == list(range(8))


def test_shards_may_mix_endings(tmp_path):
    mixed = {**numbered(0, 2, 'jpg'), **numbered(2, 2, 'JPEG'), **numbered(4, 2, 'png')}
    source = write_shards(tmp_path, [mixed])
    assert evaluate(source) == list(range(6))
    assert sorted(train(source, 2)[0]) == list(range(6))
    with pytest.raises(ValueError, match=r'an image and its class .*, got only 0002\.cls .*; data\.input_key says'):
        evaluate(replace(source, input_key='jpg'))


def test_members_with_dots_in_their_names_are_samples_of_their_own(tmp_path):
    members = {**numbered(0, 4, 'jpg', 'clip.v1/frame_0.{}'), '._frame_0.0.jpg': b'of macOS', 'README.txt': b'text'}
    assert evaluate(write_shards(tmp_path, [members])) == list(range(4))


def test_one_of_several_images_of_a_sample_is_named_by_its_whole_ending(tmp_path):
    members = {}
    for i in range(4):
        members |= {f'{i}.left.png': encode(5 * i), f'{i}.right.png': encode(200), f'{i}.cls': b'%d' % (i % 2)}
    source = write_shards(tmp_path, [members])
    assert evaluate(replace(source, input_key='left.png')) == list(range(4))
    with pytest.raises(ValueError, match=r'got only 0\.left\.png of one in .*validation-0\.tar; data\.input_key'):
        evaluate(source)


def test_the_class_may_be_a_field_of_json(tmp_path):
    members = {}
    for i in range(4):
        members |= {f'{i}.png': encode(5 * i), f'{i}.json': b'{"of": {"class": %d}}' % (i % 2)}
    source = write_shards(tmp_path, [members])
    assert evaluate(replace(source, target_key='of/class')) == list(range(4))
    with pytest.raises(ValueError, match=r'expected the field data\.target_key, label, in 0\.json in .*, got of'):
        evaluate(replace(source, target_key='label'))


@pytest.mark.parametrize(
    ('members', 'message'),
    [
        ({'0.png': encode(0)}, r'got only 0\.png of one in .*validation-1\.tar'),
        ({'0.cls': b'0'}, r'got only 0\.cls of one in .*validation-1\.tar'),
        ({'0.png': encode(0), '0.jpg': encode(0), '0.cls': b'0'}, r'expected one image .*, got 0\.png and 0\.jpg in '),
        ({'0.png': encode(0), '0.cls': b'cat'}, r"a whole number as the class of 0\.png in .*, got b'cat'"),
        ({'0.png': encode(0), '0.cls': b'-1'}, r'labels from 0 to 1 in wds/, .* got -1'),
    ],
)
@pytest.mark.parametrize('on_corrupt_image', ['raise', 'skip'])
def test_an_incomplete_sample_is_an_error_that_names_it(tmp_path, members, message, on_corrupt_image):
    source = write_shards(tmp_path, [numbered(0, 2), members], shard_lengths=[2, 1], num_samples=3)
    with pytest.raises(ValueError, match=message):
        evaluate(replace(source, on_corrupt_image=on_corrupt_image))


def test_a_stream_has_numbers_for_class_names_and_asks_for_how_many(tmp_path):
    source = write_shards(tmp_path, [numbered(0, 4)])
    assert create_eval_loader(source, PLAIN, 4, num_workers=0)[1] == ['0', '1']
    with pytest.raises(ValueError, match=r'expected the number of classes .*, because wds/'):
        evaluate(replace(source, num_classes=None))


@pytest.mark.parametrize('num_workers', [0, 1])
def test_a_label_beyond_the_number_of_classes_of_a_stream_is_named(tmp_path, num_workers):
    source = write_shards(tmp_path, [numbered(0, 4)], num_classes=1)
    for use in (train, evaluate):
        with pytest.raises(ValueError, match=r'labels from 0 to 0 in wds/, as data\.num_classes or .* says, got 1$'):
            use(source, num_workers=num_workers)


def test_a_stream_repeats_no_image_and_is_not_shared(tmp_path):
    source = write_shards(tmp_path, [numbered(0, 4)])
    with pytest.raises(ValueError, match=r'augment\.repeats must be 1 for a streamed data set, got 3'):
        train(source, augment=Augmentation(repeats=3))
    with pytest.raises(ValueError, match='expected no share to hold out of wds/'):
        evaluate(replace(source, val_share=0.5))


def damage(source: Source, kind: str) -> None:
    """Damage the first of two shards of four images, or remove it."""
    for path in Path(source.dir).glob('*-0.tar'):
        content = path.read_bytes()
        third = content.index(b'0002.png')
        if kind == 'missing':
            path.unlink()
            continue
        path.write_bytes(
            {
                'an image': content[: third + 530] + bytes(60) + content[third + 590 :],
                'garbage': b'x' * 5000,
                'empty': b'',
                'a header': content[:third] + b'\xff' * 20 + content[third + 20 :],
                'cut in a member': content[: third + 530],
                'cut after a member': content[:third],
            }[kind]
        )


# The images that are left of 0 to 7.
DAMAGE = {
    'an image': [0, 1, 3, 4, 5, 6, 7],
    'missing': [4, 5, 6, 7],
    'garbage': [4, 5, 6, 7],
    'empty': [4, 5, 6, 7],
    # The sample before the damage may not be whole.
    'a header': [0, 4, 5, 6, 7],
    'cut in a member': [0, 4, 5, 6, 7],
    'cut after a member': [0, 4, 5, 6, 7],
}


@pytest.mark.parametrize('kind', DAMAGE)
def test_damage_is_an_error_that_names_the_shard_or_is_skipped_and_counted(tmp_path, caplog, kind):
    source = write_shards(tmp_path, [numbered(0, 4), numbered(4, 4)])
    damage(source, kind)
    place = r'0002\.png in .*validation-0\.tar' if kind == 'an image' else r'a whole tar file, got .*validation-0\.tar'
    with pytest.raises(CorruptImageError, match=place):
        evaluate(source)
    with pytest.raises(CorruptImageError, match=r'train-0\.tar'):
        train(source)
    skipping, left = replace(source, on_corrupt_image='skip'), DAMAGE[kind]
    assert evaluate(skipping) == left
    count = f'skipped: {8 - len(left)} of 8 images of the split validation of {tmp_path}'
    assert caplog.messages[-1] == count
    caplog.clear()
    assert evaluate(skipping) == left
    assert len(caplog.messages) == 2
    assert caplog.messages[-1] == count
    caplog.clear()
    for epoch in train(skipping, 2, epochs=2):
        assert len(epoch) == 8
        assert set(epoch) <= set(left)
    assert len(caplog.messages) == 1


def test_a_training_split_that_cannot_be_read_at_all_is_an_error(tmp_path):
    source = write_shards(tmp_path, [numbered(0, 4)])
    (tmp_path / 'train-0.tar').unlink()
    with pytest.raises(CorruptImageError, match='a batch of images that can be read in the split train'):
        train(replace(source, on_corrupt_image='skip'))


@pytest.mark.parametrize('lengths', [[3, 5], [5, 3]])
def test_a_shard_with_another_number_of_images_than_stated_is_an_error(tmp_path, lengths):
    source = write_shards(tmp_path, [numbered(0, 4), numbered(4, 4)], shard_lengths=lengths)
    for use in (evaluate, train):
        for each in (source, replace(source, on_corrupt_image='skip')):
            with pytest.raises(ValueError, match=r'expected [35] images in .*tar, .* got 4; correct the shard_lengths'):
                use(each)


@pytest.mark.parametrize(('stated', 'workers'), [(7, 0), (9, 0), (9, 2)])
def test_an_evaluation_compares_its_images_with_the_number_of_the_split(tmp_path, stated, workers):
    write_shards(tmp_path, [numbered(0, 4), numbered(4, 4)])
    (tmp_path / '_info.json').unlink()
    split = f'validation-{{0..1}}.tar|{stated}'
    source = Source(name='wds/', dir=str(tmp_path), num_classes=2, eval_split=split)
    message = f'expected {stated} images in the split validation-{{0..1}}.tar of {tmp_path}, got 8'
    for each in (source, replace(source, on_corrupt_image='skip')):
        with pytest.raises(ValueError, match=re.escape(f'{message}; correct the number after |')):
            evaluate(each, num_workers=workers)
    damage(source, 'an image')
    with pytest.raises(ValueError, match='got 7') if stated == 9 else contextlib.nullcontext():
        assert len(evaluate(replace(source, on_corrupt_image='skip'), num_workers=workers)) == 7


def test_shards_without_an_info_file_need_the_number_of_images(tmp_path):
    write_shards(tmp_path, [numbered(0, 4), numbered(4, 4)])
    (tmp_path / '_info.json').unlink()
    source = Source(name='wds/', dir=str(tmp_path), num_classes=2)
    shards = {'train_split': 'train-{0..1}.tar', 'eval_split': 'validation-{0..1}.tar'}
    with pytest.raises(ValueError, match=r"data\.eval_split='validation-\{0\.\.1\}\.tar\|1000' or --split"):
        evaluate(replace(source, **shards))
    with pytest.raises(ValueError, match=r"data\.train_split='train-\{0\.\.1\}\.tar\|1000'"):
        train(replace(source, **shards))
    for count in ('1,000', '1_000', ' 8', ''):
        with pytest.raises(ValueError, match=rf"expected a number after \| .*, got '{count}' in"):
            evaluate(replace(source, eval_split=f'validation-{{0..1}}.tar|{count}'))
    counted = replace(source, **{key: f'{split}|8' for key, split in shards.items()})
    assert evaluate(counted, num_workers=2) == [0, 1, 2, 4, 5, 6, 3, 7]
    assert sorted(train(counted, num_workers=2)[0]) == list(range(8))
    with pytest.raises(ValueError, match=r'expected one process for the split validation.*, got 2; shard_lengths in'):
        evaluate(counted, shard=Shard(0, 2))
    with pytest.raises(ValueError, match=r'expected a split of _info\.json in .*, which has none, or shards such as'):
        evaluate(source)


@pytest.mark.parametrize('info', ['{"splits": {"validation": {}}}', '{}', 'text'])
def test_a_damaged_info_file_is_named(tmp_path, info):
    (tmp_path / '_info.json').write_text(info)
    with pytest.raises(ValueError, match=r'expected splits with their filenames in .*_info\.json, got'):
        evaluate(Source(name='wds/', dir=str(tmp_path), num_classes=2))


def test_numbers_of_images_that_differ_are_an_error(tmp_path):
    source = write_shards(tmp_path, [numbered(0, 4)], num_samples=9)
    with pytest.raises(
        ValueError, match=r'expected 4 images in the split validation .*, as its shard_lengths sum to, got 9'
    ):
        evaluate(source)


@pytest.mark.parametrize('workers', [1, 2, 5])
def test_an_epoch_has_every_image_once_for_any_number_of_loading_processes(tmp_path, caplog, workers):
    shards = [numbered(0, 5), numbered(5, 1), numbered(6, 4)]
    source = write_shards(tmp_path, shards)
    assert sorted(evaluate(source, num_workers=workers)) == list(range(10))
    first, second = train(source, 2, epochs=2, num_workers=workers)
    assert sorted(first) == sorted(second) == list(range(10))
    capped = f'3 instead of data.num_workers={workers} processes read the split train of {tmp_path}'
    assert (capped in caplog.text) == (workers > 3)


@pytest.mark.parametrize('processes', [2, 3])
def test_processes_share_each_image_once_and_have_equally_many_updates(tmp_path, processes):
    source = write_shards(tmp_path, [numbered(0, 9), numbered(9, 4)])
    shards = [Shard(rank, processes) for rank in range(processes)]
    evaluated = [evaluate(source, shard=shard) for shard in shards]
    assert sorted(chain(*evaluated)) == list(range(13))
    trained = [train(source, 2 * processes, shard=shard)[0] for shard in shards]
    assert {len(each) for each in trained} == {12 // processes}
    assert len(set(chain(*trained))) == 12


def test_the_order_and_the_changes_follow_from_the_seed_and_the_epoch(tmp_path):
    source = write_shards(tmp_path, [numbered(0, 5), numbered(5, 5)])

    def epochs(seed: int) -> list[torch.Tensor]:
        augment = replace(NO_AUGMENTATION, scale=(0.08, 1.0), color_jitter=0.4)
        loaders = create_loaders(source, (16, 16), 10, augment=augment, evaluation=PLAIN, num_workers=0, seed=seed)
        found = []
        for epoch in (0, 1):
            loaders.set_epoch(epoch)
            found.append(next(iter(loaders.train))[0])
        return found

    first, again, other = epochs(0), epochs(0), epochs(1)
    state = torch.get_rng_state()
    assert torch.equal(torch.stack(first), torch.stack(again))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_batch_beyond_the_split_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r'batch_size must be in \[1, 4\], the number of training images, got 5'):
        train(write_shards(tmp_path, [numbered(0, 4)]), 5)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    source = write_shards(tmp_path, [numbered(0, 4)])
    monkeypatch.setitem(sys.modules, 'webdataset', None)
    with pytest.raises(ValueError, match=r"wds/ needs webdataset: pip install 'aft-vision\[webdataset\]'"):
        evaluate(source)


def test_a_stream_cannot_be_balanced(tmp_path):
    source = write_shards(tmp_path, [numbered(0, 4, 'jpg')])
    with pytest.raises(ValueError, match='whose classes are known before it is read'):
        train(source, 2, balanced=True)
