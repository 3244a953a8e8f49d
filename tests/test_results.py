"""The pages of docs/results from their data, and runs that are kept there."""

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
import yaml
from helpers import draw_coarsely, load_script, make_folder

from aft_vision.models.checkpoint import load_model
from train.config import load_config, save_config
from train.sequence_schema import RecallConfig

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / 'docs' / 'results'
ORIGIN = ['--commit', 'abc', '--processor', 'That']
CLASSES = ['bird', 'cat', 'dog', 'fish']
build = load_script('docs/results/build.py')


@pytest.fixture(scope='module')
def photographs(tmp_path_factory) -> Path:
    """A data set of four grey images, one a class."""
    return make_folder(tmp_path_factory.mktemp('data'), {'val': CLASSES}, images=1, size=(32, 32))


def make_run(folder: Path, data: Path, epochs: int = 1) -> Path:
    """A run of two epochs whose average answers every image with class 3, and the end of one after `epochs`."""
    kwargs = dict(img_size=32, patch_size=8, embed_dim=16, depth=1, num_classes=4)
    weights = timm.create_model('aft_simple_tiny', **kwargs).state_dict()
    average = {key: torch.zeros_like(x) if key.startswith('head') else x for key, x in weights.items()}
    average['head.bias'][3] = 1.0
    content = {
        'model_name': 'aft_simple_tiny',
        'model_kwargs': kwargs,
        'class_names': CLASSES,
        'data_config': {'input_size': (3, 32, 32), 'crop_pct': 1.0, 'interpolation': 'bicubic'},
        'state_dict': weights,
        'ema_state_dict': average,
        'epoch': epochs,
    }
    config = {
        'data': {'dir': str(data), 'img_size': [32, 32], 'eval_img_size': None, 'batch_size': 3},
        'distill': {'teacher': 'local-dir:/home/me/deit'},
        'optim': {'lr': 0.008},
        'schedule': {'epochs': 1},
        'run': {'dir': str(folder), 'seed': 2, 'init_from': '/home/me/runs/a/best.pth'},
    }
    folder.mkdir()
    torch.save(content, folder / 'last.pth')
    (folder / 'config.yaml').write_text(yaml.safe_dump(config))
    (folder / 'summary.csv').write_text('epoch,eval_top1,eval_ema_top1\n0,60,65\n')
    return folder


def test_the_pages_and_pictures_are_made_of_the_kept_data(tmp_path, monkeypatch):
    draw_coarsely(monkeypatch)
    results = tmp_path / 'docs' / 'results'
    shutil.copytree(RESULTS, results, ignore=shutil.ignore_patterns('data'))
    (results / 'data').symlink_to(RESULTS / 'data')
    build.main([], results)
    for page in RESULTS.glob('*.md'):
        assert (results / page.name).read_text() == page.read_text(), page
    pictures = {path.name for path in (tmp_path / 'docs' / 'images').iterdir()}
    assert pictures == {'image_sizes.png', 'imagenette_runs.png', 'imagenette_sizes.png', 'tiny_imagenet_front.png'}
    # A row without its data is no longer on the page.
    (results / 'data').unlink()
    shutil.copytree(RESULTS / 'data', results / 'data', ignore=shutil.ignore_patterns('*.safetensors', 'conv_k3_*'))
    build.build_ablations(results)
    lines = [(path / 'ablations.md').read_text().splitlines() for path in (RESULTS, results)]
    assert [line[:12] for line in lines[0] if line not in lines[1]][:1] == ['| kernel 3 |']


def test_a_kept_run_has_its_answers_and_loads(photographs, tmp_path):
    run = make_run(tmp_path / 'simple_8e-3_seed2', photographs)
    build.keep_run(run, build.parse_args([str(run), *ORIGIN, '--weights']), tmp_path / 'kept')
    folder = tmp_path / 'kept' / 'simple_seed2'
    result = json.loads((folder / 'result.json').read_text())
    assert (result['best'], result['commit'], result['processor']) == ('average', 'abc', 'That')
    assert result['right']['average'] == '0001'
    assert result['top1_float16']['average'] == 25
    assert len(result['right']['weights']) == 4
    average = torch.load(run / 'last.pth', weights_only=True)['ema_state_dict']
    for key, x in load_model(folder).state_dict().items():
        assert torch.equal(x, average[key].half().float()), key
    assert (folder / 'summary.csv').read_text() == (run / 'summary.csv').read_text()
    # No place of the machine is kept.
    config = yaml.safe_load((folder / 'config.yaml').read_text())
    assert (config['data']['dir'], config['distill']['teacher']) == (photographs.name, 'local-dir:deit')
    assert config['run'] == {'dir': None, 'seed': 2, 'init_from': 'best.pth'}
    # Again, without weights: those of before are gone.
    build.keep_run(run, build.parse_args([str(run), *ORIGIN]), tmp_path / 'kept')
    assert sorted(path.name for path in folder.iterdir()) == ['config.yaml', 'result.json', 'summary.csv']


