"""A small ViT is converted in stages, each an ordinary run, and an interruption changes nothing."""

from pathlib import Path

import pytest
import timm
import torch
from helpers import digest, interrupt_at, link_photographs, losses

from aft_vision.evaluate import load_model
from aft_vision.export import export_model
from aft_vision.layers import AFTBlock
from aft_vision.models.attention_block import AttentionBlock
from train.config import load_config
from train.convert import main
from train.convert_schema import ConvertConfig

ROOT = Path(__file__).parents[2]
STAGES = ('blocks', 'features', 'labels')


@pytest.fixture(scope='module')
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Those of a conversion of a ViT of four blocks to an AFT-axial of two, with two updates an epoch."""
    folder = link_photographs(tmp_path_factory.mktemp('convert'), 8, 2)
    torch.manual_seed(0)
    sizes = dict(img_size=32, patch_size=8, embed_dim=64, depth=4, num_heads=2, num_classes=10)
    vit = timm.create_model('vit_tiny_patch16_224', **sizes)
    with torch.no_grad():
        for block in vit.blocks:
            # What a trained block adds is not small.
            block.attn.proj.weight.mul_(10)
            block.mlp.fc2.weight.mul_(10)
    export_model(vit, folder / 'vit', sorted(path.name for path in (folder / 'train').iterdir()))
    model = ['model.name=aft_axial_tiny', 'model.embed_dim=64', 'model.num_heads=4', 'model.depth=2']
    return [
        *('--quiet', '--config', str(ROOT / 'configs' / 'smoke' / 'convert.yaml'), *model, 'model.kernel_size=null'),
        *(f'distill.teacher={folder / "vit"}', f'data.dir={folder}', 'data.batch_size=40', 'run.tensorboard=false'),
        'ema.decay=0.9',
    ]


@pytest.fixture(scope='module')
def whole(arguments, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion with one block of attention."""
    folder = tmp_path_factory.mktemp('whole')
    main([*arguments, f'run.dir={folder}', 'convert.keep=1', 'convert.blocks_epochs=6', 'convert.blocks_lr=5e-2'])
    return folder


def test_the_error_of_the_blocks_falls_and_every_stage_goes_on_from_the_one_before(whole):
    errors = [float(row['train_loss']) for row in losses(whole / 'blocks')]
    assert errors[-1] < 0.7 * errors[0]
    starts = [load_config(whole / stage / 'config.yaml').run.init_from for stage in STAGES]
    assert starts == [str(whole / 'copy'), *(str(whole / stage / 'last.pth') for stage in STAGES[:2])]
    for before, after in zip(('copy', 'blocks'), ('blocks', 'features'), strict=True):
        # What a stage freezes, and what it has no reason to change, is that of the one before.
        first = whole / before / 'model.safetensors' if before == 'copy' else whole / before / 'last.pth'
        assert first.exists()
        assert (whole / after / 'export' / 'model.safetensors').exists()


def test_the_blocks_learn_alone_and_the_last_one_keeps_attention(whole):
    copied, aligned = load_model(whole / 'copy'), load_model(whole / 'blocks' / 'last.pth')
    assert [type(block) for block in aligned.blocks] == [AFTBlock, AttentionBlock]
    changed = {
        name.split('.')[0]
        for (name, x), y in zip(copied.named_parameters(), aligned.parameters(), strict=True)
        if not torch.equal(x, y)
    }
    assert changed == {'blocks'}


def test_the_copy_has_the_weights_of_the_last_block_of_each_pair(arguments, whole):
    vit = load_model(next(a for a in arguments if a.startswith('distill.teacher=')).partition('=')[2])
    copied = load_model(whole / 'copy')
    for block, source in zip(copied.blocks, vit.blocks[1::2], strict=True):
        assert torch.equal(block.mlp.fc1.weight, source.mlp.fc1.weight)
    assert torch.equal(copied.blocks[1].attn.qkv.weight, vit.blocks[3].attn.qkv.weight)
    assert torch.equal(copied.head.weight, vit.head.weight)


def test_a_conversion_stopped_by_a_signal_ends_as_if_it_had_not_been(arguments, tmp_path, monkeypatch, capsys):
    plain = [*arguments, 'convert.fine_tune=none']
    main([*plain, f'run.dir={tmp_path / "whole"}'])
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1)
        with pytest.raises(SystemExit):
            main([*plain, f'run.dir={tmp_path / "stopped"}'])
    assert torch.load(tmp_path / 'stopped' / 'blocks' / 'last.pth', weights_only=True)['updates'] == 1
    command = capsys.readouterr().out.rpartition(' --config ')[2].split()
    assert command[0] == str(tmp_path / 'stopped' / 'config.yaml')
    main(['--quiet', '--config', *command])
    assert sorted(path.name for path in (tmp_path / 'whole').iterdir()) == ['blocks', 'config.yaml', 'copy', 'features']
    for name in STAGES[:2]:
        ended, expected = (tmp_path / run / name for run in ('stopped', 'whole'))
        assert digest(ended / 'last.pth') == digest(expected / 'last.pth')
        assert losses(ended) == losses(expected)


@pytest.mark.parametrize(
    ('overrides', 'message'),
    [
        (['convert.keep=3'], r'convert\.keep to be at most the 2 blocks of aft_axial_tiny, got 3'),
        (['distill.teacher=null'], r'distill\.teacher to be the ViT to convert, got None'),
        (['run.init_from=x.pth'], r'run\.init_from to be null'),
        (['run.resume=x.pth'], r'run\.resume to be auto or null'),
        (['convert.blocks_epochs=-1'], r'convert\.blocks_epochs to be at least 0'),
        (['convert.keeps=1'], r'convert\.keep\b'),
        (['convert.blocks_epochs=0', 'convert.features_epochs=0', 'convert.fine_tune=none'], r'convert\.fine_tune'),
        (['model.depth=5'], r'a teacher of at least the 5 blocks of the model, got 4'),
        (['model.embed_dim=32'], r'width 32 and depth 2, as the model has, got width 64'),
    ],
)
def test_a_conversion_that_cannot_be_is_an_error(overrides, message, arguments, tmp_path):
    with pytest.raises(ValueError, match=message):
        main([*arguments, f'run.dir={tmp_path / "run"}', *overrides])


def test_a_pyramid_has_not_the_blocks_of_a_vit(arguments, tmp_path):
    plain = [argument for argument in arguments if not argument.startswith('model.')]
    with pytest.raises(ValueError, match='expected a vision transformer as the model, got a AFTPyramid'):
        main([*plain, 'model.name=aft_pyramid_nano', f'run.dir={tmp_path}'])


def test_the_stages_without_labels_ignore_them():
    config = load_config(ROOT / 'configs' / 'smoke' / 'convert.yaml', ['distill.task_loss_weight=0.5'], ConvertConfig)
    stages = config.stages()
    assert [stages[name].distill.kind for name in STAGES[:2]] == ['blocks', 'feature']
    assert stages['features'].distill.task_loss_weight == 0
    assert stages['labels'].distill.teacher is None
    assert stages['labels'].optim == config.optim
