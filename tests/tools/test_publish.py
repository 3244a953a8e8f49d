"""Runs whose results are known by hand, published and packaged."""

import csv
import json
import re
from pathlib import Path

import pytest
import timm
import torch
import yaml
from helpers import make_folder

from aft_vision.models.aft_vit import IMAGENETTE
from aft_vision.models.checkpoint import load_model
from aft_vision.models.weight_files import check_checksum
from tools import ablation_page, imagenette_page, package_weights, publish

PAGE = '<!-- runs: of make results -->\n<!-- end -->\nwords\n<!-- search: of make results -->\n<!-- end -->\n'
DEIT = dict(patch_size=8, embed_dim=16, depth=1, num_heads=4, img_size=[96, 96])
CONV = dict(drop_path_rate=0.0)
SIMPLE = dict(embed_dim=16, depth=1)


@pytest.fixture(scope='module')
def data(tmp_path_factory) -> Path:
    """A data set of ten grey images, one a class."""
    return make_folder(tmp_path_factory.mktemp('data'), {'val': list(IMAGENETTE)}, images=1, size=(96, 96))


@pytest.fixture
def docs(tmp_path) -> Path:
    """A folder of results pages."""
    folder = tmp_path / 'docs' / 'results'
    (folder / 'data' / 'imagenette_search').mkdir(parents=True)
    (folder / imagenette_page.PAGE).write_text(PAGE)
    return folder


def make_run(folder: Path, data: Path, name: str, kwargs: dict, top1: list[tuple[float, float]], answer: int) -> Path:
    """A run with a row of (top-1, top-1 of the average) an epoch, whose average answers every image alike."""
    torch.manual_seed(0)
    weights = timm.create_model(name, num_classes=10, **kwargs).state_dict()
    average = {key: torch.zeros_like(x) if key.startswith('head') else x for key, x in weights.items()}
    average['head.bias'][answer] = 1.0
    history = [
        {'epoch': i, 'train_images_per_second': 10 * (i + 1), 'train_seconds': 60 / (i + 1), 'train_memory_mb': 700 + i}
        | {'eval_top1': plain, 'eval_ema_top1': averaged}
        for i, (plain, averaged) in enumerate(top1)
    ]
    content = {
        'model_name': name,
        'model_kwargs': {'num_classes': 10, **kwargs},
        'class_names': list(IMAGENETTE),
        'data_config': {'input_size': (3, 96, 96), 'crop_pct': 1.0, 'interpolation': 'bicubic'},
        'state_dict': weights,
        'ema_state_dict': average,
        'epoch': len(top1),
    }
    config = {
        'model': {'name': name},
        'data': {'dir': str(data), 'img_size': [96, 96], 'eval_img_size': None, 'batch_size': 4, 'eval_batch_size': 5},
        'augment': {'mixup': 0.0},
        'optim': {'lr': 0.008},
        'schedule': {'epochs': len(top1)},
        'run': {'dir': str(folder), 'seed': int(folder.name[-1]), 'device': 'cpu', 'amp': 'none'},
    }
    folder.mkdir()
    torch.save(content, folder / 'last.pth')
    (folder / 'config.yaml').write_text(yaml.safe_dump(config))
    with (folder / 'summary.csv').open('w', newline='') as file:
        writer = csv.DictWriter(file, history[0])
        writer.writeheader()
        writer.writerows(history)
    return folder


def test_a_published_run_is_a_folder_that_loads_with_its_answers(data, docs, tmp_path):
    run = make_run(tmp_path / 'conv_8e-3_seed0', data, 'aft_conv_nano', CONV, [(50.0, 40.0), (60.0, 65.0)], answer=3)
    change_config(run, 'run.device', 'cuda')
    (folder,) = publish.main([str(run), '--docs', str(docs), '--workers', '0', '--commit', 'abc'])
    assert folder == docs / 'data' / 'imagenette' / 'conv_seed0'
    assert (folder / 'summary.csv').read_text() == (run / 'summary.csv').read_text()
    config = yaml.safe_load((folder / 'config.yaml').read_text())
    assert (config['run']['dir'], config['data']['dir'], config['optim']['lr']) == (None, data.name, 0.008)
    # It was trained on a GPU, which this machine need not have.
    assert config['run']['device'] == 'cuda'
    result = json.loads((folder / 'result.json').read_text())
    assert (result['best'], result['commit'], result['parameters']) == ('average', 'abc', 1_310_346)
    assert result['right']['average'] == '0001000000'
    assert result['top1_float16']['average'] == 10.0
    assert len(result['right']['weights']) == 10
    check_checksum(folder / 'model.safetensors')
    average = torch.load(run / 'last.pth', weights_only=True)['ema_state_dict']
    for key, x in load_model(folder).state_dict().items():
        assert torch.equal(x, average[key].half().float()), key


