from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import save_model
from timm.layers import resample_abs_pos_embed
from torch import nn

from aft_vision.models.checkpoint import initialize_model, load_model, load_source, read_checkpoint
from aft_vision.models.decoders import load_decoder
from aft_vision.models.transfer_source import build_model

TINY_VIT = dict(depth=1, embed_dim=16, num_heads=1, patch_size=8, img_size=16, num_classes=3)


def make_checkpoint(path: Path, **changes: object) -> nn.Module:
    model = timm.create_model('vit_tiny_patch16_224', **TINY_VIT).eval()
    content = {'model_name': 'vit_tiny_patch16_224', 'model_kwargs': TINY_VIT, 'state_dict': model.state_dict()}
    torch.save({**content, **changes}, path)
    return model


def test_a_checkpoint_gives_back_the_model(tmp_path):
    model = make_checkpoint(tmp_path / 'best.pth')
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    loaded = load_model(tmp_path / 'best.pth')
    assert not loaded.training
    torch.testing.assert_close(loaded(images), model(images))


@pytest.mark.parametrize('load', [load_model, load_decoder, load_source])
def test_a_run_without_a_best_checkpoint_names_its_newest(tmp_path, load):
    with pytest.raises(ValueError, match='expected') as error:
        load(tmp_path)
    assert 'newest' not in str(error.value)
    (tmp_path / 'last.pth').touch()
    with pytest.raises(ValueError, match=r'expected .*; its newest checkpoint is .*/last\.pth$'):
        load(tmp_path)


@pytest.mark.parametrize(
    ('place', 'message'),
    [('none.pth', r'a model with weights, got .*none\.pth, which does not exist'), ('.', r'config\.json')],
)
def test_what_is_not_there_is_named(tmp_path, place, message):
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / place)


@pytest.mark.parametrize('content', [0, 10, 2000, b'hello', b'PK' + bytes(range(256)), bytes(range(128, 256))])
def test_a_truncated_checkpoint_and_a_file_of_other_bytes_are_named(tmp_path, content):
    make_checkpoint(tmp_path / 'other.pth')
    whole = (tmp_path / 'other.pth').read_bytes()
    (tmp_path / 'other.pth').write_bytes(whole[:content] if isinstance(content, int) else content)
    with pytest.raises(ValueError, match=r'other\.pth, which is damaged or of another kind') as error:
        load_model(tmp_path / 'other.pth')
    # torch advises to execute its code.
    assert 'weights_only' not in str(error.value)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'state_dict': None}, r'a checkpoint with model_name.*wrong\.pth'),
        ({'model_name': 'vit_that_is_not'}, r'wrong\.pth: .*a model that can be built, got vit_that_is_not'),
        ({'model_name': 'aft_local_char'}, 'image classifier, got .* with aft_local_char, a .*character model'),
        ({'model_kwargs': {'kernel_size': 3}}, r'wrong\.pth: .*a model that can be built, .*kernel_size=3'),
    ],
)
def test_a_checkpoint_with_wrong_content_is_named(tmp_path, changes, message):
    make_checkpoint(tmp_path / 'wrong.pth', **changes)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / 'wrong.pth')


def test_an_argument_that_a_model_with_weights_does_not_have_is_named():
    with pytest.raises(ValueError, match='got aft_conv_nano with pretrained=True, kernel_sise=3: '):
        load_model('aft_conv_nano', kernel_sise=3)


@pytest.mark.parametrize('load', [load_model, load_source])
@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ('{"model_type": "bart"}', r'an image model in .*, got a config\.json of type bart without an architecture'),
        ('{}', r'an image model in .*best, got a config\.json without an architecture of timm$'),
        ('[1]', r'an exported model in .*best, got a damaged config\.json'),
        ('{"arch', r'an exported model in .*best, got a damaged config\.json: Unterminated string'),
    ],
)
def test_a_folder_of_another_model_is_named(tmp_path, load, content, message):
    (tmp_path / 'best').mkdir()
    (tmp_path / 'best' / 'config.json').write_text(content)
    with pytest.raises(ValueError, match=f'expected {message}'):
        load(tmp_path / 'best')


