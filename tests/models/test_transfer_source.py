import argparse
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch

from aft_vision.evaluate import load_model
from aft_vision.models.transfer_source import load_pretrained
from tools import export, predict
from train import build
from train.distill import load_teacher
from train.schema import DistillConfig

VIT = 'deit_tiny_patch16_224'
SMALL = dict(depth=1, embed_dim=16, num_heads=1, img_size=32)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError('Name or service not known')

    monkeypatch.setattr('huggingface_hub.get_hf_file_metadata', fail)
    monkeypatch.setattr('huggingface_hub.try_to_load_from_cache', lambda *args: None)


@pytest.mark.parametrize(
    'load',
    [
        lambda: load_pretrained(VIT),
        lambda: predict.load_published(VIT),
        lambda: load_model(VIT),
        lambda: export.create(argparse.Namespace(model=VIT, pretrained=True, model_arg={})),
        lambda: build.build_model(VIT, {'pretrained': True}),
        lambda: load_teacher(DistillConfig(teacher=VIT), ['a', 'b'], [(224, 224)]),
    ],
    ids=['function', 'predict', 'checkpoint', 'export', 'training', 'teacher'],
)
def test_without_a_network_weights_are_refused_at_once(no_network, monkeypatch, load: Callable[[], Any]):
    # Which would try again for a minute.
    monkeypatch.setattr(timm, 'create_model', lambda *args, **kwargs: pytest.fail('it was loaded'))
    with pytest.raises(
        (ValueError, ConnectionError), match=rf'the weights of {VIT} from the network.*Name or'
    ) as error:
        load()
    assert '--source' not in str(error.value)


def test_weights_of_this_machine_need_no_network(no_network, tmp_path):
    model = timm.create_model(VIT, num_classes=3, **SMALL)
    torch.save(model.state_dict(), tmp_path / 'vit.pth')
    overlay = {'file': str(tmp_path / 'vit.pth'), 'num_classes': 3}
    loaded = load_pretrained(VIT, pretrained_cfg_overlay=overlay, num_classes=3, **SMALL)
    assert torch.equal(loaded.head.weight, model.head.weight)
    # It is no fault of the network that a file is missing, or of another shape.
    with pytest.raises(RuntimeError, match='size mismatch'):
        load_pretrained(VIT, pretrained_cfg_overlay=overlay, num_classes=3, **{**SMALL, 'embed_dim': 8})
    with pytest.raises(FileNotFoundError):
        load_pretrained(VIT, pretrained_cfg_overlay={'file': str(tmp_path / 'none.pth')}, **SMALL)
