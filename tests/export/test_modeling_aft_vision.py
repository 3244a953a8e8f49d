import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.data import create_transform, resolve_model_data_config

from aft_vision.export.hub import image_processor
from tests import helpers

pytest.importorskip('transformers')

from aft_vision.export.modeling_aft_vision import (
    AFTVisionConfig,
    AFTVisionForImageClassification,
    AFTVisionImageProcessor,
)


def load(folder: Path, num_labels: int | None = None, **kwargs: Any) -> Any:
    """Load a folder as transformers does with trust_remote_code=True."""
    config = AFTVisionConfig.from_pretrained(folder, **({'num_labels': num_labels} if num_labels else {}))
    return AFTVisionForImageClassification.from_pretrained(folder, config=config, trust_remote_code=True, **kwargs)


@pytest.fixture(scope='module')
def classifier(hub) -> Any:
    return load(hub[1])


def test_logits_are_those_of_the_model(hub):
    model, folder = hub
    classifier = load(folder, dtype='float32', device_map='cpu')
    images = helpers.randn(2, 3, 24, 40, dtype=torch.float32)
    helpers.assert_close(classifier(images).logits, model(images).detach(), 1e-5)
    assert not classifier.training
    assert classifier.config.id2label == {0: 'boot', 1: 'hat'}


def test_classes_without_names_have_numbers(hub, tmp_path):
    config = json.loads((hub[1] / 'config.json').read_text())
    del config['label_names']
    (tmp_path / 'config.json').write_text(json.dumps(config))
    assert AFTVisionConfig.from_pretrained(tmp_path).id2label == {0: 'LABEL_0', 1: 'LABEL_1'}


def test_usual_options_and_autocast_change_nothing(hub):
    model, folder = hub
    options = {'torch_dtype': torch.float32, 'device_map': 'auto', 'low_cpu_mem_usage': True}
    classifier = AFTVisionForImageClassification.from_pretrained(folder, **options).cpu()
    images = helpers.randn(2, 3, 24, 40, dtype=torch.float32).half()
    with torch.inference_mode(), torch.autocast('cpu', torch.bfloat16):
        logits = classifier(images).logits
    helpers.assert_close(logits, model(images.float()).detach(), 1e-5)


def test_a_program_moves_to_another_device_with_its_constants(hub):
    logits = load(hub[1], device_map='meta')(torch.zeros(2, 3, 24, 40, device='meta')).logits
    assert (logits.device.type, logits.shape) == ('meta', (2, 2))


@pytest.mark.parametrize(
    ('problem', 'labels', 'loss'),
    [
        (None, torch.tensor([1, 0]), F.cross_entropy),
        ('multi_label_classification', torch.tensor([[1.0, 1], [0, 1]]), F.binary_cross_entropy_with_logits),
        ('regression', torch.tensor([[0.5, 2], [-2.0, 1]]), F.mse_loss),
    ],
)
def test_the_loss_is_that_of_the_problem_type(classifier, monkeypatch, problem, labels, loss):
    monkeypatch.setattr(classifier.config, 'problem_type', problem)
    output = classifier(helpers.randn(2, 3, 32, 32, dtype=torch.float32), labels=labels)
    torch.testing.assert_close(output.loss, loss(output.logits, labels))


def test_what_a_program_cannot_do_is_rejected_with_the_way_out(hub):
    folder, images = hub[1], torch.zeros(1, 3, 32, 32)
    classifier = load(folder)
    for expected, call in {
        r'torch.float32, .* got torch.float16': lambda: load(folder, dtype='float16'),
        r'torch.float32, .* got torch.bfloat16': classifier.bfloat16,
        r'num_labels=2, .* got 5': lambda: load(folder, num_labels=5),
        'no quantization_config for model.pt2': lambda: load(folder, quantization_config={}),
        r'inference, got train\(\)': classifier.train,
        'inference, got tensors that require gradients': lambda: classifier(images.clone().requires_grad_()),
        r'a copy of the folder, got save_pretrained\(\)': lambda: classifier.save_pretrained(folder),
    }.items():
        with pytest.raises((ValueError, RuntimeError), match=f'expected {expected}.* `import aft_vision`'):
            call()
    classifier.requires_grad_(True)
    with pytest.raises(RuntimeError, match='require gradients'):
        classifier(images)


@pytest.mark.parametrize(('size', 'config'), [((64, 64), {'crop_pct': 0.9}), ((48, 40), {'crop_mode': 'squash'})])
def test_the_image_processor_has_the_pixels_of_the_evaluation_transform(size, config):
    model = timm.create_model('aft_conv_nano', depth=1)
    model.pretrained_cfg.update(input_size=(3, *size), **config)
    processor = AFTVisionImageProcessor(**(image_processor(model, size) or {}))
    transform = create_transform(**resolve_model_data_config(model))
    for photograph in helpers.photographs(3, (71, 94)):
        got = torch.as_tensor(processor(photograph, return_tensors='pt').pixel_values[0])
        torch.testing.assert_close(got, transform(photograph), rtol=0, atol=1e-6)


@pytest.mark.parametrize('config', [{'crop_mode': 'border'}, {'input_size': (3, 32, 48)}, {'interpolation': 'random'}])
def test_a_transform_that_no_image_processor_has_has_none(config):
    model = timm.create_model('aft_conv_nano', depth=1)
    model.pretrained_cfg.update({'input_size': (3, 32, 32), **config})
    assert image_processor(model, model.pretrained_cfg['input_size'][1:]) is None