def test_a_loaded_model_knows_its_preprocessing_and_classes(tmp_path):
    make_checkpoint(tmp_path / 'best.pth', data_config={'crop_pct': 0.7}, class_names=['x', 'y', 'z'])
    cfg = load_model(tmp_path / 'best.pth').pretrained_cfg
    assert (cfg['crop_pct'], cfg['label_names']) == (0.7, ['x', 'y', 'z'])


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    torch.save({'model_name': nn.Linear(1, 1)}, tmp_path / 'pickled.pth')
    with pytest.raises(ValueError, match=r'pickled\.pth'):
        read_checkpoint(tmp_path / 'pickled.pth')


def make_vit(**changes: object) -> nn.Module:
    return timm.create_model('vit_tiny_patch16_224', **{**TINY_VIT, **changes})


@pytest.mark.parametrize('kind', ['checkpoint', 'folder'])
def test_a_model_starts_from_the_weights_of_a_checkpoint(tmp_path, kind):
    path = tmp_path / 'start'
    if kind == 'folder':
        trained = make_vit()
        timm.models.save_for_hf(trained, path, safe_serialization=True)
    else:
        trained = make_checkpoint(path)
    model = make_vit()
    initialize_model(model, path)
    torch.testing.assert_close(model.state_dict(), trained.state_dict())


def test_random_weights_have_no_licence_and_others_that_of_their_start(tmp_path):
    kwargs = dict(depth=1, embed_dim=16, num_heads=4, num_classes=2)
    model: Any = build_model('vit_tiny_patch16_224', **kwargs)
    # That of weights in timm, which this model does not have.
    assert timm.get_pretrained_cfg('vit_tiny_patch16_224').license
    assert 'license' not in model.pretrained_cfg
    file = save_model(tmp_path / 'best.pth', 'vit_tiny_patch16_224', model, kwargs, license='cc-by-4.0')
    initialize_model(model, file)
    assert [each.pretrained_cfg['license'] for each in (model, load_model(file))] == ['cc-by-4.0'] * 2
    packaged: Any = build_model('aft_conv_nano', pretrained=True)
    assert packaged.pretrained_cfg['license'] == 'other'


def test_position_parameters_of_another_size_are_resampled(tmp_path):
    trained = make_checkpoint(tmp_path / 'start.pth')
    model = make_vit(img_size=32)
    initialize_model(model, tmp_path / 'start.pth')
    expected = resample_abs_pos_embed(trained.pos_embed, (4, 4), num_prefix_tokens=1)
    torch.testing.assert_close(model.pos_embed, expected)
    torch.testing.assert_close(model.head.weight, trained.head.weight)


@pytest.mark.parametrize('factorize', [True, False])
@pytest.mark.parametrize(('size', 'new'), [((16, 64), 32), ((16, 64), 24), ((16, 32), 24)])
def test_the_grid_of_an_aft_model_is_that_of_its_image_size(tmp_path, size, new, factorize):
    kwargs = dict(depth=1, embed_dim=16, patch_size=8, num_classes=3, factorize_bias=factorize)
    trained = timm.create_model('aft_full_tiny', **kwargs, img_size=size)
    save_model(tmp_path / 'start.pth', 'aft_full_tiny', trained, {**kwargs, 'img_size': size})
    timm.models.save_for_hf(trained, tmp_path / 'hub', safe_serialization=True)
    model = timm.create_model('aft_full_tiny', **kwargs, img_size=new)
    initialize_model(model, tmp_path / 'start.pth')
    trained.set_input_size(new)
    torch.testing.assert_close(model.state_dict(), trained.state_dict())
    # The same weights from a folder for the hub, and in one.
    loaded = timm.create_model(f'local-dir:{tmp_path / "hub"}', pretrained=True, img_size=new)
    torch.testing.assert_close(loaded.state_dict(), trained.state_dict())
    timm.models.save_for_hf(trained, tmp_path / 'resized', safe_serialization=True)


def test_another_number_of_classes_is_an_error_unless_the_head_is_reset(tmp_path):
    trained = make_checkpoint(tmp_path / 'start.pth')
    model = make_vit(num_classes=2)
    head = model.head.weight.clone()
    with pytest.raises(ValueError, match=r'with 2 classes, .* got .*start\.pth with 3; run\.reset_head=true'):
        initialize_model(model, tmp_path / 'start.pth')
    initialize_model(model, tmp_path / 'start.pth', reset_head=True)
    assert torch.equal(model.head.weight, head)
    torch.testing.assert_close(model.blocks.state_dict(), trained.blocks.state_dict())