def change_config(run: Path, key: str, value: object) -> None:
    config = yaml.safe_load((run / 'config.yaml').read_text())
    section, name = key.split('.')
    config.setdefault(section, {})[name] = value
    (run / 'config.yaml').write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(
    ('key', 'value', 'kept'),
    [
        ('run.init_from', '/home/me/runs/a/best.pth', 'best.pth'),
        ('distill.teacher', 'local-dir:/home/me/export', 'local-dir:export'),
        ('distill.teacher', 'deit_tiny_patch16_224', 'deit_tiny_patch16_224'),
        (
            'distill.teacher_args',
            {'pretrained_cfg_overlay': {'file': '~/w.pth'}},
            {'pretrained_cfg_overlay': {'file': 'w.pth'}},
        ),
        ('data.name', ['/home/me/a.tar', 'hfds/a/b', 3], ['a.tar', 'hfds/a/b', 3]),
    ],
)
def test_no_path_of_the_machine_is_published(data, docs, tmp_path, monkeypatch, key, value, kept):
    run = make_run(tmp_path / 'conv_seed0', data, 'aft_simple_nano', SIMPLE, [(60.0, 65.0)], answer=3)
    change_config(run, key, value)
    monkeypatch.setattr(
        publish, 'answer', lambda *args: ({'weights': '1', 'average': '1'}, {'weights': 100.0, 'average': 100.0})
    )
    (folder,) = publish.main([str(run), '--docs', str(docs), '--no-weights'])
    section, name = key.split('.')
    assert yaml.safe_load((folder / 'config.yaml').read_text())[section][name] == kept
    for path in folder.iterdir():
        assert '/home/me' not in path.read_text()
        assert str(tmp_path) not in path.read_text()


def test_a_published_run_stays_until_the_new_one_is_complete_and_is_replaced_by_itself_only(
    data, docs, tmp_path, monkeypatch
):
    run = make_run(tmp_path / 'conv_8e-3_seed0', data, 'aft_simple_nano', SIMPLE, [(60.0, 65.0)], answer=3)
    arguments = ['--docs', str(docs), '--workers', '0']
    (folder,) = publish.main([str(run), *arguments])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with monkeypatch.context() as patch:

        def fail(*args: object) -> None:
            raise OSError('the disk is full')

        patch.setattr(publish, 'export_model', fail)
        with pytest.raises(OSError, match='the disk is full'):
            publish.main([str(run), *arguments])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    other = make_run(tmp_path / 'conv_4e-3_seed0', data, 'aft_simple_nano', SIMPLE, [(50.0, 55.0)], answer=3)
    change_config(other, 'optim.lr', 0.004)
    with pytest.raises(ValueError, match=r'got one with optim\.lr=0\.004 instead of 0\.008: .* --row NAME'):
        publish.main([str(other), *arguments])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    publish.main([str(other), *arguments, '--row', 'conv_slow'])
    # The same run elsewhere, resumed.
    change_config(run, 'run.dir', 'elsewhere')
    change_config(run, 'run.resume', 'auto')
    publish.main([str(run), *arguments, '--no-weights'])
    assert sorted(path.name for path in folder.iterdir()) == ['config.yaml', 'result.json', 'summary.csv']
    assert sorted(path.name for path in folder.parent.iterdir()) == ['conv_seed0', 'conv_slow_seed0']


