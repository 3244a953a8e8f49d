import csv
import io
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import timm
import torch
from helpers import CLOTHING, save_model
from PIL import Image

from aft_vision.data import CorruptImageError
from aft_vision.models.checkpoint import load_model
from aft_vision.visualize import load_image
from tools.predict import count_classes, main
from train.command_line import run_command

PHOTOGRAPHS = sorted((CLOTHING / 'validation').rglob('*.jpg'))[:3]
NAMES = [f'kind {i}' for i in range(7)]


@pytest.fixture(scope='module')
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a best checkpoint, whose model was trained at 48 px without a class called twice."""
    folder = tmp_path_factory.mktemp('run')
    kwargs = dict(depth=1, embed_dim=16, num_heads=4, kernel_size=3, num_classes=7)
    torch.manual_seed(0)
    model = timm.create_model('aft_conv_tiny', **kwargs)
    torch.nn.init.normal_(model.head.weight)
    preprocessing = {'input_size': (3, 48, 48), 'crop_pct': 1.0, 'mean': (0.5,) * 3, 'std': (0.5,) * 3}
    more = dict(class_names=NAMES, data_config=preprocessing)
    return save_model(folder / 'best.pth', 'aft_conv_tiny', model, kwargs, **more).parent


def test_classes_are_those_of_timm_s_own_preprocessing(run_folder, capsys):
    rows = main([*map(str, PHOTOGRAPHS), '--checkpoint', str(run_folder), '--top', '7'])
    model = load_model(run_folder)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    for path, row in zip(PHOTOGRAPHS, rows, strict=True):
        with Image.open(path) as image, torch.no_grad():
            expected = model(transform(image.convert('RGB'))[None]).softmax(1)[0]
        found = {each['class']: each['probability'] for each in row['classes']}
        assert [found[name] for name in NAMES] == pytest.approx(expected.tolist(), abs=1e-5)
        assert list(found.values()) == sorted(found.values(), reverse=True)
    printed = capsys.readouterr().out
    assert all(str(path) in printed for path in PHOTOGRAPHS)
    assert rows[0]['classes'][0]['class'] in printed


def test_options_of_reading_reach_the_images(run_folder):
    with pytest.raises(CorruptImageError, match=r'at most 5 pixels, got .*; data\.max_image_pixels=.* or --max-pixels'):
        main([str(PHOTOGRAPHS[0]), '--checkpoint', str(run_folder), '--max-pixels', '5'])


@pytest.mark.parametrize('more', [[], ['--json']])
def test_images_that_cannot_be_decoded_are_named_after_the_others(run_folder, tmp_path, capsys, more):
    (tmp_path / 'bad.png').write_bytes(b'no image')
    paths = [str(PHOTOGRAPHS[0]), str(tmp_path / 'bad.png'), str(PHOTOGRAPHS[1])]
    with pytest.raises(CorruptImageError, match=r'1 of 3 images: .*bad\.png'):
        main([*paths, '--checkpoint', str(run_folder), *more])
    printed = capsys.readouterr().out
    if more:
        printed = ' '.join(row['image'] for row in json.loads(printed))
    assert [path in printed for path in paths] == [True, False, True]


# Who has chosen how to print such names keeps it.
@pytest.mark.parametrize(
    ('encoding', 'errors', 'printed'), [('utf-8', 'strict', b'caf\xe9.jpg'), ('ascii', 'replace', b'caf?.jpg')]
)
def test_a_name_that_is_not_utf_8_is_printed_byte_by_byte(encoding, errors, printed, run_folder, tmp_path, monkeypatch):
    name = os.fsdecode(os.fsencode(tmp_path) + b'/caf\xe9.jpg')
    Path(name).write_bytes(PHOTOGRAPHS[0].read_bytes())
    output = io.BytesIO()
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(output, encoding, errors))
    run_command(main, [name, '--checkpoint', str(run_folder)])
    assert output.getvalue().splitlines()[0] == os.fsencode(tmp_path) + b'/' + printed


def test_json_and_a_folder_at_another_size(run_folder, capsys):
    folder = PHOTOGRAPHS[0].parent
    rows = main([str(folder), '--checkpoint', str(run_folder), '--size', '64x32', '--top', '2', '--json'])
    assert json.loads(capsys.readouterr().out) == rows
    assert [row['image'] for row in rows] == sorted(map(str, folder.glob('*.jpg')))
    assert all(len(row['classes']) == 2 for row in rows)


@pytest.mark.parametrize('name', ['found.csv', 'new/found.JSON'])
def test_a_folder_is_written_to_a_file_and_its_classes_are_counted(run_folder, tmp_path, capsys, name):
    out = tmp_path / name
    rows = main([*map(str, PHOTOGRAPHS), '--checkpoint', str(run_folder), '--top', '2', '--out', str(out)])
    printed = capsys.readouterr().out
    counts = Counter(row['classes'][0]['class'] for row in rows)
    assert printed == f'3 images: {", ".join(f"{count} {name}" for name, count in counts.most_common())}\n'
    if out.suffix == '.JSON':
        assert json.loads(out.read_text()) == rows
        return
    with out.open(newline='') as file:
        found = list(csv.reader(file))
    assert found[0] == ['image', 'class', 'probability', 'class_2', 'probability_2']
    for cells, row in zip(found[1:], rows, strict=True):
        assert cells == [row['image'], *(str(value) for each in row['classes'] for value in each.values())]


def test_json_alone_is_on_standard_output_and_one_image_is_not_counted(run_folder, capsys):
    rows = main([*map(str, PHOTOGRAPHS), '--checkpoint', str(run_folder), '--json'])
    printed = capsys.readouterr()
    assert json.loads(printed.out) == rows
    assert printed.err.startswith('3 images: ')
    main([str(PHOTOGRAPHS[0]), '--checkpoint', str(run_folder)])
    assert 'images:' not in capsys.readouterr().out


def test_what_can_be_decoded_is_written_before_the_others_are_named(run_folder, tmp_path):
    (tmp_path / 'bad.png').write_bytes(b'no image')
    out = tmp_path / 'found.csv'
    with pytest.raises(CorruptImageError, match='1 of 2 images'):
        main([str(tmp_path / 'bad.png'), str(PHOTOGRAPHS[0]), '--checkpoint', str(run_folder), '--out', str(out)])
    assert [line.partition(',')[0] for line in out.read_text().splitlines()] == ['image', str(PHOTOGRAPHS[0])]


@pytest.mark.parametrize('name', ['found.csv', 'found.json'])
def test_an_interruption_keeps_the_rows_that_were_done(run_folder, tmp_path, monkeypatch, name):
    def load(path, *arguments):
        if path == PHOTOGRAPHS[2]:
            raise KeyboardInterrupt
        return load_image(path, *arguments)

    out = tmp_path / name
    out.write_text('earlier')
    arguments = [*map(str, PHOTOGRAPHS), '--checkpoint', str(run_folder), '--out', str(out)]
    with monkeypatch.context() as patch:
        patch.setattr('tools.predict.load_image', load)
        with pytest.raises(KeyboardInterrupt):
            main(arguments)
    assert out.read_text() == 'earlier'
    part = tmp_path / f'{name}.part'
    kept = [json.loads(line) for line in part.read_text().splitlines()]
    assert [row['image'] for row in kept] == [str(path) for path in PHOTOGRAPHS[:2]]
    assert main(arguments)[:2] == kept
    assert out.read_text() != 'earlier'
    assert not part.exists()


def test_a_link_and_a_pipe_receive_the_format_of_their_own_names(run_folder, tmp_path):
    (tmp_path / 'found.csv').symlink_to('target')
    os.mkfifo(tmp_path / 'pipe.csv')
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / 'pipe.csv').read_text()), daemon=True)
    reader.start()
    for name in ('found.csv', 'pipe.csv'):
        main([str(PHOTOGRAPHS[0]), '--checkpoint', str(run_folder), '--out', str(tmp_path / name)])
    reader.join(30)
    assert read == [(tmp_path / 'target').read_text()]
    assert read[0].startswith('image,class,')
    assert (tmp_path / 'found.csv').is_symlink()


def test_a_folder_in_place_of_the_file_is_named_before_anything_is_classified(tmp_path):
    (tmp_path / 'found.csv').mkdir()
    with pytest.raises(ValueError, match=r'expected a file, got the folder .*found\.csv'):
        main(['missing.jpg', '--model', 'aft_conv_nano', '--out', str(tmp_path / 'found.csv')])


def test_of_many_classes_only_the_most_frequent_are_counted():
    rows = [{'classes': [{'class': f'kind {number}'}]} for number in (*range(12), 7)]
    counted = count_classes(rows)
    assert counted.startswith('13 images: 2 kind 7, 1 kind 0, ')
    assert counted.endswith(' and 2 more')


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['none.jpg', '--checkpoint', 'RUN'], r'none\.jpg'),
        # Before a model is loaded.
        (['PHOTO', 'none.jpg', '--model', 'not_a_model'], r'none\.jpg, which do not exist'),
        (['PHOTO', '--model', 'aft_conv_tiny'], 'weights'),
        (['PHOTO', '--model', 'runs/mine'], '--checkpoint takes'),
        (['PHOTO', '--model', 'aft_conv_naon'], r'got aft_conv_naon; did you mean aft_conv_nano\?'),
        (['PHOTO', '--checkpoint', 'RUN', '--size', '50'], 'multiples of the patch'),
        (['a.csv', '--checkpoint', 'RUN', '--out', 'a.csv'], r'another place than that of a\.csv, which is read'),
    ],
)
def test_what_cannot_be_classified_is_refused(run_folder, arguments, message):
    places = {'RUN': str(run_folder), 'PHOTO': str(PHOTOGRAPHS[0])}
    with pytest.raises(ValueError, match=message):
        main([places.get(argument, argument) for argument in arguments])