def test_a_start_of_another_architecture_lists_the_first_differing_keys(tmp_path):
    kwargs = dict(depth=1, embed_dim=16, num_heads=4, kernel_size=3, num_classes=3)
    save_model(tmp_path / 'start.pth', 'aft_conv_tiny', timm.create_model('aft_conv_tiny', **kwargs), kwargs)
    with pytest.raises(ValueError, match=r'start\.pth: .*Missing key.*Unexpected key.*blocks\.0\.attn\.kernel'):
        initialize_model(make_vit(), tmp_path / 'start.pth')


def test_an_aft_model_starts_from_the_weights_of_a_vit(tmp_path, caplog):
    trained = make_checkpoint(tmp_path / 'start.pth')
    aft = dict(depth=1, embed_dim=16, num_heads=4, kernel_size=3, patch_size=8)
    for classes, reset in ((3, False), (2, True), (3, True)):
        model = timm.create_model('aft_conv_tiny', num_classes=classes, **aft)
        head = model.head.weight.clone()
        initialize_model(model, tmp_path / 'start.pth', reset_head=reset)
        assert torch.equal(model.head.weight, head if reset else trained.head.weight)
        torch.testing.assert_close(model.blocks[0].mlp.state_dict(), trained.blocks[0].mlp.state_dict())
        torch.testing.assert_close(model.blocks[0].attn.qkv.weight[-16:], trained.blocks[0].attn.qkv.weight[-16:])
    assert 'left out class token, position embedding, queries, keys' in caplog.text
    with pytest.raises(ValueError, match=r'with 2 classes, .* got .*start\.pth with 3; run\.reset_head=true'):
        initialize_model(timm.create_model('aft_conv_tiny', num_classes=2, **aft), tmp_path / 'start.pth')
    with pytest.raises(ValueError, match=r'start\.pth: .*Missing key'):
        initialize_model(
            timm.create_model('aft_conv_tiny', num_classes=3, **aft), tmp_path / 'start.pth', transfer=False
        )
    with pytest.raises(ValueError, match=r'start\.pth: expected weights of width 16 and depth 2, .* and depth 1'):
        initialize_model(
            timm.create_model('aft_conv_tiny', num_classes=3, **{**aft, 'depth': 2}), tmp_path / 'start.pth'
        )


def test_an_aft_simple_takes_no_queries_and_keys_of_a_vit(tmp_path):
    trained = make_checkpoint(tmp_path / 'start.pth')
    kwargs = {key: value for key, value in TINY_VIT.items() if key != 'num_heads'}
    model = timm.create_model('aft_simple_tiny', **kwargs)
    before = model.blocks[0].attn.qkv.weight.clone()
    initialize_model(model, tmp_path / 'start.pth')
    after = model.blocks[0].attn.qkv.weight
    assert torch.equal(after[:-16], before[:-16])
    assert torch.equal(after[-16:], trained.blocks[0].attn.qkv.weight[-16:])


@pytest.mark.parametrize('form', ['file', 'folder'])
def test_a_checkpoint_of_another_aft_model_is_not_taken_for_a_vit(tmp_path, form):
    kwargs = {key: value for key, value in TINY_VIT.items() if key != 'num_heads'}
    trained = timm.create_model('aft_simple_tiny', **kwargs)
    path = tmp_path / 'start'
    if form == 'folder':
        timm.models.save_for_hf(trained, path, model_args=kwargs, safe_serialization=True)
    else:
        save_model(path, 'aft_simple_tiny', trained, kwargs)
    model = timm.create_model('aft_conv_tiny', num_heads=4, kernel_size=3, **kwargs)
    with pytest.raises(ValueError, match=r'start: .*Missing key.*blocks\.0\.attn\.kernel'):
        initialize_model(model, path)


def test_the_stated_grid_of_a_vit_is_that_of_its_positions(tmp_path):
    vit = timm.create_model('vit_tiny_patch16_224', **{**TINY_VIT, 'img_size': (16, 64)})
    save_model(tmp_path / 'start.pth', 'vit_tiny_patch16_224', vit, {**TINY_VIT, 'img_size': [16, 64]})
    kwargs = {key: value for key, value in TINY_VIT.items() if key != 'num_heads'}
    model = timm.create_model('aft_full_tiny', **{**kwargs, 'img_size': 32})
    initialize_model(model, tmp_path / 'start.pth')
    wanted = resample_abs_pos_embed(vit.pos_embed, [4, 4], [2, 8], num_prefix_tokens=1)
    torch.testing.assert_close(model.pos_embed, wanted)