def test_the_place_of_training_is_only_named_where_it_is_known(data, docs, tmp_path, monkeypatch):
    run = make_run(tmp_path / 'conv_seed0', data, 'aft_simple_nano', SIMPLE, [(60.0, 65.0)], answer=3)
    monkeypatch.setattr(publish, 'read_commit', lambda: 'abc')
    monkeypatch.setattr(publish, 'describe_processor', lambda device: 'This')
    arguments = [str(run), '--docs', str(docs), '--workers', '0', '--no-weights']
    publish.main(arguments)
    assert 'published on This. Published at commit abc. Every run' in (docs / imagenette_page.PAGE).read_text()
    publish.main([*arguments, '--commit', 'def', '--processor', 'That'])
    assert ' That. Commit def. Every run' in (docs / imagenette_page.PAGE).read_text()
    publish.main(arguments)
    assert ' That. Commit def. Every run' in (docs / imagenette_page.PAGE).read_text()


def test_a_run_of_the_same_config_does_not_replace_another(data, docs, tmp_path):
    run = make_run(tmp_path / 'conv_seed0', data, 'aft_simple_nano', SIMPLE, [(60.0, 65.0)], answer=3)
    arguments = ['--docs', str(docs), '--workers', '0', '--no-weights']
    (folder,) = publish.main([str(run), *arguments])
    before = (folder / 'summary.csv').read_bytes()
    (tmp_path / 'again').mkdir()
    again = make_run(tmp_path / 'again' / 'conv_seed0', data, 'aft_simple_nano', SIMPLE, [(61.0, 65.0)], answer=3)
    with pytest.raises(ValueError, match='got one with other figures'):
        publish.main([str(again), *arguments])
    assert (folder / 'summary.csv').read_bytes() == before


def test_a_run_on_another_number_of_images_is_not_published(data, docs, tmp_path):
    arguments = ['--docs', str(docs), '--workers', '0', '--no-weights']
    run = make_run(tmp_path / 'deit_seed0', data, 'deit_tiny_patch16_224', DEIT, [(60.0, 65.0)], answer=3)
    publish.main([str(run), *arguments])
    more = make_folder(tmp_path / 'more', {'val': list(IMAGENETTE)}, images=2, size=(96, 96))
    run = make_run(tmp_path / 'conv_seed0', more, 'aft_simple_nano', SIMPLE, [(60.0, 65.0)], answer=3)
    with pytest.raises(ValueError, match='expected answers to 10 images, as deit with seed 0 has, got 20'):
        publish.main([str(run), *arguments])
    assert not (docs / 'data' / 'imagenette' / 'conv_seed0').exists()


@pytest.mark.parametrize('more', [[], ['--ablation']])
def test_a_run_is_not_published_without_its_page(more, data, docs, tmp_path):
    run = make_run(tmp_path / 'conv_k3_seed0', data, 'aft_simple_nano', SIMPLE, [(60.0, 65.0)], answer=3)
    (docs / imagenette_page.PAGE).rename(docs / ('other.md' if not more else imagenette_page.PAGE))
    with pytest.raises(ValueError, match=r'expected the page .*(imagenette|ablations)\.md, got no such file'):
        publish.main([str(run), '--docs', str(docs), *more])
    assert not list((docs / 'data').rglob('result.json'))


def test_the_average_of_a_run_without_one_is_that_of_the_weights(data, docs, tmp_path):
    nan = float('nan')
    run = make_run(tmp_path / 'simple_seed0', data, 'aft_simple_nano', SIMPLE, [(50.0, nan), (60.0, nan)], answer=3)
    content = torch.load(run / 'last.pth', weights_only=True)
    torch.save({**content, 'ema_state_dict': None}, run / 'last.pth')
    publish.main([str(run), '--docs', str(docs), '--workers', '0', '--no-weights'])
    assert '| AFT-simple | 2 | 1 | 60.00 | 60.00 | - | - | - |' in (docs / imagenette_page.PAGE).read_text()


