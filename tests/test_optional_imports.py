"""``import aft_vision`` needs its four dependencies alone; what an extra installs is imported where it is used."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Every distribution of the extras, by the name it is imported under, but for tqdm and safetensors: timm needs both.
BLOCKED = (
    *('omegaconf', 'tensorboard', 'tensorboardX', 'matplotlib', 'ffcv', 'onnx', 'onnxscript', 'onnxruntime'),
    *('transformers', 'tokenizers', 'datasets', 'nltk', 'rouge_score', 'sklearn', 'pandas', 'pytest'),
)
SCRIPT = f"""
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
CREATE = """
import aft_vision, timm
for name in ('aft_conv_tiny', 'aft_full_tiny'):
    timm.create_model(name, depth=2).eval()
"""


def run_blocked(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, '-c', SCRIPT + code], cwd=ROOT, capture_output=True, text=True)


def test_aft_vision_imports_and_builds_a_model_without_the_extras():
    result = run_blocked(CREATE)
    assert result.returncode == 0, result.stderr


def test_a_blocked_module_cannot_be_imported():
    result = run_blocked('import omegaconf')
    assert "ModuleNotFoundError: No module named 'omegaconf'" in result.stderr
