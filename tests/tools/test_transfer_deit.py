import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import CLOTHING, generator, link_photographs
from safetensors.torch import save_file
from torch import nn

from aft_vision.export import export_model
from aft_vision.models.checkpoint import load_model, load_source
from tools.transfer_deit import main
from train import imagenet

VIT: dict[str, Any] = dict(embed_dim=32, depth=1, num_heads=2, patch_size=8, img_size=32)
AFT = ['depth=1', 'embed_dim=32', 'num_heads=8', 'kernel_size=3', 'patch_size=8']
NAMES = [path.name for path in sorted((CLOTHING / 'train').iterdir())]
ONE_EPOCH = Path(__file__).parents[2] / 'configs' / 'smoke' / 'one_epoch.yaml'


def make_vit(name: str = 'deit_tiny_patch16_224', **kwargs: Any) -> nn.Module:
    model = timm.create_model(name, **{**VIT, 'num_classes': 10, **kwargs})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator()), alpha=0.1)
    return model


def write(kind: str, folder: Path) -> tuple[Path, nn.Module]:
    """A source in one of the forms that there are, and its model."""
    model = make_vit()
    path = folder / f'source.{kind}'
    if kind == 'pth':
        torch.save({'model': model.state_dict()}, path)
    elif kind == 'safetensors':
        save_file(model.state_dict(), path)
    elif kind in ('checkpoint', 'run'):
        content = {'model_name': 'deit_tiny_patch16_224', 'model_kwargs': {**VIT, 'num_classes': 10}}
        content.update(state_dict=model.state_dict(), class_names=NAMES, data_config={'crop_pct': 0.7})
        file = path / 'best.pth' if kind == 'run' else path
        file.parent.mkdir(exist_ok=True)
        torch.save(content, file)
    else:
        export_model(model, path, NAMES, {'crop_pct': 0.7, 'mean': (0.5, 0.5, 0.5)})
    return path, model


def run(source: Path | str, out: Path, *arguments: str, model: str = 'aft_conv_tiny') -> dict[str, Any]:
    return main(['--source', str(source), '--model', model, '--model-arg', *AFT, '--out', str(out), *arguments])


@pytest.mark.parametrize('kind', ['pth', 'safetensors', 'checkpoint', 'run', 'folder'])
def test_every_form_of_a_source_makes_a_folder_that_loads(tmp_path, capsys, kind):
    source, vit = write(kind, tmp_path)
    result = run(source, tmp_path / 'out')
    model = load_model(tmp_path / 'out')
    assert torch.equal(model.blocks[0].attn.qkv.weight[-32:], vit.blocks[0].attn.qkv.weight[-32:])
    assert torch.equal(model.head.weight, vit.head.weight)
    cfg = model.pretrained_cfg
    known = kind in ('checkpoint', 'run', 'folder')
    assert list(cfg['label_names']) == (NAMES if known else [str(i) for i in range(10)])
    # Unknown, it is that of the registered model.
    assert cfg['crop_pct'] == (0.7 if known else 0.875)
    assert tuple(cfg['mean']) == ((0.5,) * 3 if kind == 'folder' else timm.data.IMAGENET_DEFAULT_MEAN)
    assert json.loads((tmp_path / 'out' / 'transfer_report.json').read_text()) == result
    assert set(result['tensors']) == set(vit.state_dict())
    printed = capsys.readouterr().out
    for row in result['table']:
        (line,) = [line for line in printed.splitlines() if line.startswith(f'{row["action"]:15}  {row["what"]} ')]
        assert f' {row["tensors"]}  ' in line
        assert f'{row["parameters"]:,}' in line
    assert f'the source has {sum(p.numel() for p in vit.parameters()):,} parameters' in printed


@pytest.mark.parametrize(
    ('kind', 'options', 'expected'),
    [
        ('folder', [], 'apache-2.0'),
        ('pth', [], 'unknown'),
        ('checkpoint', [], 'unknown'),
        ('pth', ['--license', 'cc-by-4.0'], 'cc-by-4.0'),
    ],
)
def test_the_licence_is_that_of_the_source_or_of_the_option(tmp_path, kind, options, expected):
    run(write(kind, tmp_path)[0], tmp_path / 'out', *options)
    assert f'license: {expected}\n' in (tmp_path / 'out' / 'README.md').read_text()
    found = json.loads((tmp_path / 'out' / 'config.json').read_text())['pretrained_cfg'].get('license', 'unknown')
    assert found == expected


