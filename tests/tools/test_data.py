import argparse

import pytest
import timm
import torch
from helpers import make_folder

from tools.arguments import add_data_arguments
from tools.data import create_data_loader


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_data_arguments(parser)
    return parser.parse_args(arguments)


def test_the_loader_has_the_normalisation_of_the_training_and_skips_what_is_damaged(tmp_path):
    make_folder(tmp_path, {'extra': ['a', 'b']})
    (tmp_path / 'extra' / 'a' / '0.png').write_text('damaged')
    model = timm.create_model('resnet10t', num_classes=2, pretrained_cfg_overlay=dict(mean=(0.1,) * 3, std=(0.5,) * 3))
    args = parse('--data', str(tmp_path), '--split', 'extra', '--workers', '0', '--batch-size', '2')
    loader, names, _ = create_data_loader(model, (16, 24), args, torch.device('cpu'))
    assert names == ['a', 'b']
    grey = torch.cat([images.flatten(1) for images, _ in loader])
    assert grey.shape == (3, 3 * 16 * 24)
    expected = torch.tensor([0.0, 20 / 255, 20 / 255]).sub(0.1).div(0.5)[:, None].expand_as(grey)
    torch.testing.assert_close(grey, expected)


@pytest.mark.parametrize(('options', 'advised'), [([], True), (['--split', 'extra'], False)])
def test_a_missing_split_is_replaced_by_a_share_where_none_was_asked_for(tmp_path, options, advised):
    make_folder(tmp_path, {'train': ['a', 'b'], 'more': ['a', 'b']})
    model = timm.create_model('resnet10t', num_classes=2)
    args = parse('--data', str(tmp_path), '--workers', '0', *options)
    with pytest.raises(ValueError, match='got only more, train') as raised:
        create_data_loader(model, (16, 16), args, torch.device('cpu'))
    assert ('; --val-share 0.1 evaluates' in str(raised.value)) is advised
    assert 'data.' not in str(raised.value)


def test_a_model_of_more_channels_than_images_have_is_rejected(tmp_path):
    make_folder(tmp_path, {'val': ['a', 'b']})
    model = timm.create_model('resnet10t', num_classes=2, in_chans=4)
    with pytest.raises(ValueError, match='expected a model of images of 3 channels, got one of 4'):
        create_data_loader(model, (16, 16), parse('--data', str(tmp_path), '--workers', '0'), torch.device('cpu'))


def test_options_of_reading_reach_the_images(tmp_path, caplog):
    make_folder(tmp_path, {'val': ['a', 'b']})
    model = timm.create_model('resnet10t', num_classes=2)
    args = parse('--data', str(tmp_path), '--workers', '0', '--max-pixels', '5')
    loader, _, _ = create_data_loader(model, (16, 16), args, torch.device('cpu'))
    assert not any(len(targets) for _, targets in loader)
    assert 'at most 5 pixels' in caplog.text
