import json
from pathlib import Path

import pytest
import timm
import torch
from helpers import CLOTHING, link_photographs, randn, save_model
from torch import nn

from aft_vision.layers import AFTOnehot
from aft_vision.models.checkpoint import load_model
from tools.harden_gumbel import main
from train import imagenet

ROOT = Path(__file__).parents[2]
NAMES = [path.name for path in sorted((CLOTHING / 'validation').iterdir())]
TINY = dict(depth=2, embed_dim=16, patch_size=8, num_heads=4, kernel_size=5, num_classes=10)
PREPROCESSING = {'input_size': (3, 32, 32), 'crop_pct': 0.7, 'interpolation': 'bicubic'}


def make_checkpoint(path: Path, **kwargs: object) -> Path:
    """A checkpoint as the trainer writes it, of a model whose position biases matter."""
    kwargs = {**TINY, 'gumbel': True, **kwargs}
    torch.manual_seed(0)
    model = timm.create_model('aft_conv_tiny', **kwargs)
    for name, p in model.named_parameters():
        nn.init.normal_(p, std=1.5 if '.attn.kernel.' in name else 0.3)
    return save_model(path, 'aft_conv_tiny', model, kwargs, class_names=NAMES, data_config=PREPROCESSING)


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp('run') / 'best.pth')


@pytest.fixture(scope='module')
def exported(checkpoint: Path) -> Path:
    out = checkpoint.parent / 'onehot'
    main(['--checkpoint', str(checkpoint), '--out', str(out)])
    return out


def test_the_exported_folder_is_the_gumbel_model_with_its_classes_and_preprocessing(checkpoint, exported):
    restored, model = timm.create_model(f'local-dir:{exported}', pretrained=True).eval(), load_model(checkpoint)
    assert all(isinstance(block.attn, AFTOnehot) for block in restored.blocks)
    x = randn(2, 3, 40, 64, dtype=torch.float32)
    torch.testing.assert_close(restored(x), model(x))
    torch.testing.assert_close(load_model(exported)(x), model(x))
    for name in (*PREPROCESSING, 'mean', 'std', 'label_names'):
        assert json.dumps(restored.pretrained_cfg[name]) == json.dumps(model.pretrained_cfg[name]), name


def test_the_results_are_written(exported):
    result = json.loads((exported / 'harden_gumbel.json').read_text())
    assert result['parameters']['gumbel'] - result['parameters']['onehot'] == 2 * (4 * 25 + 4)
    assert f'{result["parameters"]["onehot"]:,}' in (exported / 'README.md').read_text()


def test_the_parameters_before_and_after_are_printed(checkpoint, tmp_path, capsys):
    result = main(['--checkpoint', str(checkpoint), '--out', str(tmp_path / 'a')])
    printed = capsys.readouterr().out.splitlines()
    before, after = result['parameters'].values()
    assert printed[0] == f'parameters: {before:,} before, {after:,} after ({100 * (after / before - 1):.1f} %)'


def test_the_trainer_goes_on_from_the_folder(exported, tmp_path):
    model = ['model.depth=2', 'model.embed_dim=16', 'model.num_heads=4', 'model.mixer=onehot', 'model.gumbel=null']
    photographs = link_photographs(tmp_path / 'photographs', 6, 2)
    run = [f'data.dir={photographs}', 'data.batch_size=20', f'run.dir={tmp_path / "run"}', f'run.init_from={exported}']
    averaged = ['optim.lr=0.01', 'ema.decay=0.9', 'ema.warmup=true']
    config = ROOT / 'configs' / 'smoke' / 'one_epoch.yaml'
    imagenet.main(['--quiet', '--config', str(config), *model, *run, *averaged])
    before, after = load_model(exported).state_dict(), load_model(tmp_path / 'run' / 'best.pth').state_dict()
    for i in range(2):
        assert torch.equal(after[f'blocks.{i}.attn.offset'], before[f'blocks.{i}.attn.offset'])
        assert not torch.equal(after[f'blocks.{i}.attn.weight'], before[f'blocks.{i}.attn.weight'])
    trained = load_model(tmp_path / 'run' / 'export')
    assert trained.blocks[1].attn.offset.any()


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        (dict(gumbel=False), "a model trained with gumbel=True .* got one of mixer='conv'"),
        (dict(gumbel=None, mixer='onehot'), "a model trained with gumbel=True .* got one of mixer='onehot'"),
        (dict(attention_blocks=[0, 1]), 'got one of mixer=None'),
    ],
)
def test_a_model_that_cannot_be_hardened_leaves_nothing_behind(tmp_path, kwargs, message):
    checkpoint = make_checkpoint(tmp_path / 'best.pth', **kwargs)
    with pytest.raises(ValueError, match=message):
        main(['--checkpoint', str(checkpoint), '--out', str(tmp_path / 'out')])
    assert not (tmp_path / 'out').exists()