def test_the_tables_have_the_figures_of_the_runs(data, docs, tmp_path, capsys):
    runs = [
        make_run(tmp_path / 'deit_seed0', data, 'deit_tiny_patch16_224', DEIT, [(40.0, 40.0), (59.0, 60.0)], answer=1),
        make_run(tmp_path / 'deit_seed1', data, 'deit_tiny_patch16_224', DEIT, [(40.0, 40.0), (61.0, 62.0)], answer=1),
        make_run(tmp_path / 'simple_seed0', data, 'aft_simple_nano', SIMPLE, [(61.0, 50.0), (69.0, 71.0)], answer=1),
        make_run(tmp_path / 'simple_seed1', data, 'aft_simple_nano', SIMPLE, [(59.0, 50.0), (71.0, 75.0)], answer=2),
    ]
    publish.main([*map(str, runs), '--docs', str(docs), '--workers', '0', '--no-weights'])
    text = (docs / imagenette_page.PAGE).read_text()
    # Differences of 11 and 13: t = 12 with one degree of freedom.
    assert '| DeiT | 2 | 2 | 60.00 +- 1.41 | 61.00 +- 1.41 | - | - | - |' in text
    assert '| AFT-simple | 2 | 2 | 70.00 +- 1.41 | 73.00 +- 2.83 | +12.00 | 0.053 | 1.000, 1.000 |' in text
    # 60 s at 10 and 30 s at 20 images/s; 60 % after the first and the second epoch, 75 % in one run only.
    assert re.search(r'\| AFT-simple \| 2 \| 8,906 \| 0\.008 \| 13 \| 701 \| 75 \| 90 \| - \|', text)
    assert '](data/imagenette/simple_seed1)' in text
    assert (docs.parent / 'images' / imagenette_page.PICTURE).is_file()
    assert not list(docs.rglob('*.safetensors'))
    publish.main(['--docs', str(docs)])
    assert (docs / imagenette_page.PAGE).read_text() == text


def test_ablations_are_kept_apart_and_compared_with_the_row_without_the_change(data, docs, tmp_path):
    (docs / ablation_page.PAGE).write_text(PAGE)
    names = {'conv_k11': (60.0, 1), 'conv_k7': (61.0, 1), 'conv_k7_raw': (58.5, 2), 'conv_k3': (57.0, 1)}
    runs = [
        make_run(tmp_path / f'{name}_seed0', data, 'aft_simple_nano', SIMPLE, [(50.0, top1)], answer)
        for name, (top1, answer) in names.items()
    ]
    publish.main([*map(str, runs), '--docs', str(docs), '--workers', '0', '--ablation'])
    assert 'No run has been published yet.' in (docs / imagenette_page.PAGE).read_text()
    assert not list(docs.rglob('*.safetensors'))
    text = (docs / ablation_page.PAGE).read_text()
    titles = [
        line.split(' | ')[0].strip('| ') for line in text.splitlines() if line.startswith('| ') and '%' not in line
    ]
    assert titles == [ablation_page.CHANGES[name].title for name in ('conv_k11', 'conv_k3', 'conv_k7', 'conv_k7_raw')]
    assert '| 1 | 50.00 | 60.00 | - | - |' in text
    assert '| 1 | 50.00 | 57.00 | -3.00 | 1.000 |' in text
    # From kernel 7 with Eq. 8, not from the first row.
    assert '| 1 | 50.00 | 58.50 | -2.50 | 1.000 |' in text
    assert '](data/imagenette_ablations/conv_k3_seed0)' in text
    odd = make_run(tmp_path / 'conv_odd_seed0', data, 'aft_simple_nano', SIMPLE, [(50.0, 50.0)], answer=1)
    with pytest.raises(ValueError, match='got conv_odd'):
        publish.main([str(odd), '--docs', str(docs), '--workers', '0', '--ablation'])


def test_without_runs_the_page_says_so_and_shows_the_search(docs):
    search = docs / 'data' / 'imagenette_search'
    for rate, top1 in (('16e-3', 50.0), ('4e-3', 51.0)):
        (search / f'conv_{rate}.csv').write_text(f'epoch,eval_top1,eval_ema_top1\n0,1,1\n1,{top1},{top1 + 1}\n')
    publish.main(['--docs', str(docs)])
    text = (docs / imagenette_page.PAGE).read_text()
    assert 'No run has been published yet.' in text
    slower, faster = (text.index(f'| AFT-conv | [{rate}](data/imagenette_search/') for rate in ('4e-3', '16e-3'))
    assert slower < faster
    assert text.count('| 51.0 % | 52.0 % |') == text.count('| 50.0 % | 51.0 % |') == 1
    assert '\nwords\n' in text


