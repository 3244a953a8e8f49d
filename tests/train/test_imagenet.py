import csv
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import CLOTHING, link_photographs, make_folder, save_model
from PIL import Image
from timm.data import create_dataset, create_loader
from timm.utils import AverageMeter, accuracy

from aft_vision.models.checkpoint import load_model
from aft_vision.visualize import draw_history
from train import imagenet
from train.build import build_evaluation, resolve_images
from train.config import load_config
from train.distributed import World
from train.imagenet import describe_worst, main

ROOT = Path(__file__).parents[2]
FULL = ['model.name=aft_full_tiny', 'model.depth=1', 'model.embed_dim=32', 'model.patch_size=8']
ONE_EPOCH = ['--quiet', '--config', str(ROOT / 'configs' / 'smoke' / 'one_epoch.yaml')]
DATA = f'data.dir={ROOT / "tests" / "assets" / "clothing"}'


@pytest.fixture(scope='module')
def few(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments of six updates an epoch on a few of the photographs."""
    return [f'data.dir={link_photographs(tmp_path_factory.mktemp("photographs"), 8, 2)}', 'data.batch_size=12']


@pytest.fixture(scope='module')
def run_dir(few: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('run')
    main([*ONE_EPOCH, *few, f'run.dir={folder}'])
    return folder


def test_a_run_leaves_checkpoints_log_config_and_export(run_dir):
    names = {path.name for path in run_dir.iterdir()}
    files = {'best.pth', 'last.pth', 'summary.csv', 'curves.png', 'config.yaml'}
    assert names == files | {'export', 'tensorboard'}
    with (run_dir / 'summary.csv').open() as file:
        (row,) = csv.DictReader(file)
    assert 0 < float(row['train_loss']) < 4


def test_a_run_names_the_three_classes_that_its_best_weights_know_worst(few, run_dir, capsys):
    main([*ONE_EPOCH, *few, f'run.dir={run_dir}', 'run.resume=auto'])
    best, model = torch.load(run_dir / 'best.pth', weights_only=True), load_model(run_dir / 'best.pth')
    _, loader, _ = build_evaluation(load_config(ONE_EPOCH[-1], few), run_dir / 'best.pth', World(torch.device('cpu')))
    images, targets = map(torch.cat, zip(*loader, strict=True))
    with torch.no_grad():
        right = model(images).argmax(1) == targets
    counts = torch.stack([targets.bincount(minlength=10), targets[right].bincount(minlength=10)], dim=1)
    assert best['by_class'][:, :2].tolist() == counts.tolist()
    worst = describe_worst(best['class_names'], counts.tolist())
    assert worst.count(' of 2') == 3
    assert f'best top-1 {best["best_top1"]:.1f} %{worst}\n' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('counts', 'words'),
    [
        # Of equal classes, the one of more images is first; a class without images has no accuracy.
        (
            [[20, 1], [15, 0], [0, 0], [30, 0], [4, 3]],
            '; worst classes: d 0.0 % of 30, b 0.0 % of 15, a 5.0 % of 20',
        ),
        ([[2, 2], [1, 1], [0, 0], [0, 0], [0, 0]], '; worst classes: a 100.0 % of 2, b 100.0 % of 1'),
        ([[5, 3], [0, 0], [0, 0], [0, 0], [0, 0]], ''),
    ],
)
def test_classes_are_named_with_their_accuracy_and_images(counts, words):
    assert describe_worst('abcde', counts) == words


def test_the_export_and_the_best_checkpoint_are_the_same_model(run_dir):
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    exported = timm.create_model(f'local-dir:{run_dir / "export"}', pretrained=True).eval()
    torch.testing.assert_close(exported(images), load_model(run_dir / 'best.pth')(images))
    assert exported.pretrained_cfg['input_size'] == (3, 32, 32)
    assert exported.pretrained_cfg['label_names'][-1] == 't-shirt'


def test_the_resolved_config_repeats_the_run_exactly(run_dir, tmp_path):
    main(['--quiet', '--config', str(run_dir / 'config.yaml'), f'run.dir={tmp_path}'])
    first, again = (torch.load(folder / 'last.pth', weights_only=True) for folder in (run_dir, tmp_path))
    torch.testing.assert_close(first['state_dict'], again['state_dict'], rtol=0, atol=0)


def test_balanced_class_weights_put_each_class_equally_often_into_a_batch(few):
    config = load_config(ONE_EPOCH[-1], [*few, 'data.batch_size=20', 'data.class_weights=balanced'])
    loaders = imagenet.build_loaders(config, resolve_images(config), World(torch.device('cpu')))
    assert [targets.bincount(minlength=10).tolist() for _, targets in loaders.train] == [[2] * 10] * 4


def test_a_folder_that_holds_a_run_is_left_alone(few, run_dir):
    before = (run_dir / 'last.pth').read_bytes()
    with pytest.raises(FileExistsError, match=r'run\.overwrite=true'):
        main([*ONE_EPOCH, *few, f'run.dir={run_dir}'])
    assert (run_dir / 'last.pth').read_bytes() == before


def test_a_run_that_ended_while_another_began_is_left_alone(few, tmp_path, monkeypatch):
    folder, original = tmp_path / 'run', imagenet.build_loaders

    def build_loaders(config, images, world):
        if config.run.seed == 1:
            main([*ONE_EPOCH, *few, f'run.dir={folder}'])
        return original(config, images, world)

    monkeypatch.setattr(imagenet, 'build_loaders', build_loaders)
    with pytest.raises(FileExistsError, match=r'run\.overwrite=true'):
        main([*ONE_EPOCH, *few, f'run.dir={folder}', 'run.seed=1'])
    assert load_config(folder / 'config.yaml').run.seed == 0
    assert (folder / 'best.pth').exists()


def test_the_normalisation_of_training_is_that_of_the_saved_model(few, tmp_path):
    overlay = 'model.pretrained_cfg_overlay={mean: [0.1, 0.2, 0.3], std: [0.5, 0.6, 0.7]}'
    main([*ONE_EPOCH, *few, f'run.dir={tmp_path}', overlay])
    for model in (load_model(tmp_path), load_model(tmp_path / 'export')):
        assert tuple(model.pretrained_cfg['mean']) == (0.1, 0.2, 0.3)
        assert tuple(model.pretrained_cfg['std']) == (0.5, 0.6, 0.7)


def test_a_model_of_fixed_input_size_is_built_for_the_size_of_the_data(few, tmp_path):
    vit = 'model: {name: vit_tiny_patch16_224, depth: 1, embed_dim: 16, num_heads: 1, patch_size: 8}'
    (tmp_path / 'vit.yaml').write_text(f'{vit}\naugment: {{auto_augment: null}}\n')
    overrides = [*few, 'data.img_size=[16,24]', 'data.num_workers=0']
    schedule = ['schedule.epochs=1', 'schedule.warmup_epochs=0', f'run.dir={tmp_path / "run"}']
    main(['--quiet', '--config', str(tmp_path / 'vit.yaml'), *overrides, *schedule])
    assert load_model(tmp_path / 'run' / 'best.pth').patch_embed.grid_size == (2, 3)


def test_every_part_of_the_recipe_runs_together(few, tmp_path):
    config = ROOT / 'configs' / 'smoke' / 'deit_recipe.yaml'
    state = main(['--quiet', '--config', str(config), *few, f'run.dir={tmp_path}'])
    assert state.progress.updates == 12
    assert state.averaged_model is not None
    assert {'eval_top1', 'eval_ema_top1'} <= state.progress.history[-1].keys()
    last = torch.load(tmp_path / 'last.pth', weights_only=True)
    assert last['ema_state_dict'].keys() == last['state_dict'].keys()
    load_model(tmp_path / 'best.pth')


def test_a_run_starts_from_the_weights_of_another_which_are_read_once(few, run_dir, tmp_path, monkeypatch):
    read, load = [], torch.load

    def count(file: Any, **options: Any) -> Any:
        read.append(file)
        return load(file, **options)

    # The model has no weights of timm: those of the file come first.
    still = ['optim.lr=1e-30', 'schedule.min_lr=0', 'schedule.warmup_lr=0', 'model.pretrained=true']
    still += [f'run.init_from={run_dir / "best.pth"}', f'run.dir={tmp_path}']
    with monkeypatch.context() as patched:
        patched.setattr(torch, 'load', count)
        main([*ONE_EPOCH, *few, *still])
    assert read.count(run_dir / 'best.pth') == 1
    first, again = (torch.load(folder / 'last.pth', weights_only=True) for folder in (run_dir, tmp_path))
    torch.testing.assert_close(first['state_dict'], again['state_dict'])


def test_fine_tuning_with_frozen_layers_changes_only_a_new_classifier(tmp_path, capsys):
    images = link_photographs(tmp_path / 'images', 2, 0) / 'train'
    config, frozen = ROOT / 'configs' / 'finetune.yaml', 'optim.args.layer_decay_no_opt_scale=0.99'
    schedule = ['schedule.epochs=1', 'schedule.warmup_epochs=0', 'schedule.min_updates=3', 'run.throughput_batches=0']
    # Without batch normalisation, whose statistics would change.
    name, folder = 'model.name=aft_conv_nano', f'run.dir={tmp_path}'
    state = main(['--quiet', '--config', str(config), name, f'data.dir={images}', frozen, *schedule, folder])
    # A fifth of the 20 photographs is held out; the others make two updates of 8.
    said = capsys.readouterr()
    assert 'training: 16 images, 10 classes; validation: 4 images' in said.out
    assert 'schedule.epochs = 2 in place of 1' in said.err
    assert state.progress.updates == 4
    packaged, tuned = timm.create_model('aft_conv_nano', pretrained=True), load_model(tmp_path / 'last.pth')
    changed = {name for name, x in packaged.state_dict().items() if not torch.equal(x, tuned.state_dict()[name])}
    assert changed == {'head.weight', 'head.bias'}
    assert (tuned.head.weight - packaged.head.weight).abs().max() > 0.1
    assert tuned.pretrained_cfg['label_names'][0] == 'dress'
    assert (tuned.pretrained_cfg['input_size'], tuned.pretrained_cfg['crop_pct']) == ((3, 96, 96), 1.0)


def test_fine_tuning_keeps_the_size_and_the_normalisation_of_another_model_of_timm(tmp_path):
    images, file = link_photographs(tmp_path / 'images', 2, 1), tmp_path / 'vit.pth'
    torch.save(timm.create_model('test_vit').state_dict(), file)
    weights = ['model.name=test_vit', f'model.pretrained_cfg_overlay.file={file}', f'run.dir={tmp_path}']
    short = ['schedule.epochs=1', 'schedule.warmup_epochs=0', 'schedule.min_updates=0', 'run.throughput_batches=0']
    main(['--quiet', '--config', str(ROOT / 'configs' / 'finetune.yaml'), f'data.dir={images}', *weights, *short])
    own, tuned = timm.get_pretrained_cfg('test_vit'), load_model(tmp_path).pretrained_cfg
    for key in ('input_size', 'crop_pct', 'mean', 'std'):
        assert tuned[key] == getattr(own, key)


def test_a_run_keeps_the_normalisation_of_the_checkpoint_that_it_starts_from(few, run_dir, tmp_path):
    content = torch.load(run_dir / 'best.pth', weights_only=True)
    own = {'mean': (0.1, 0.2, 0.3), 'std': (0.4, 0.5, 0.6)}
    torch.save({**content, 'data_config': {**content['data_config'], **own}}, tmp_path / 'start.pth')
    start = [f'run.init_from={tmp_path / "start.pth"}', f'run.dir={tmp_path / "run"}']
    main([*ONE_EPOCH, *few, *start])
    tuned = load_model(tmp_path / 'run')
    assert {key: tuned.pretrained_cfg[key] for key in own} == own
    # Also its images, and those of an evaluation without run.init_from.
    world, config = World(torch.device('cpu')), load_config(ONE_EPOCH[-1], few)
    started = load_config(ONE_EPOCH[-1], [*few, *start])
    loaders = imagenet.build_loaders(started, resolve_images(started), world)
    _, evaluated, _ = build_evaluation(config, tmp_path / 'run', world)
    _, other, _ = build_evaluation(config, run_dir, world)
    wanted, found, different = (next(iter(each))[0] for each in (loaders.validation, evaluated, other))
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(different, wanted)


def test_where_the_first_weights_came_from_is_not_needed_to_load_the_run(few, run_dir, tmp_path):
    pretrained = ['model.pretrained=true', f'model.pretrained_cfg_overlay.file={run_dir / "export/model.safetensors"}']
    main([*ONE_EPOCH, *few, *pretrained, f'run.dir={tmp_path}'])
    kwargs = torch.load(tmp_path / 'best.pth', weights_only=True)['model_kwargs']
    assert not {'pretrained', 'pretrained_cfg_overlay'} & kwargs.keys()
    load_model(tmp_path / 'best.pth')


def test_a_corrupt_image_ends_the_run_or_is_skipped(tmp_path, caplog):
    folder = make_folder(tmp_path / 'images', {'train': ['a', 'b'], 'val': ['a', 'b']}, images=3)
    for split in ('train', 'val'):
        (folder / split / 'a' / '1.png').write_bytes(b'')
    more = ['data.batch_size=6', 'schedule.min_lr=0', f'run.dir={tmp_path / "run"}', 'run.overwrite=true']
    arguments = [*ONE_EPOCH, f'data.dir={folder}', *more]
    with pytest.raises(ValueError, match=r'train/a/1\.png'):
        main(arguments)
    main([*arguments, 'data.on_corrupt_image=skip'])
    assert 'train/a/1.png' in caplog.text
    assert 'val/a/1.png' in caplog.text


def test_a_batch_larger_than_the_data_set_is_rejected_also_in_parts(tmp_path):
    with pytest.raises(ValueError, match=r'batch_size must be in \[1, 600\], .* got 1200'):
        main([*ONE_EPOCH, DATA, 'data.batch_size=1200', 'optim.accumulate=4', f'run.dir={tmp_path / "run"}'])


def test_a_run_that_overwrites_another_leaves_nothing_of_it(few, tmp_path, monkeypatch):
    monkeypatch.setattr('train.imagenet.draw_history', draw_history)
    results = ('curves.png', 'eval_resolution.json', 'report.html')
    for name in ('best.pth', 'last-1.pth', *results, 'tensorboard/old', 'export/old'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('old')
    with pytest.raises(FileExistsError):
        main([*ONE_EPOCH, *few, f'run.dir={tmp_path}'])
    main([*ONE_EPOCH, *few, f'run.dir={tmp_path}', 'run.overwrite=true'])
    assert not [path for path in tmp_path.rglob('*') if path.is_file() and path.read_bytes() == b'old']
    assert Image.open(tmp_path / 'curves.png').width > 500
    # Its file neither overwrites this run nor another.
    with pytest.raises(FileExistsError, match=r'run\.overwrite=true'):
        main(['--quiet', '--config', str(tmp_path / 'config.yaml')])


def test_without_matplotlib_the_run_says_so_before_it_trains(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with pytest.raises(ImportError, match=r'aft-vision\[viz\]'):
        main([*ONE_EPOCH, DATA, f'run.dir={tmp_path / "run"}'])
    assert not (tmp_path / 'run').exists()


def test_without_tensorboard_the_run_says_how_to_get_it(few, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', None)
    with pytest.raises(ImportError, match=r'run\.tensorboard=false'):
        main([*ONE_EPOCH, *few, f'run.dir={tmp_path}'])
    main([*ONE_EPOCH, *few, 'run.tensorboard=false', f'run.dir={tmp_path}'])
    assert not (tmp_path / 'tensorboard').exists()


def untrained(tmp_path: Path) -> tuple[torch.nn.Module, list[str]]:
    """A ViT of timm with weights in a file, and the command line that evaluates it on the photographs."""
    torch.manual_seed(0)
    shape = dict(img_size=48, embed_dim=48, depth=2, num_heads=3, patch_size=8)
    model = timm.create_model('vit_tiny_patch16_224', num_classes=10, **shape).eval()
    torch.nn.init.normal_(model.head.weight)
    torch.save(model.state_dict(), tmp_path / 'vit.pth')
    keys = [f'{name}: {value}' for name, value in shape.items()]
    overlay = f'{{file: {tmp_path / "vit.pth"}, num_classes: 10}}'
    section = ', '.join(['name: vit_tiny_patch16_224', 'pretrained: true', f'pretrained_cfg_overlay: {overlay}', *keys])
    config = tmp_path / 'vit.yaml'
    config.write_text(
        f'model: {{{section}}}\n'
        f'data: {{dir: {ROOT / "tests/assets/clothing"}, img_size: [48, 48], batch_size: 30, num_workers: 0}}\n'
    )
    return model, ['--quiet', '--eval', '--config', str(config)]


@torch.inference_mode()
def test_evaluation_is_that_of_timms_script_image_for_image(tmp_path, capsys):
    model, arguments = untrained(tmp_path)
    # What timm's validate.py does.
    loader = create_loader(
        create_dataset('', str(ROOT / 'tests/assets/clothing'), split='validation'),
        input_size=(3, 48, 48),
        batch_size=64,
        use_prefetcher=False,
        interpolation='bicubic',
        mean=model.pretrained_cfg['mean'],
        std=model.pretrained_cfg['std'],
        crop_pct=0.875,
        num_workers=0,
    )
    meters = AverageMeter(), AverageMeter()
    wanted = []
    for images, targets in loader:
        wanted.append(model(images))
        for meter, value in zip(meters, accuracy(wanted[-1], targets, topk=(1, 5)), strict=True):
            meter.update(value.item(), len(images))
    assert main(arguments) is None
    shown = capsys.readouterr().out
    assert f'top-1 {meters[0].avg:.3f} %  top-5 {meters[1].avg:.3f} %' in shown
    assert 'images 200' in shown
    config = load_config(arguments[-1])
    evaluated, ours, _ = build_evaluation(config, None, World(torch.device('cpu')))
    found = torch.cat([evaluated.eval()(images) for images, _ in ours])
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-5, atol=1e-5)
    assert torch.equal(found.topk(5).indices, torch.cat(wanted).topk(5).indices)


def test_the_best_weights_of_a_run_are_evaluated(few, tmp_path, capsys):
    arguments = [*ONE_EPOCH, *few, f'run.dir={tmp_path}']
    with pytest.raises(ValueError, match=r'weights to evaluate: .*best\.pth, or those of run\.init_from, got none'):
        main([*arguments, '--eval'])
    state = main(arguments)
    capsys.readouterr()
    before = sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.rglob('*'))
    main([*arguments, '--eval'])
    assert f'top-1 {state.progress.best:.3f} %' in capsys.readouterr().out
    assert before == sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.rglob('*'))


def test_the_weights_of_a_run_are_evaluated_instead_of_those_that_it_started_from(tmp_path, capsys):
    images, start, tuned = link_photographs(tmp_path / 'images', 2, 2), tmp_path / 'start', tmp_path / 'tuned'
    model, _ = untrained(tmp_path)
    shape = dict(img_size=48, embed_dim=48, depth=2, num_heads=3, patch_size=8)
    names = sorted(path.name for path in (images / 'train').iterdir())
    for folder in (start, tuned):
        folder.mkdir()
        torch.nn.init.normal_(model.head.weight)
        save_model(folder / 'best.pth', 'vit_tiny_patch16_224', model, {**shape, 'num_classes': 10}, class_names=names)
    arguments = ['--quiet', '--eval', '--config', str(tmp_path / 'vit.yaml'), f'data.dir={images}']
    # With a file, as the config.yaml of the run records it.
    own = tmp_path / 'own.yaml'
    own.write_text(f'base: vit.yaml\nrun: {{init_from: {start}}}\n')
    evaluated = {
        tuned / 'best.pth': [[*arguments, f'run.dir={tuned}'], [*arguments, '--config', str(own), f'run.dir={tuned}']],
        start: [
            [*arguments, f'run.dir={tuned}', f'run.init_from={start}'],
            [*arguments, '--config', str(own), f'run.dir={tmp_path / "new"}'],
        ],
        tmp_path / 'vit.pth': [[*arguments, f'run.dir={tmp_path / "new"}']],
    }
    for weights, commands in evaluated.items():
        for command in commands:
            main(command)
            assert f'evaluates {weights}\n' in capsys.readouterr().out


def test_weights_of_other_classes_or_of_another_model_are_not_evaluated(run_dir, tmp_path):
    names = [path.name for path in (ROOT / 'tests/assets/clothing/train').iterdir()]
    renamed = make_folder(tmp_path / 'renamed', {'val': ['a', *sorted(names)[1:]]}, 1)
    arguments = [*ONE_EPOCH, '--eval', f'run.dir={tmp_path / "run"}']
    best = f'run.init_from={run_dir / "best.pth"}'
    with pytest.raises(
        ValueError,
        match=r'expected the classes of the model in .*, got a, where the model has dress; data\.match_classes=place',
    ):
        main([*arguments, best, f'data.dir={renamed}'])
    with pytest.raises(ValueError, match=r'best\.pth'):
        main([*arguments, best, DATA, 'model.depth=2'])
    fewer = make_folder(tmp_path / 'fewer', {'val': ['a', 'b']})
    _, untrained_arguments = untrained(tmp_path)
    with pytest.raises(ValueError, match=r'expected 10 classes in .*fewer, as many as the model has, got 2'):
        main([*untrained_arguments, f'data.dir={fewer}'])


NEW = 'a new classifier, as the data set has other classes'


@pytest.mark.parametrize('published', [False, True])
@pytest.mark.parametrize(
    ('names', 'more', 'rows', 'said'),
    [
        (['ant', 'cat', 'dog'], [], [0, 1, 2], ''),
        (['ant', 'bee', 'dog'], [], None, rf'{NEW} \(bee\) than the weights \(cat\); data.match_classes=place'),
        (['ant', 'bee', 'dog'], ['data.match_classes=place'], [0, 1, 2], ''),
        (['0', '1', '2'], [], [0, 1, 2], ''),
        (['ant', 'cat'], [], None, rf'{NEW} \(fewer\) than the weights \(dog\)'),
    ],
)
def test_a_classifier_of_other_classes_is_new_and_it_is_said(tmp_path, capsys, published, names, more, rows, said):
    started, weights = started_from(['ant', 'cat', 'dog'], names, published, tmp_path, more)
    found = capsys.readouterr().err
    assert re.search(said, found) if said else 'classifier' not in found
    if rows is not None:
        torch.testing.assert_close(started, weights[rows])
    else:
        assert len(started) == len(names)
        assert not torch.isclose(started, weights[: len(names)]).any()


@pytest.mark.parametrize('published', [False, True])
def test_a_classifier_of_the_same_classes_in_another_order_is_put_in_order(tmp_path, capsys, published):
    started, weights = started_from(['dog', 'ant', 'cat'], ['ant', 'cat', 'dog'], published, tmp_path)
    torch.testing.assert_close(started, weights[[1, 2, 0]])
    assert 'in the order of the classes' in capsys.readouterr().err


def started_from(
    trained: list[str], names: list[str], published: bool, folder: Path, more: Sequence[str] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """The classifier that a run on classes starts with, and that of weights of other classes."""
    data = make_folder(folder / 'data', {'train': names, 'val': names})
    shape = dict(img_size=32, embed_dim=24, depth=1, num_heads=1, patch_size=16)
    model = timm.create_model('vit_tiny_patch16_224', num_classes=len(trained), **shape)
    file = save_model(folder / 'x.pth', 'vit_tiny_patch16_224', model, {**shape, 'num_classes': 3}, class_names=trained)
    start = [f'run.init_from={file}']
    if published:
        torch.save(model.state_dict(), file)
        overlay = f'{{file: {file}, num_classes: {len(trained)}, label_names: [{", ".join(trained)}]}}'
        start = ['model.pretrained=true', f'model.pretrained_cfg_overlay={overlay}']
    keys = [f'model.{name}={value}' for name, value in shape.items()]
    keys += ['model.name=vit_tiny_patch16_224', f'data.dir={data}', 'data.batch_size=2', 'data.num_workers=0']
    config, world = load_config(ONE_EPOCH[-1], [*keys, *start, *more]), World(torch.device('cpu'))
    images = resolve_images(config)
    state, _ = imagenet.build_state(config, images, imagenet.build_loaders(config, images, world), world)
    return state.model.head.weight.detach(), model.head.weight.detach()


def test_published_weights_of_other_classes_are_not_evaluated(tmp_path):
    arguments = ['--quiet', '--eval', '--config', str(ROOT / 'configs' / 'finetune.yaml'), 'run.reset_head=false']
    with pytest.raises(ValueError, match='got dress, hat, longsleeve and 7 more, where the model has n01440764'):
        main([*arguments, DATA, f'run.dir={tmp_path}'])


def test_some_classes_of_the_weights_in_any_order_are_evaluated_among_themselves(run_dir, tmp_path, capsys):
    shoes, dress = (CLOTHING / 'validation' / name for name in ('shoes', 'dress'))
    (tmp_path / 'val').mkdir()
    for source in (shoes, dress):
        (tmp_path / 'val' / source.name).symlink_to(source)
    main([*ONE_EPOCH, '--eval', f'run.init_from={run_dir}', f'data.dir={tmp_path}', f'run.dir={tmp_path / "run"}'])
    printed = capsys.readouterr().out
    assert 'has 2 of the 10 classes of the model' in printed
    assert 'top-5' not in printed


def test_a_model_of_fixed_input_size_is_evaluated_at_another(few, tmp_path, capsys):
    fixed = [*ONE_EPOCH, *few, *FULL]
    main([*fixed, f'run.dir={tmp_path}'])
    main([*fixed, f'run.dir={tmp_path}', '--eval', 'data.img_size=[48,48]'])
    assert 'images 20' in capsys.readouterr().out


def test_several_sizes_need_a_model_that_takes_them(few, tmp_path):
    arguments = ['--quiet', '--config', str(ROOT / 'configs/smoke/one_epoch.yaml'), f'run.dir={tmp_path / "run"}']
    arguments += [*few, 'data.train_sizes=[32,48]', 'data.eval_img_size=[40,40]']
    with pytest.raises(ValueError, match=r'aft_full_tiny has a fixed one, got .*dynamic_img_size=true'):
        main([*arguments, *FULL])
    for model in ([], [*FULL, 'model.dynamic_img_size=true']):
        state = main([*arguments, 'run.overwrite=true', *model])
        assert state.progress.updates == 6
        assert torch.isfinite(torch.tensor(state.progress.history[0]['eval_loss']))
    exported = json.loads((tmp_path / 'run' / 'export' / 'config.json').read_text())
    assert exported['pretrained_cfg']['input_size'] == [3, 40, 40]
