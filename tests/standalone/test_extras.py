"""Scripts see our models, and need the four dependencies alone: extras are imported where they are used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import timm
import torch
from helpers import link_photographs
from timm.data import create_dataset, create_transform, resolve_data_config

ROOT = Path(__file__).parents[2]
# Every distribution of the extras, by the name it is imported under, but for tqdm and safetensors: timm needs both.
BLOCKED = (
    *('omegaconf', 'tensorboard', 'tensorboardX', 'matplotlib', 'ffcv', 'onnx', 'onnxscript', 'onnxruntime'),
    *('transformers', 'tokenizers', 'datasets', 'nltk', 'rouge_score', 'sklearn', 'pandas', 'pytest'),
)
WITHOUT_EXTRAS = f"""
import sys

class WithoutExtras:
    # A finder that finds all but the blocked modules: they are as absent for torch's probes as for an import.
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition('.')[0] in {BLOCKED!r} else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [WithoutExtras(finder) for finder in sys.meta_path]
"""
# In the manner of timm's validate.py.
SCRIPT = """
import argparse
import json

import timm
import torch
from neighbour import LOADER_OPTIONS
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.utils import accuracy

parser = argparse.ArgumentParser()
parser.add_argument('data_dir')
parser.add_argument('--model', '-m')
parser.add_argument('--img-size', type=int)
args = parser.parse_args()

if __name__ == '__main__':
    timm.create_model('aft_full_tiny', depth=1)
    torch.manual_seed(0)
    model = timm.create_model(args.model, num_classes=2, depth=1).eval()
    config = resolve_data_config(vars(args), model=model)
    dataset = create_dataset('', root=args.data_dir, split='validation')
    options = dict(is_training=False, device=torch.device('cpu'), **LOADER_OPTIONS)
    loader = create_loader(dataset, config['input_size'], 2, **options)
    correct = count = 0
    with torch.no_grad():
        for images, targets in loader:
            correct += accuracy(model(images), targets)[0].item() * len(images)
            count += len(images)
    print(json.dumps({'model': args.model, 'top1': correct / count, 'count': count, 'side': config['input_size'][-1]}))
"""


def run_without_extras(code: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter for which the extras are not installed."""
    command = [sys.executable, '-c', WITHOUT_EXTRAS + code, *arguments]
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_a_script_in_the_manner_of_timm_s_sees_our_models_without_the_extras(tmp_path):
    data = link_photographs(tmp_path / 'photographs', 1, 2, classes=2)
    script = tmp_path / 'scripts' / 'validate.py'
    script.parent.mkdir()
    script.write_text(SCRIPT)
    (script.parent / 'neighbour.py').write_text("LOADER_OPTIONS = {'num_workers': 1, 'use_prefetcher': False}\n")
    run = "import runpy; runpy.run_module('aft_vision', run_name='__main__', alter_sys=True)"
    done = run_without_extras(run, str(script), str(data), '--model', 'aft_conv_tiny', '--img-size', '32', cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result['model'], result['count'], result['side']) == ('aft_conv_tiny', 4, 32)
    torch.manual_seed(0)
    model = timm.create_model('aft_conv_tiny', num_classes=2, depth=1).eval()
    config = resolve_data_config({'img_size': 32}, model=model)
    dataset = create_dataset('', root=str(data), split='validation', transform=create_transform(**config))
    with torch.no_grad():
        correct = [model(image[None]).argmax().item() == target for image, target in dataset]
    assert result['top1'] == 100 * sum(correct) / len(correct)


def test_an_extra_cannot_be_imported_there():
    result = run_without_extras('import omegaconf')
    assert "ModuleNotFoundError: No module named 'omegaconf'" in result.stderr
