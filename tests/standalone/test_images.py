"""Exported folders of image models run where neither this package nor timm is installed."""

import os
import subprocess
import sys

import pytest
import timm
import torch
from timm.data import create_transform, resolve_model_data_config

from aft_vision.export import export_hub_folder
from tests import helpers

ALONE = """
import importlib.util, sys
folder, packages = sys.argv[1:]
sys.path.insert(0, packages)
assert not any(importlib.util.find_spec(name) for name in ('aft_vision', 'timm'))
import onnxruntime, torch
from PIL import Image
from transformers import AutoModelForImageClassification, pipeline

hub = f'{folder}/aft_conv_tiny'
session = onnxruntime.InferenceSession(f'{hub}/model.onnx')
program = torch.export.load(f'{hub}/model.pt2').module()
given = torch.load(f'{folder}/given.pt')
model, pyramid = (
    AutoModelForImageClassification.from_pretrained(f'{folder}/{name}', trust_remote_code=True)
    for name in ('aft_conv_tiny', 'aft_pyramid_nano')
)
classify = pipeline('image-classification', model=hub, trust_remote_code=True)
found = {
    'aft_conv_tiny': [
        [torch.tensor(session.run(None, {'images': x.numpy()})[0]), program(x).detach(), model(x).logits] for x in given
    ],
    'aft_pyramid_nano': [[pyramid(x).logits] for x in given],
    'scores': {x['label']: x['score'] for x in classify(Image.open(f'{folder}/photograph.png'))},
}
torch.save(found, f'{folder}/found.pt')
"""


@pytest.mark.slow
def test_folders_compute_what_their_models_compute(tmp_path):
    for name in ('transformers', 'onnx', 'onnxscript', 'onnxruntime'):
        pytest.importorskip(name)
    # The logits of some initial weights nearly cancel.
    torch.manual_seed(0)
    small = dict(depth=1, embed_dim=16, patch_size=8, num_heads=4, kernel_size=3)
    models = {
        'aft_conv_tiny': timm.create_model('aft_conv_tiny', num_classes=2, **small).eval(),
        'aft_pyramid_nano': timm.create_model('aft_pyramid_nano', depths=(1, 1, 1, 1), num_classes=2).eval(),
    }
    for name, model in models.items():
        model.pretrained_cfg.update(label_names=['boot', 'hat'], input_size=(3, 48, 48), crop_pct=0.5)
        export_hub_folder(model, tmp_path / name, parts=['code', 'onnx'] if name == 'aft_conv_tiny' else ['code'])
    given = [helpers.randn(2, 3, *size, dtype=torch.float32) for size in ((40, 48), (64, 56))]
    torch.save(given, tmp_path / 'given.pt')
    [photograph] = helpers.photographs(1, (70, 53))
    photograph.save(tmp_path / 'photograph.png')
    (tmp_path / 'packages').mkdir()
    helpers.link_packages(tmp_path / 'packages', ['torch', 'torchvision', 'transformers', 'onnxruntime', 'pillow'])
    environment = {**os.environ, 'HF_HOME': str(tmp_path / 'home'), 'HF_HUB_OFFLINE': '1'}
    command = [sys.executable, '-I', '-S', '-c', ALONE, str(tmp_path), str(tmp_path / 'packages')]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / 'found.pt')
    for name, model in models.items():
        for images, ways in zip(given, found[name], strict=True):
            for logits in ways:
                helpers.assert_close(logits, model(images).detach(), 1e-5, name)
    model = models['aft_conv_tiny']
    pixels = create_transform(**resolve_model_data_config(model))(photograph).unsqueeze(0)
    expected = dict(zip(['boot', 'hat'], model(pixels).softmax(1)[0].tolist(), strict=True))
    assert found['scores'] == pytest.approx(expected, rel=1e-5)
