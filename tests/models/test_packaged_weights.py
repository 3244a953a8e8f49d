"""Weights inside the package: what is listed, and what timm makes of a file of float16 for another use."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from aft_vision.models.aft_pyramid import TINY_IMAGENET
from aft_vision.models.aft_vit import IMAGENETTE
from aft_vision.models.weight_files import PACKAGED, packaged_weights
from aft_vision.visualize import class_names

NANO = ('aft_conv_nano', 'aft_axial_nano', 'aft_full_nano', 'aft_simple_nano')
NAMES = (*NANO, 'aft_pyramid_pico')
CLASSES = {'imagenette': IMAGENETTE, 'tiny_imagenet': TINY_IMAGENET}
FILES = sorted(PACKAGED.glob('*.safetensors'))


@pytest.fixture(scope='module')
def file(tmp_path_factory) -> dict[str, Path]:
    """A file of weights in float16 for each of the models, none of which is as made."""
    found = {}
    for name in NAMES:
        torch.manual_seed(0)
        weights = {
            key: (x + 0.05 * torch.randn(x.shape)).half() if x.is_floating_point() else x
            for key, x in create(name).state_dict().items()
        }
        found[name] = tmp_path_factory.mktemp('weights') / f'{name}.safetensors'
        save_file(weights, found[name])
    return found


def create(name: str, file: Path | None = None, **kwargs) -> nn.Module:
    """A model as timm creates it with weights, were this file in the package."""
    weights = {} if file is None else dict(pretrained=True, pretrained_cfg_overlay={'file': str(file)})
    return timm.create_model(name, **weights, **kwargs).eval()


def images(channels: int = 3, side: int = 96) -> Tensor:
    return torch.randn(1, channels, side, side, generator=torch.Generator().manual_seed(1))


def test_the_models_that_are_listed_with_weights_are_those_whose_weights_are_packaged():
    assert timm.list_models('aft_*', pretrained=True) == [path.stem for path in FILES]
    assert sum(path.stat().st_size for path in FILES) <= 20 * 10**6
    assert {path.stem for path in PACKAGED.glob('*.md')} == {'README', *(path.stem for path in FILES)}
    for path in FILES:
        assert packaged_weights(path.stem) == str(path)
    assert packaged_weights('aft_conv_tiny.imagenette') is None


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_packaged_weights_are_whole_and_in_float16_and_load(path):
    assert {x.dtype for x in load_file(path).values() if x.is_floating_point()} == {torch.float16}
    model = timm.create_model(path.stem, pretrained=True).eval()
    assert model.pretrained_cfg['label_names'] == CLASSES[path.stem.partition('.')[2]]
    assert model(images()).isfinite().all()
    assert path.stem in path.with_suffix('.md').read_text()


def test_the_published_run_of_packaged_weights_links_to_them():
    weights = [*(PACKAGED.parents[1] / 'docs/results/data').glob('*imagenet*/*/model.safetensors')]
    assert {path.resolve() for path in weights if path.is_symlink()} == set(FILES)
    assert not {path.read_bytes() for path in weights if not path.is_symlink()} & {path.read_bytes() for path in FILES}


@pytest.mark.parametrize('name', NAMES)
def test_a_file_of_float16_gives_a_model_in_float32_with_its_classes(name, file):
    model, weights = create(name, file[name]), load_file(file[name])
    for key, x in model.state_dict().items():
        assert torch.equal(x, weights[key].to(x.dtype)), key
    first = ['tench', 'goldfish'] if name == 'aft_pyramid_pico' else ['tench', 'English springer']
    assert class_names(model)[:2] == first


@pytest.mark.parametrize('name', NAMES)
def test_another_head_leaves_the_body_as_it_is(name, file):
    images_, model = images(), create(name, file[name])
    bare, other = create(name, file[name], num_classes=0), create(name, file[name], num_classes=5)
    features = model.forward_head(model.forward_features(images_), pre_logits=True)
    torch.testing.assert_close(bare(images_), features)
    torch.testing.assert_close(other.forward_head(other.forward_features(images_), pre_logits=True), features)
    assert other(images_).shape == (1, 5)
    # The names are those of other classes.
    assert class_names(other) == [f'class {i}' for i in range(5)]
    maps = create(name, file[name], features_only=True)(images_)
    torch.testing.assert_close(maps[-1], model.forward_intermediates(images_, 1, intermediates_only=True)[0])


@pytest.mark.parametrize('name', NAMES)
def test_one_channel_sees_what_three_equal_ones_do(name, file):
    grey = images(channels=1)
    model = create(name, file[name], in_chans=1)
    expected = create(name, file[name])(grey.expand(-1, 3, -1, -1))
    # timm rounds the sum of the three channels' weights to the float16 of the file: 5e-5 at most.
    torch.testing.assert_close(model(grey), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(('name', 'classes'), [('aft_conv_nano', 10), ('aft_pyramid_pico', 210)])
def test_an_untrained_model_has_no_names_of_classes(name, classes):
    assert class_names(create(name)) == [f'class {i}' for i in range(classes)]


def test_the_classes_of_tiny_imagenet_and_imagenette_are_in_the_order_of_their_folders():
    assert list(TINY_IMAGENET) == sorted({*TINY_IMAGENET, *IMAGENETTE})
    assert len(TINY_IMAGENET) == 210


def test_names_of_classes_that_are_given_are_kept(file):
    overlay = {'label_names': ('yes', 'no')}
    given = timm.create_model('aft_conv_nano', num_classes=2, pretrained_cfg_overlay=overlay)
    assert class_names(given) == ['yes', 'no']
    trained = overlay | {'file': str(file['aft_conv_nano'])}
    given = timm.create_model('aft_conv_nano', pretrained=True, num_classes=2, pretrained_cfg_overlay=trained)
    assert class_names(given) == ['yes', 'no']