def test_a_page_without_markers_is_an_error(docs):
    (docs / imagenette_page.PAGE).write_text('words')
    with pytest.raises(ValueError, match='one block from <!-- runs'):
        publish.main(['--docs', str(docs)])


def test_the_picture_joins_the_epochs_that_were_evaluated_and_dashes_longer_runs(data, docs, tmp_path):
    nan = float('nan')
    runs = [
        make_run(tmp_path / 'simple_seed0', data, 'aft_simple_nano', SIMPLE, [(20.0, 30.0)], answer=3),
        make_run(
            tmp_path / 'simple_3_seed0', data, 'aft_simple_nano', SIMPLE, [(9, 9), (nan, nan), (40, 50)], answer=3
        ),
    ]
    publish.main([*map(str, runs), '--docs', str(docs), '--workers', '0', '--no-weights'])
    figure = imagenette_page.draw_runs(imagenette_page.read_rows(docs / 'data' / 'imagenette'))
    short, long = figure.axes[0].get_lines()
    assert long.get_xydata().tolist() == [[1, 9], [3, 50]]
    assert figure.axes[1].get_lines()[1].get_xydata().tolist() == [[1, 9], [1 + 1 / 2 + 1 / 3, 50]]
    assert (short.get_linestyle(), long.get_linestyle()) == ('-', '--')
    assert short.get_color() == long.get_color()


