import resource
import signal
from collections.abc import Iterator

import pytest
import timm
import torch

from train.checkpoint import export_model, save_checkpoint

TINY_VIT = dict(depth=1, embed_dim=16, num_heads=1, patch_size=8, img_size=(16, 24), num_classes=2)


def test_a_checkpoint_is_read_without_running_code(tmp_path):
    save_checkpoint({'state_dict': {'a': torch.ones(2)}, 'epoch': 3}, tmp_path / 'last.pth')
    content = torch.load(tmp_path / 'last.pth', weights_only=True)
    assert content['epoch'] == 3
    torch.testing.assert_close(content['state_dict']['a'], torch.ones(2))
    assert [path.name for path in tmp_path.iterdir()] == ['last.pth']


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file grows beyond 100 kB, as on a disk that becomes full while it is written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_previous_checkpoint_whole(tmp_path, full_disk):
    save_checkpoint({'epoch': 1}, tmp_path / 'last.pth')
    with pytest.raises(OSError, match=r'could not write .*last\.pth; what was there before is whole: .*too large'):
        save_checkpoint({'epoch': 2, 'state_dict': {'a': torch.zeros(100_000)}}, tmp_path / 'last.pth')
    assert torch.load(tmp_path / 'last.pth', weights_only=True) == {'epoch': 1}
    assert [path.name for path in tmp_path.iterdir()] == ['last.pth']


def test_the_content_reaches_the_disk_before_the_name(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr('os.fsync', lambda descriptor: events.append('fsync'))
    monkeypatch.setattr('os.replace', lambda source, target: events.append('replace'))
    save_checkpoint({'epoch': 1}, tmp_path / 'last.pth')
    assert events == ['fsync', 'replace', 'fsync']


def test_timm_loads_the_export_with_weights_classes_and_preprocessing(tmp_path):
    model = timm.create_model('vit_tiny_patch16_224', **TINY_VIT).eval()
    data_config = {'input_size': (3, 16, 24), 'crop_pct': 0.5, 'interpolation': 'bicubic'}
    export_model(model, tmp_path / 'export', ['boot', 'hat'], data_config)
    assert sorted(path.name for path in (tmp_path / 'export').iterdir()) == ['config.json', 'model.safetensors']
    loaded = timm.create_model(f'local-dir:{tmp_path / "export"}', pretrained=True).eval()
    images = torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loaded(images), model(images))
    assert loaded.pretrained_cfg['label_names'] == ['boot', 'hat']
    assert loaded.pretrained_cfg['crop_pct'] == 0.5


def test_an_export_that_fails_leaves_the_previous_one_whole(tmp_path, monkeypatch):
    model = timm.create_model('vit_tiny_patch16_224', **TINY_VIT)
    export_model(model, tmp_path / 'export', ['boot', 'hat'])
    before = {path.name: path.read_bytes() for path in (tmp_path / 'export').iterdir()}

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(timm.models, 'save_for_hf', fail)
    with pytest.raises(OSError, match='No space left'):
        export_model(model, tmp_path / 'export', ['other', 'names'])
    assert {path.name: path.read_bytes() for path in (tmp_path / 'export').iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ['export']
