"""The programs of exported folders run where neither this package nor timm is installed."""

import os
import subprocess
import sys

import pytest
import timm
import torch

from aft_vision.export import export_hub_folder
from tests import helpers

ALONE = """
import importlib.util, sys
folder, packages = sys.argv[1:]
sys.path.insert(0, packages)
assert not any(importlib.util.find_spec(name) for name in ('aft_vision', 'timm'))
import onnxruntime, torch

session = onnxruntime.InferenceSession(f'{folder}/hub/model.onnx')
program = torch.export.load(f'{folder}/hub/model.pt2').module()
given = torch.load(f'{folder}/given.pt')
found = [[torch.tensor(session.run(None, {'images': x.numpy()})[0]), program(x).detach()] for x in given]
torch.save(found, f'{folder}/found.pt')
"""


@pytest.mark.slow
def test_programs_of_a_folder_compute_what_the_model_computes(tmp_path):
    for name in ('onnx', 'onnxscript', 'onnxruntime'):
        pytest.importorskip(name)
    model = timm.create_model('aft_conv_tiny', depth=1, embed_dim=16, patch_size=8, num_heads=4, kernel_size=3).eval()
    export_hub_folder(model, tmp_path / 'hub', (32, 32))
    given = [helpers.randn(2, 3, *size, dtype=torch.float32) for size in ((16, 24), (40, 32))]
    torch.save(given, tmp_path / 'given.pt')
    (tmp_path / 'packages').mkdir()
    helpers.link_packages(tmp_path / 'packages', ['torch', 'onnxruntime'])
    command = [sys.executable, '-I', '-S', '-c', ALONE, str(tmp_path), str(tmp_path / 'packages')]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for images, programs in zip(given, torch.load(tmp_path / 'found.pt'), strict=True):
        for logits in programs:
            helpers.assert_close(logits, model(images).detach(), 1e-5)
