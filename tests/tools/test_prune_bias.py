import json
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from helpers import CLOTHING, link_photographs, randn, save_model

import aft_vision  # noqa: F401
from aft_vision.export import export_hub_folder
from aft_vision.models.checkpoint import load_model
from aft_vision.regularizers import prune
from tools.prune_bias import main

TINY = dict(depth=2, embed_dim=16, patch_size=8, num_classes=10)
CONV = dict(**TINY, num_heads=4, kernel_size=5)


def make_checkpoint(path: Path, name: str = 'aft_conv_tiny', **kwargs: object) -> Path:
    model = timm.create_model(name, **kwargs)
    for key, parameter in model.named_parameters():
        if 'kernel' in key:
            parameter.data.copy_(randn(*parameter.shape, scale=0.5))
    names = sorted(folder.name for folder in (CLOTHING / 'train').iterdir())
    preprocessing = {'input_size': (3, 32, 32), 'crop_pct': 0.9}
    return save_model(path, name, model, kwargs, class_names=names, data_config=preprocessing)


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty photographs to evaluate."""
    return link_photographs(tmp_path_factory.mktemp('photographs'), 0, 2)


@pytest.fixture
def run(data: Path) -> Callable[..., dict[str, object]]:
    """The command, by a checkpoint and other arguments."""
    return lambda path, *more: main(['--checkpoint', str(path), '--data', str(data), '--workers', '0', *more])


def test_each_threshold_gives_a_row_after_that_of_the_model_as_it_is(run, tmp_path, capsys):
    checkpoint = make_checkpoint(tmp_path / 'best.pth', **CONV)
    result = run(checkpoint, '--thresholds', '1e9', '0.2', '--keep-fraction', '0.1')
    rows = result['rows']
    assert [row['threshold'] for row in rows][:2] == [0.0, 0.2]
    assert rows[-1]['threshold'] == 1e9
    assert [rows[0]['sparsity'], rows[2]['sparsity'], rows[3]['sparsity']] == [0.0, pytest.approx(0.9), 1.0]
    assert [row['samples'] for row in rows] == [20] * 4
    assert rows[3]['madds_sparse'] == 0
    assert len(result['kernel_entropy_nats']) == len(rows[0]['offsets_by_layer']) == 2
    assert result['input_size'] == (3, 32, 32)
    assert json.loads((tmp_path / 'prune_bias.json').read_text())['rows'] == rows
    assert '100.00' in capsys.readouterr().out
    assert not (tmp_path / 'pruned').exists()


def test_the_rows_are_the_metrics_of_the_pruned_models(run, tmp_path, monkeypatch):
    checkpoint = make_checkpoint(tmp_path / 'best.pth', **CONV)
    evaluated = []

    def evaluate_all(models, loader, *args, **kwargs):
        evaluated.extend(models)
        assert next(iter(loader))[0].shape[2:] == (48, 32)
        return [{'top1': 10.0 * i, 'top5': 50.0, 'loss': 2.0, 'samples': 7} for i, _ in enumerate(models)]

    monkeypatch.setattr('tools.prune_bias.evaluate_all', evaluate_all)
    rows = run(checkpoint, '--thresholds', '0.2', '0.4', '--size', '48x32')['rows']
    assert [(row['threshold'], row['top1']) for row in rows] == [(0.0, 0.0), (0.2, 10.0), (0.4, 20.0)]
    for row, model in zip(rows, evaluated, strict=True):
        expected = prune(load_model(checkpoint), row['threshold'])
        assert torch.equal(model.blocks[1].attn.kernel(), expected.blocks[1].attn.kernel())


@pytest.mark.parametrize('gumbel', [False, True])
def test_the_saved_model_is_the_pruned_one_for_timm(run, gumbel: bool, tmp_path):
    checkpoint = make_checkpoint(tmp_path / 'best.pth', **CONV, gumbel=gumbel)
    out = tmp_path / 'out'
    run(checkpoint, '--thresholds', '0.3', '--save', '0.5', '--out', str(out))
    saved = timm.create_model(f'local-dir:{out / "pruned"}', pretrained=True).eval()
    images = randn(2, 3, 40, 64, dtype=torch.float32)
    with torch.no_grad():
        expected = prune(load_model(checkpoint), 0.5)(images)
        torch.testing.assert_close(saved(images), expected, rtol=1e-4, atol=1e-5)
    cfg = load_model(out / 'pruned').pretrained_cfg
    assert (tuple(cfg['input_size']), cfg['crop_pct']) == ((3, 32, 32), 0.9)
    assert cfg['label_names'] == load_model(checkpoint).pretrained_cfg['label_names']
    # It can be pruned further.
    again = run(out / 'pruned', '--thresholds', '0.5')['rows']
    assert again[0]['sparsity'] == again[1]['sparsity'] > 0


def test_the_card_of_another_model_in_the_folder_is_replaced(run, tmp_path):
    checkpoint = make_checkpoint(tmp_path / 'best.pth', **CONV)
    export_hub_folder(load_model(checkpoint), tmp_path / 'pruned', parts=[])
    before = (tmp_path / 'pruned' / 'README.md').read_text()
    options = ['--save', '1e9', '--size', '40x48', '--crop-pct', '0.8']
    with pytest.raises(FileExistsError, match='pruned, which exist; give --overwrite'):
        run(checkpoint, *options)
    run(checkpoint, *options, '--overwrite')
    card, pruned = (tmp_path / 'pruned' / 'README.md').read_text(), load_model(tmp_path / 'pruned')
    assert f'{sum(x.numel() for x in pruned.parameters()):,}' in card
    assert '40 x 48 pixels' in card
    assert 'crop 0.8,' in card
    assert card != before