def test_a_name_of_timm_is_made_with_its_weights(tmp_path, monkeypatch):
    vit, created = make_vit('vit_tiny_patch16_224'), []
    original = timm.create_model

    def create(name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
        if pretrained and name == 'vit_tiny_patch16_224':
            created.append(name)
            return vit
        return original(name, pretrained, **kwargs)

    monkeypatch.setattr(timm, 'create_model', create)
    run('vit_tiny_patch16_224', tmp_path / 'out')
    assert created == ['vit_tiny_patch16_224']
    model = load_model(tmp_path / 'out')
    assert torch.equal(model.norm.weight, vit.norm.weight)
    # Those of its AugReg weights, not those of AFT.
    assert tuple(model.pretrained_cfg['mean']) == (0.5, 0.5, 0.5)


def test_a_name_of_a_vit_that_norms_after_attention_is_refused(tmp_path, monkeypatch):
    vit = make_vit('vit_base_patch16_rpn_224')
    monkeypatch.setattr(timm, 'create_model', lambda *args, **kwargs: vit)
    with pytest.raises(ValueError, match='norm before attention and MLP, got vit_base_patch16_rpn_224 with ResPost'):
        load_source('vit_base_patch16_rpn_224')


def test_a_checkpoint_with_weights_under_another_key_is_read(tmp_path):
    vit = make_vit()
    torch.save({'model_name': 'deit_tiny_patch16_224', 'model': vit.state_dict()}, tmp_path / 'source.pth')
    source = load_source(tmp_path / 'source.pth')
    assert source.state_dict.keys() == vit.state_dict().keys()
    torch.save({'model_name': 'deit_tiny_patch16_224'}, tmp_path / 'source.pth')
    with pytest.raises(ValueError, match='a state dict, got model_name'):
        load_source(tmp_path / 'source.pth')


def test_a_folder_that_timm_refuses_is_named(tmp_path):
    source, vit = write('folder', tmp_path)
    (source / 'model.safetensors').unlink()
    torch.save({'state_dict': vit.state_dict(), 'args': Touch(tmp_path / 'executed')}, source / 'pytorch_model.bin')
    with pytest.raises(ValueError, match=r'that can be built, got local-dir:.*holds more than tensors') as error:
        load_source(source)
    assert 'weights_only' not in str(error.value)
    assert not (tmp_path / 'executed').exists()


def test_the_options_reach_the_model(tmp_path):
    source, vit = write('pth', tmp_path)
    arguments = '--model aft_full_tiny --num-classes 3 --size 48x64'.split()
    arguments += ['--model-arg', 'depth=1', 'embed_dim=32', 'patch_size=8']
    result = main(['--source', str(source), *arguments, '--out', str(tmp_path / 'out')])
    model = load_model(tmp_path / 'out')
    assert torch.equal(model.blocks[0].attn.qkv.weight[-32:], vit.blocks[0].attn.qkv.weight[-32:])
    assert model.head.weight.shape == (3, 32)
    assert model.pretrained_cfg['input_size'] == (3, 48, 64)
    assert list(model.pretrained_cfg['label_names']) == ['0', '1', '2']
    assert result['tensors']['pos_embed'][0]['note'] == '4 x 4 to 6 x 8 tokens'


def test_the_seed_decides_what_the_source_lacks(tmp_path):
    source, _ = write('pth', tmp_path)
    states = []
    for seed in ('0', '0', '1'):
        run(source, tmp_path / 'out', '--seed', seed)
        states.append(load_model(tmp_path / 'out').state_dict())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    assert not torch.equal(states[0]['blocks.0.attn.qkv.weight'], states[2]['blocks.0.attn.qkv.weight'])


def test_the_grid_of_a_source_is_that_of_its_images(tmp_path):
    vit = make_vit(img_size=(16, 64))
    content = {'model_name': 'deit_tiny_patch16_224', 'model_kwargs': {**VIT, 'img_size': [16, 64]}}
    torch.save({**content, 'state_dict': vit.state_dict()}, tmp_path / 'best.pth')
    assert load_source(tmp_path / 'best.pth').grid == (2, 8)
    export_model(vit, tmp_path / 'folder', NAMES)
    assert load_source(tmp_path / 'folder').grid == (2, 8)


def test_training_starts_from_the_transferred_weights(tmp_path):
    source, vit = write('checkpoint', tmp_path)
    start = tmp_path / 'start'
    run(source, start)
    still = 'optim.lr=1e-30 schedule.min_lr=0 schedule.warmup_lr=0 run.tensorboard=false'.split()
    data = [f'data.dir={link_photographs(tmp_path / "photographs", 2, 1)}', 'data.batch_size=20']
    places = [f'run.init_from={start}', f'run.dir={tmp_path / "run"}']
    imagenet.main(['--quiet', '--config', str(ONE_EPOCH), *data, *places, *still])
    state = torch.load(tmp_path / 'run' / 'last.pth', weights_only=True)['state_dict']
    copied = 'patch_embed.proj.weight blocks.0.attn.proj.bias blocks.0.mlp.fc1.weight norm.bias head.bias'
    for key in copied.split():
        torch.testing.assert_close(state[key], vit.state_dict()[key])
    torch.testing.assert_close(state['blocks.0.attn.qkv.weight'][-32:], vit.blocks[0].attn.qkv.weight[-32:])


def test_a_file_with_more_than_tensors_is_refused_with_a_way_out(tmp_path):
    vit, file = make_vit(), tmp_path / 'checkpoint.pth'
    torch.save({'model': vit.state_dict(), 'epoch': 299, 'args': argparse.Namespace(lr=5e-4)}, file)
    message = r'with argparse\.Namespace, and .*torch\.save\(timm\.models\.load_state_dict\(FILE, use_ema=False\)'
    with pytest.raises(ValueError, match=message):
        run(file, tmp_path / 'out')
    torch.save(timm.models.load_state_dict(str(file), use_ema=False), tmp_path / 'new.pth')
    run(tmp_path / 'new.pth', tmp_path / 'out')
    assert torch.equal(load_model(tmp_path / 'out').norm.weight, vit.norm.weight)


class Touch:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_in_a_file_is_executed(tmp_path):
    torch.save({'model': make_vit().state_dict(), 'other': Touch(tmp_path / 'executed')}, tmp_path / 'bad.pth')
    with pytest.raises(ValueError, match=r'bad\.pth with .*save only its weights'):
        run(tmp_path / 'bad.pth', tmp_path / 'out')
    overlay = dict(file=str(tmp_path / 'bad.pth'))
    with pytest.raises(RuntimeError, match='weights_only=True blocked'):
        timm.create_model('aft_conv_tiny', pretrained=True, pretrained_cfg_overlay=overlay)
    assert not (tmp_path / 'executed').exists()


@pytest.mark.parametrize(
    ('source', 'model', 'message'),
    [
        ('none.pth', 'aft_conv_tiny', r'got none\.pth, which does not exist'),
        ('deit_tinny_patch16_224', 'aft_conv_tiny', r'a file or .*, .* did you mean deit_tiny_patch16_224'),
        ('aft_conv_tiny', 'aft_conv_tiny', 'No pretrained weights exist for aft_conv_tiny'),
        ('source.pth', 'aft_conv_tinny', 'got aft_conv_tinny; did you mean aft_conv_tiny'),
        ('source.pth', 'aft_full_tiny', r'got aft_full_tiny with kernel_size=3, .*kernel_size'),
    ],
)
def test_a_wrong_name_is_named(tmp_path, monkeypatch, source, model, message):
    monkeypatch.chdir(tmp_path)
    write('pth', tmp_path)
    arguments = ['--source', source, '--model', model, '--model-arg', 'kernel_size=3', '--out', 'out']
    with pytest.raises(ValueError, match=message):
        main(arguments)
    assert not Path('out').exists()


def test_a_file_without_a_state_dict_is_named(tmp_path):
    torch.save([torch.ones(2)], tmp_path / 'list.pth')
    with pytest.raises(ValueError, match='a state dict, got a list'):
        run(tmp_path / 'list.pth', tmp_path / 'out')


def test_a_model_of_one_channel_has_a_mean_of_one(tmp_path):
    path, source = write('pth', tmp_path)
    command = ['--source', str(path), '--model', 'aft_conv_tiny', '--out', str(tmp_path / 'grey')]
    main([*command, '--model-arg', *AFT, 'in_chans=1'])
    model = load_model(tmp_path / 'grey')
    torch.testing.assert_close(model.patch_embed.proj.weight, source.patch_embed.proj.weight.sum(1, keepdim=True))
    assert len(model.pretrained_cfg['mean']) == 1


def test_the_export_of_a_run_is_not_replaced(tmp_path):
    path, _ = write('pth', tmp_path)
    (tmp_path / 'best.pth').touch()
    command = ['--source', str(path), '--model', 'aft_conv_tiny', '--out', str(tmp_path / 'export')]
    with pytest.raises(ValueError, match='another folder than the export of a run, got --out'):
        main([*command, '--model-arg', *AFT])
