from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch

from aft_vision.models.checkpoint import load_model
from aft_vision.models.transfer_source import build_model
from tools import export, predict
from train.distill import load_teacher

VIT = 'deit_tiny_patch16_224'
SMALL = dict(depth=1, embed_dim=16, num_heads=1, img_size=32)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError('Name or service not known')

    monkeypatch.setattr('timm.models._hub.hf_hub_download', fail)
    monkeypatch.setattr('timm.models._builder.load_state_dict_from_hf', fail)


@pytest.mark.parametrize(
    'load',
    [
        lambda: predict.load_published(VIT),
        lambda: load_model(VIT),
        lambda: export.main(['--model', VIT, '--pretrained', '--format', 'pt2', '--out', 'none.pt2']),
        lambda: build_model(VIT, pretrained=True),
        lambda: load_teacher(VIT, {}, ['a', 'b'], [(224, 224)]),
    ],
    ids=['predict', 'checkpoint', 'export', 'training', 'teacher'],
)
def test_without_a_network_the_missing_weights_are_named(no_network, load: Callable[[], Any]):
    with pytest.raises(
        (ValueError, ConnectionError), match=rf'the weights of {VIT} from the network.*Name or'
    ) as error:
        load()
    assert '--source' not in str(error.value)


def test_weights_of_this_machine_need_no_network(no_network, tmp_path):
    model = timm.create_model(VIT, num_classes=3, **SMALL)
    torch.save(model.state_dict(), tmp_path / 'vit.pth')
    overlay = {'file': str(tmp_path / 'vit.pth'), 'num_classes': 3}
    loaded = build_model(VIT, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=3, **SMALL)
    assert torch.equal(loaded.head.weight, model.head.weight)
    # It is no fault of the network that a file is of another shape.
    with pytest.raises(ValueError, match='size mismatch'):
        build_model(VIT, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=3, **{**SMALL, 'embed_dim': 8})


@pytest.mark.parametrize(
    ('name', 'kwargs', 'message'),
    [
        ('aft_conv_huge', {}, r'aft_conv_huge with no arguments: Unknown model'),
        ('aft_conv_tiny', {'patch_size': 0}, r'aft_conv_tiny with patch_size=0: integer division or modulo by zero'),
        ('aft_conv_tiny', {'depth': 1, 'kernel_size': 4}, r'aft_conv_tiny with depth=1, kernel_size=4: kernel_size'),
        (VIT, {'num_heads': 5}, rf'{VIT} with num_heads=5: dim should be divisible'),
        ('local-dir:none', {'pretrained': True}, r'local-dir:none with pretrained=True: Config file not found'),
    ],
)
def test_a_model_that_timm_does_not_build_is_named_with_its_arguments(name, kwargs, message):
    with pytest.raises(ValueError, match=f'expected a model that can be built, got {message}'):
        build_model(name, **kwargs)


def test_weights_of_another_depth_are_named_in_one_line():
    state = timm.create_model(VIT, depth=1).state_dict()
    overlay = {'state_dict': state}
    with pytest.raises(ValueError, match=r'Missing key\(s\) in state_dict: "blocks\.1\.norm1\.weight"') as caught:
        build_model(VIT, pretrained=True, pretrained_cfg_overlay=overlay, depth=2)
    assert '\n' not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ('suffix', 'content', 'message'),
    [(None, b'', 'FileNotFoundError'), ('.safetensors', b'cut', 'header'), ('.pth', b'cut', 'is damaged or')],
)
def test_a_file_of_weights_that_is_missing_or_damaged_is_named(tmp_path, suffix, content, message):
    file = tmp_path / f'weights{suffix}'
    if suffix:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"got {VIT} with pretrained=True, .*weights{suffix}'}}: .*{message}"):
        build_model(VIT, pretrained=True, pretrained_cfg_overlay={'file': str(file)})


@pytest.mark.parametrize('error', [MemoryError, torch.OutOfMemoryError, ImportError])
def test_an_error_that_is_not_about_the_arguments_is_passed_on(monkeypatch, error):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(timm, 'create_model', fail)
    with pytest.raises(error):
        build_model(VIT)
