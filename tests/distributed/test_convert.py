"""Several processes convert a ViT as one does."""

from pathlib import Path

import pytest
import timm
import torch
from helpers import digest, link_photographs, losses
from small_runs import run

from aft_vision.export import export_model
from train.convert_schema import STAGES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Those of a conversion of a ViT of one block, with two updates an epoch."""
    folder = link_photographs(tmp_path_factory.mktemp('convert'), 4, 1)
    torch.manual_seed(0)
    sizes = dict(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=10)
    vit = timm.create_model('vit_tiny_patch16_224', **sizes)
    export_model(vit, folder / 'vit', sorted(path.name for path in (folder / 'train').iterdir()))
    return [
        *('--quiet', '--config', str(ROOT / 'configs' / 'smoke' / 'convert.yaml'), f'distill.teacher={folder / "vit"}'),
        *(f'data.dir={folder}', 'data.batch_size=20', 'run.tensorboard=false', 'run.amp=none', 'run.cpu_threads=1'),
        *('model.drop_path_rate=0', 'ema.decay=0.9'),
    ]


@pytest.mark.slow
def test_two_processes_convert_as_one(arguments, tmp_path):
    for name, processes in (('one', 1), ('two', 2)):
        accumulate = f'optim.accumulate={2 // processes}'
        found = run([*arguments, accumulate, f'run.dir={tmp_path / name}'], processes, trainer='train.convert')
        assert found == [0] * processes
    for stage in STAGES:
        for row, expected in zip(*(losses(tmp_path / name / stage) for name in ('two', 'one')), strict=True):
            for column in ('train_loss', 'eval_loss'):
                assert float(row[column]) == pytest.approx(float(expected[column]), rel=1e-5), (stage, column)
    # A complete conversion stays as it is.
    before = [digest(tmp_path / 'two' / stage / 'last.pth') for stage in STAGES]
    again = [*arguments, 'optim.accumulate=1', 'run.resume=auto', f'run.dir={tmp_path / "two"}']
    assert run(again, 2, trainer='train.convert') == [0, 0]
    assert [digest(tmp_path / 'two' / stage / 'last.pth') for stage in STAGES] == before
