"""Exported folders of image models load where neither this package nor timm is installed."""

import os
import subprocess
import sys
from typing import Any

import pytest
import timm
import torch
from timm.data import create_transform, resolve_model_data_config

from aft_vision.export import export_hub_folder
from tests import helpers

SMALL: dict[str, Any] = dict(depth=1, embed_dim=16, patch_size=8, num_classes=2)
MODELS: dict[str, dict[str, Any]] = {
    'aft_conv_tiny': dict(num_heads=4, kernel_size=3),
    'aft_full_tiny': dict(dynamic_img_size=True, img_size=(16, 24)),
}

# Loads folders where neither this package nor timm is installed, and saves what the models compute.
ALONE = """
import importlib.util, sys
folder, packages, results = sys.argv[1:]
sys.path.insert(0, packages)
assert not any(importlib.util.find_spec(name) for name in ('aft_vision', 'timm'))
import onnxruntime, torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification, pipeline

given, found = torch.load(f'{results}/given.pt'), {}
for name, inputs in given.items():
    path = f'{folder}/{name}'
    model = AutoModelForImageClassification.from_pretrained(path, trust_remote_code=True).eval()
    features = AutoModel.from_pretrained(path, trust_remote_code=True).eval()
    hub = torch.hub.load(path, name, source='local')
    with torch.no_grad():
        found[name] = [
            [model(images, mask).logits, hub(images, mask), features(images, mask).last_hidden_state]
            for images, mask in inputs
        ]
path = f'{folder}/aft_conv_tiny'
images = [images for images, mask in given['aft_conv_tiny'] if mask is None]
session = onnxruntime.InferenceSession(f'{path}/model.onnx')
found['onnx'] = [torch.tensor(session.run(None, {'images': x.numpy()})[0]) for x in images]
program = torch.export.load(f'{path}/model.pt2').module()
found['pt2'] = [program(x).detach() for x in images]
photograph = Image.open(f'{results}/photograph.png')
processor = AutoImageProcessor.from_pretrained(path, trust_remote_code=True)
found['pixels'] = torch.as_tensor(processor(photograph, return_tensors='pt').pixel_values)
classify = pipeline('image-classification', path, trust_remote_code=True)
found['scores'] = {x['label']: x['score'] for x in classify(photograph)}
model.save_pretrained(f'{results}/saved')
again = AutoModelForImageClassification.from_pretrained(f'{results}/saved', trust_remote_code=True).eval()
found['saved'] = again(inputs[0][0]).logits.detach()
torch.save(found, f'{results}/found.pt')
"""


@pytest.mark.slow
def test_folders_load_in_every_way(tmp_path):
    for name in ('transformers', 'onnx', 'onnxscript', 'onnxruntime'):
        pytest.importorskip(name)
    for name in ('packages', 'results', 'home', 'folders'):
        (tmp_path / name).mkdir()
    models: dict[str, Any] = {}
    given = {}
    for name, more in MODELS.items():
        model = models[name] = timm.create_model(name, **SMALL, **more).eval()
        size = (32, 32) if name == 'aft_conv_tiny' else (16, 24)
        model.pretrained_cfg.update(label_names=['boot', 'hat'], input_size=(3, *size), crop_pct=0.5)
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.add_(helpers.randn(*parameter.shape, seed=number, scale=0.1, dtype=torch.float32))
        # Programs have been compared with the model before they got their names; one of each is loaded here.
        parts = ['code', 'onnx', 'pt2'] if name == 'aft_conv_tiny' else ['code']
        export_hub_folder(model, tmp_path / 'folders' / name, parts=parts)
        small, large = (helpers.randn(2, 3, *size, dtype=torch.float32) for size in ((16, 24), (40, 32)))
        mask = torch.ones(2, 5, 4, dtype=torch.bool)
        mask[1, :, 3:] = mask[1, 4:] = False
        given[name] = [(small, None), (large, None), (large, mask)]
    torch.save(given, tmp_path / 'results' / 'given.pt')
    [photograph] = helpers.photographs(1, (70, 53))
    photograph.save(tmp_path / 'results' / 'photograph.png')

    needed = ['torch', 'torchvision', 'transformers', 'onnxruntime', 'safetensors', 'pillow']
    helpers.link_packages(tmp_path / 'packages', needed)
    arguments = [str(tmp_path / name) for name in ('folders', 'packages', 'results')]
    environment = {**os.environ, 'HF_HOME': str(tmp_path / 'home'), 'HF_HUB_OFFLINE': '1'}
    command = [sys.executable, '-I', '-S', '-c', ALONE, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / 'results' / 'found.pt')
    with torch.no_grad():
        for name, model in models.items():
            for (images, mask), (logits, hub, features) in zip(given[name], found[name], strict=True):
                helpers.assert_close(features, model.forward_features(images, mask), 1e-5, f'features of {name}')
                helpers.assert_close(logits, model(images, attn_mask=mask), 1e-5, f'logits of {name}')
                helpers.assert_close(hub, model(images, attn_mask=mask), 1e-5, f'torch.hub of {name}')
        model = models['aft_conv_tiny']
        for kind in ('onnx', 'pt2'):
            for (images, _), logits in zip(given['aft_conv_tiny'][:2], found[kind], strict=True):
                helpers.assert_close(logits, model(images), 1e-5, kind)
        pixels = create_transform(**resolve_model_data_config(model))(photograph).unsqueeze(0)
        torch.testing.assert_close(found['pixels'], pixels, rtol=0, atol=1e-6)
        expected = dict(zip(['boot', 'hat'], model(pixels).softmax(1)[0].tolist(), strict=True))
        assert found['scores'] == pytest.approx(expected, rel=1e-5)
        saved = models['aft_full_tiny'](given['aft_full_tiny'][0][0])
        helpers.assert_close(found['saved'], saved, 1e-5, 'saved again')