def test_packaged_weights_are_those_of_the_run_and_have_a_card(data, docs, tmp_path, monkeypatch):
    run = make_run(tmp_path / 'conv_8e-3_seed0', data, 'aft_conv_nano', CONV, [(60.0, 65.0)], answer=3)
    (folder,) = publish.main([str(run), '--docs', str(docs), '--workers', '0', '--commit', 'abc'])
    result = json.loads((folder / 'result.json').read_text())
    result['top1_float16']['weights'] = 9.0
    (folder / 'result.json').write_text(json.dumps(result))
    path = package_weights.package(folder, tmp_path / 'weights')
    assert path.name == 'aft_conv_nano.imagenette.safetensors'
    assert path.read_bytes() == (folder / 'model.safetensors').read_bytes()
    card = path.with_suffix('.md').read_text()
    for words in (
        '10.00 % on the 10 images',
        'English springer',
        'non-commercial',
        'in float32, commit abc',
        'rate 0.008 per',
    ):
        assert words in card
    assert 'the better of weights (9.00 %) and average (10.00 %) on this split' in card
    assert '--config docs/results/data/imagenette/conv_seed0/config.yaml data.dir=' in card
    # The better of both may be the other one after rounding.
    result['top1_float16']['weights'] = 11.0
    (folder / 'result.json').write_text(json.dumps(result))
    card = package_weights.package(folder, tmp_path / 'weights').with_suffix('.md').read_text()
    assert 'the better of weights (11.00 %) and average (10.00 %) on this split before rounding to float16' in card
    config = yaml.safe_load((folder / 'config.yaml').read_text())
    before = {path.name: path.read_bytes() for path in path.parent.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(package_weights, 'model_card', lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            package_weights.package(folder, tmp_path / 'weights')
    assert {path.name: path.read_bytes() for path in path.parent.iterdir()} == before
    (tmp_path / 'weights' / 'aft_other.imagenette.safetensors').write_bytes(bytes(package_weights.MOST_BYTES))
    with pytest.raises(ValueError, match=r'at most 12,000,000 bytes in all'):
        package_weights.package(folder, tmp_path / 'weights')
    config['run']['init_from'] = 'deit.pth'
    (folder / 'config.yaml').write_text(yaml.safe_dump(config))
    assert 'imagenette.yaml from the weights of deit.pth, learning rate' in package_weights.model_card(folder, 'name')
    for key, value in (('val_share', 0.1), ('eval_split', 'test')):
        (folder / 'config.yaml').write_text(yaml.safe_dump({**config, 'data': {**config['data'], key: value}}))
        with pytest.raises(ValueError, match=f'on the official split, got .* with data.{key}={value}: train on all'):
            package_weights.package(folder, tmp_path / 'weights')


@pytest.mark.parametrize(
    ('name', 'kwargs', 'message'),
    [
        ('aft_conv_nano', {'depth': 1}, 'weights of the registered aft_conv_nano'),
        ('aft_conv_nano', {'act_layer': 'relu'}, 'arguments of the registered aft_conv_nano'),
        ('deit_tiny_patch16_224', DEIT, 'model of this package with a tag'),
    ],
)
def test_weights_of_another_model_are_not_packaged(name, kwargs, message, data, docs, tmp_path):
    run = make_run(tmp_path / 'other_seed0', data, name, kwargs, [(65.0, 60.0)], answer=3)
    (folder,) = publish.main([str(run), '--docs', str(docs), '--workers', '0'])
    with pytest.raises(ValueError, match=message):
        package_weights.package(folder, tmp_path / 'weights')
    assert not (tmp_path / 'weights').exists()


@pytest.mark.parametrize('content', ['', 'a: [', 'data: 4'])
def test_a_run_with_a_damaged_config_is_refused(data, docs, tmp_path, content):
    run = make_run(tmp_path / 'conv_seed0', data, 'aft_conv_nano', {'depth': 1}, [(60.0, 65.0)], answer=3)
    (run / 'config.yaml').write_text(content)
    with pytest.raises(ValueError, match=r'a run of train\.imagenet, got no sections in .*config\.yaml'):
        publish.main([str(run), '--docs', str(docs)])


def test_a_run_that_has_not_ended_is_refused(data, docs, tmp_path):
    run = make_run(tmp_path / 'conv_seed0', data, 'aft_conv_nano', {'depth': 1}, [(60.0, 65.0)], answer=3)
    config = yaml.safe_load((run / 'config.yaml').read_text())
    config['schedule']['epochs'] = 20
    (run / 'config.yaml').write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match=r'run of 20 epochs, got .*conv_seed0 after 1'):
        publish.main([str(run), '--docs', str(docs)])
    (run / 'summary.csv').write_text('epoch\n')
    change_config(run, 'schedule.epochs', 1)
    with pytest.raises(ValueError, match=r'figures of 1 epochs, got 0 in .*summary\.csv'):
        publish.main([str(run), '--docs', str(docs)])
    change_config(run, 'data.max_tokens', 576)
    with pytest.raises(
        ValueError, match=r'a run of squares.* data\.max_tokens=576: .* tools\.eval_resolution --native'
    ):
        publish.main([str(run), '--docs', str(docs)])
    (run / 'summary.csv').unlink()
    with pytest.raises(ValueError, match=r'got .*conv_seed0 without summary\.csv'):
        publish.main([str(run), '--docs', str(docs)])
    with pytest.raises(SystemExit):
        publish.parse_args([str(run), str(run), '--package'])


@pytest.mark.parametrize(('section', 'key'), [('augment', 'mixup'), ('data', 'img_size')])
def test_a_run_of_another_trainer_is_named_as_one(section, key, data, docs, tmp_path):
    run = make_run(tmp_path / 'conv_seed0', data, 'aft_conv_nano', {'depth': 1}, [(60.0, 65.0)], answer=3)
    config = yaml.safe_load((run / 'config.yaml').read_text())
    del config[section][key]
    (run / 'config.yaml').write_text(yaml.safe_dump({name: keys for name, keys in config.items() if keys}))
    with pytest.raises(ValueError, match=r'got .*conv_seed0, which is of another trainer'):
        publish.main([str(run), '--docs', str(docs)])


@pytest.mark.parametrize('row', ['a/b', '..', '/tmp/a'])
def test_a_row_is_one_folder(row, data, docs, tmp_path):
    run = make_run(tmp_path / 'conv_seed0', data, 'aft_conv_nano', {'depth': 1}, [(60.0, 65.0)], answer=3)
    with pytest.raises(ValueError, match=r'expected a row of letters, .* name it by --row'):
        publish.main([str(run), '--docs', str(docs), '--row', row])


def test_a_folder_among_the_runs_has_a_row_and_a_seed(docs):
    folder = docs / 'data' / 'imagenette' / 'conv_seed0_old'
    folder.mkdir(parents=True)
    (folder / 'result.json').write_text('{}')
    with pytest.raises(ValueError, match=r'names such as conv_seed0, got .*conv_seed0_old with a result'):
        publish.main(['--docs', str(docs)])
