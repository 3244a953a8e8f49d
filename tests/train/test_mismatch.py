from pathlib import Path

import pytest
import timm
import torch

from aft_vision.export import export_model
from aft_vision.models.decoders import create_decoder
from train import char, imagenet

ROOT = Path(__file__).parents[2]
CLOTHING = ROOT / 'tests' / 'assets' / 'clothing'
DATA = f'data.dir={CLOTHING}'


def test_packaged_weights_that_do_not_fit_name_the_keys_and_both_values(tmp_path):
    file = tmp_path / 'file.yaml'
    file.write_text('model: {name: aft_conv_nano, pretrained: true, depth: 4, drop_path_rate: 0.1}\n')
    data = [DATA, 'data.img_size=32', 'data.num_workers=0', 'data.match_classes=place']
    with pytest.raises(ValueError, match='expected a model that can be built') as error:
        imagenet.main(['--eval', '--config', str(file), *data])
    said = str(error.value)
    assert said.endswith('; model.depth = 4, where the weights have 6')


@pytest.mark.parametrize('source', ['export', 'checkpoint'])
def test_weights_to_start_from_that_do_not_fit_name_the_keys_and_both_values(tmp_path, source):
    sizes = dict(depth=1, embed_dim=32, num_heads=8, kernel_size=3, patch_size=8, num_classes=10, drop_path_rate=0.2)
    model, classes = (
        timm.create_model('aft_conv_small', **sizes),
        sorted(path.name for path in (CLOTHING / 'train').iterdir()),
    )
    start = tmp_path / ('export' if source == 'export' else 'best.pth')
    if source == 'export':
        export_model(model, start, classes)
    else:
        record = {'model_name': 'aft_conv_small', 'model_kwargs': sizes, 'class_names': classes}
        torch.save({**record, 'state_dict': model.state_dict()}, start)
    config = [
        '--config',
        str(ROOT / 'configs/smoke/one_epoch.yaml'),
        DATA,
        'data.num_workers=0',
        f'run.init_from={start}',
    ]
    with pytest.raises(ValueError, match=f'{start.name}: expected weights of AFTVision') as error:
        imagenet.main([*config, f'run.dir={tmp_path / "run"}', 'model.embed_dim=16', 'model.kernel_size=5'])
    assert not (tmp_path / 'run').exists()
    _, *keys = str(error.value).split('; model.')
    here = {'name = aft_conv_tiny': 'aft_conv_small', 'embed_dim = 16': '32', 'kernel_size = 5': '3'}
    assert sorted(keys) == sorted(f'{key}, where the weights have {there}' for key, there in here.items())


def test_a_decoder_that_does_not_fit_names_the_keys_and_both_values(tmp_path):
    kwargs = dict(context=16, depth=2, dim=16, window=4, bias_dim=4, vocab_size=256)
    record = {'model_name': 'aft_local_char', 'model_kwargs': kwargs, 'class_names': []}
    torch.save({**record, 'state_dict': create_decoder('aft_local_char', **kwargs).state_dict()}, tmp_path / 'best.pth')
    (tmp_path / 'text').write_bytes(bytes(range(97, 123)) * 400)
    model = [
        *'model.dim=16 model.window=4 model.depth=1'.split(),
        f'run.init_from={tmp_path / "best.pth"}',
        *'data.context=16 data.eval_stride=null'.split(),
    ]
    config = ['--config', str(ROOT / 'configs/smoke/char.yaml'), f'data.file={tmp_path / "text"}', *model]
    with pytest.raises(ValueError, match='expected weights of AFTDecoder') as error:
        char.main([*config, f'run.dir={tmp_path / "run"}'])
    assert str(error.value).endswith('; model.depth = 1, where the weights have 2')
