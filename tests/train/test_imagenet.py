import csv
from pathlib import Path

import pytest
import timm
import torch

from aft_vision.evaluate import load_model
from train.imagenet import main

ROOT = Path(__file__).parents[2]
ONE_EPOCH = ['--quiet', '--config', str(ROOT / 'configs' / 'smoke' / 'one_epoch.yaml')]
DATA = f'data.dir={ROOT / "tests" / "assets" / "clothing"}'


@pytest.fixture(scope='module')
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('run')
    main([*ONE_EPOCH, DATA, f'run.dir={folder}'])
    return folder


def test_a_run_leaves_checkpoints_log_config_and_export(run_dir):
    names = {path.name for path in run_dir.iterdir()}
    assert names == {'best.pth', 'last.pth', 'summary.csv', 'config.yaml', 'export'}
    with (run_dir / 'summary.csv').open() as file:
        (row,) = csv.DictReader(file)
    assert 0 < float(row['train_loss']) < 4


def test_the_export_and_the_best_checkpoint_are_the_same_model(run_dir):
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    exported = timm.create_model(f'local-dir:{run_dir / "export"}', pretrained=True).eval()
    torch.testing.assert_close(exported(images), load_model(run_dir / 'best.pth')(images))
    assert exported.pretrained_cfg['input_size'] == (3, 32, 32)
    assert exported.pretrained_cfg['label_names'][-1] == 't-shirt'


def test_the_resolved_config_repeats_the_run_exactly(run_dir, tmp_path):
    main(['--quiet', '--config', str(run_dir / 'config.yaml'), f'run.dir={tmp_path}'])
    first, again = (torch.load(folder / 'last.pth', weights_only=True) for folder in (run_dir, tmp_path))
    torch.testing.assert_close(first['state_dict'], again['state_dict'], rtol=1e-5, atol=1e-6)


def test_a_folder_that_holds_a_run_is_left_alone(run_dir):
    before = (run_dir / 'last.pth').read_bytes()
    with pytest.raises(FileExistsError, match=r'run\.overwrite=true'):
        main([*ONE_EPOCH, DATA, f'run.dir={run_dir}'])
    assert (run_dir / 'last.pth').read_bytes() == before


def test_a_model_of_fixed_input_size_is_built_for_the_size_of_the_data(tmp_path):
    vit = ['model.name=vit_tiny_patch16_224', 'model.embed_dim=16', 'model.num_heads=1']
    (tmp_path / 'vit.yaml').write_text('model: {depth: 1, patch_size: 8}\naugment: {auto_augment: null}\n')
    overrides = [*vit, DATA, 'data.img_size=[16,24]', 'data.num_workers=0', 'data.batch_size=300']
    schedule = ['schedule.epochs=1', 'schedule.warmup_epochs=0', f'run.dir={tmp_path / "run"}']
    main(['--quiet', '--config', str(tmp_path / 'vit.yaml'), *overrides, *schedule])
    assert load_model(tmp_path / 'run' / 'best.pth').patch_embed.grid_size == (2, 3)


def test_an_argument_that_another_model_does_not_take_is_rejected(tmp_path):
    (tmp_path / 'vit.yaml').write_text('model: {name: vit_tiny_patch16_224, kernel_size: 3}\n')
    with pytest.raises(ValueError, match=r'model vit_tiny_patch16_224, got .*kernel_size'):
        main(['--config', str(tmp_path / 'vit.yaml'), DATA, 'data.num_workers=0', f'run.dir={tmp_path / "run"}'])
    assert not (tmp_path / 'run').exists()


def test_help_is_the_description_of_the_module(capsys):
    with pytest.raises(SystemExit):
        main(['--help'])
    assert 'python -m train.imagenet --config FILE' in capsys.readouterr().out