def test_a_run_that_cannot_be_kept_is_named(photographs, tmp_path):
    run = make_run(tmp_path / 'odd_seed2', photographs, epochs=0)
    args = build.parse_args([str(run), *ORIGIN, '--into', 'imagenette_ablations'])
    with pytest.raises(ValueError, match=r'expected a complete run, got .*odd_seed2 after 0 epochs'):
        build.keep_run(run, args, tmp_path)
    run = make_run(tmp_path / 'other_seed2', photographs)
    with pytest.raises(ValueError, match=r'named after one of conv_k11, .*, got .*other_seed2: rename it'):
        build.keep_run(run, args, tmp_path)


def make_recall(folder: Path, *overrides: str) -> Path:
    """Write the folder of a run as the trainer does: the resolved experiment and the result."""
    folder.mkdir()
    config = load_config(ROOT / 'configs' / 'small' / 'recall.yaml', list(overrides), RecallConfig)
    save_config(dataclasses.asdict(config), folder / 'config.yaml')
    result = {'valid_accuracy': 99.5, 'test_accuracy': 99.25, 'test_bits': 1.5, 'updates': 400, 'parameters': 137024}
    (folder / 'result.json').write_text(json.dumps(result))
    return folder


def test_a_run_of_recall_takes_the_place_of_the_same_setting(tmp_path):
    data = tmp_path / 'data' / 'recall'
    shutil.copytree(RESULTS / 'data' / 'recall', data)
    (tmp_path / 'recall.md').write_text('<!-- runs: written by make results -->\n<!-- end -->\n')
    before = build.read_csv(data / 'runs.csv')
    runs = [make_recall(tmp_path / 'same'), make_recall(tmp_path / 'new', 'optim.lr=2e-2')]
    for run in runs:
        build.keep_recall(run, build.parse_args([str(run), *ORIGIN]), data)
    rows = build.read_csv(data / 'runs.csv')
    assert len(rows) == len(before) + 1
    (kept,) = [row for row in rows if row['commit'] == 'abc' and row['lr'] == '0.003']
    assert (kept['mixer'], kept['test_accuracy'], kept['parameters']) == ('local', '99.25', '137024')
    build.build_recall(tmp_path)
    # Both have the best validation of their setting, in as many updates; the first one counts.
    assert '99.2, 1.50 bits (0.003, 400)' in (tmp_path / 'recall.md').read_text()
    with (data / 'runs.csv').open(newline='') as file:
        assert next(csv.reader(file)) == list(before[0])
    run = make_recall(tmp_path / 'deep', 'model.depth=3')
    with pytest.raises(ValueError, match=r'expected model\.depth=2 as in local\.yaml, got 3; leave it out'):
        build.keep_recall(run, build.parse_args([str(run), *ORIGIN]), data)


def test_an_evaluation_at_several_sizes_is_kept_without_its_places(tmp_path):
    sizes = [{'height': side, 'width': side, 'top1': 50.0, 'samples': 2500, 'seconds': 1.0} for side in (96, 128)]
    checkpoint = {'name': 'conv_seed1', 'checkpoint': '/home/me/conv', 'train_size': [96, 96], 'sizes': sizes}
    file = tmp_path / 'grid.json'
    file.write_text(json.dumps({'checkpoints': [checkpoint]}))
    build.keep_sizes(file, build.parse_args([str(file), '--images', 'squares', *ORIGIN]), tmp_path)
    kept = json.loads((tmp_path / 'squares.json').read_text())
    assert (kept['images'], kept['commit'], kept['processor']) == ('squares', 'abc', 'That')
    (run,) = kept['runs']
    assert (run['row'], run['seed'], run['train_size']) == ('conv', 1, [96, 96])
    assert run['sizes'][1] == {'height': 128, 'width': 128, 'top1': 50.0, 'samples': 2500}


def test_the_accuracy_of_tiny_imagenet_is_that_of_its_images_alone():
    run = build.Run('pico', 0, {}, [], {'right': {'weights': '0000', 'average': '1001'}})
    assert build.tiny_top1(run, [True, True, False, True]) == pytest.approx(200 / 3)
    with pytest.raises(ValueError, match='shorter'):
        build.tiny_top1(run, [True] * 3)


def test_mcnemar_counts_the_images_on_which_one_model_alone_is_right():
    # Five and none: 2 / 2 ** 5. Three and three; none.
    assert build.mcnemar([True] * 9, [False] * 5 + [True] * 4) == pytest.approx(2 / 2**5)
    assert build.mcnemar([True] * 3 + [False] * 3, [False] * 3 + [True] * 3) == 1
    assert build.mcnemar([True, False], [True, False]) == 1
