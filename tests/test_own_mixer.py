"""A mixer outside the package: the one of docs/guide/own_mixer.md, whose first block is all that is written for it."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from aft_vision.export.program import choose_shape, export_pt2
from aft_vision.layers.mixers import MIXERS
from aft_vision.ops import reference
from aft_vision.visualize import bias_rows, bias_statistics
from train.model_section import check_model

PAGE = Path(__file__).parents[1] / 'docs/guide/own_mixer.md'
ARGUMENTS: dict[str, Any] = dict(mixer='distance', num_heads=4, embed_dim=16, depth=2, num_classes=3, img_size=32)


@pytest.fixture(autouse=True, scope='module')
def registered(tmp_path_factory):
    """Import the first block of the page as a module of its own."""
    path = tmp_path_factory.mktemp('own') / 'own_mixer.py'
    path.write_text(re.findall(r'^```python\n(.*?)^```', PAGE.read_text(), re.DOTALL | re.MULTILINE)[0])
    spec: Any = importlib.util.spec_from_file_location('own_mixer', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del MIXERS['distance']


def make(**kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = timm.create_model('aft_simple_nano', **ARGUMENTS | kwargs)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model


def images(height: int = 32, width: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_a_mixer_of_ones_own_is_the_equation_with_the_biases_that_it_shows():
    mixer, x, grid = make().blocks[0].attn.double(), torch.randn(2, 12, 16, dtype=torch.float64), (3, 4)
    q, k, v = mixer.qkv(x).split([16, 4, 16], dim=-1)
    bias = bias_rows(mixer, grid, torch.arange(12), 12)
    heads = [
        reference.aft_full(q[..., part], k[..., [h]].expand(-1, -1, 4), v[..., part], bias[h])
        for h, part in enumerate(torch.arange(16).split(4))
    ]
    torch.testing.assert_close(mixer(x, grid), mixer.proj(torch.cat(heads, -1)))


def test_a_mixer_of_ones_own_trains_without_weight_decay_of_its_biases():
    model = make(mixer_args={'first_slope': 0.2}).train()
    model.init_weights()
    assert model.blocks[1].attn.slope.tolist() == pytest.approx([0.2] * 4)
    assert 'blocks.*.attn.slope' in model.no_weight_decay()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(10):
        losses.append(F.cross_entropy(model(images()), torch.tensor([0, 2])))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 2
    assert all(parameter.grad is not None for parameter in model.parameters())


@torch.no_grad()
def test_a_mixer_of_ones_own_takes_any_size_and_ignores_padding():
    model = make().eval()
    mask = torch.zeros(2, 5, 6, dtype=torch.bool)
    mask[:, :4, :3] = True
    torch.testing.assert_close(model(F.pad(images(32, 24), (0, 24, 0, 8)), attn_mask=mask), model(images(32, 24)))


@torch.no_grad()
def test_a_mixer_of_ones_own_compiles_and_is_exported(tmp_path):
    model = make().eval()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend='eager')(images()), model(images()))
    checks = export_pt2(model, tmp_path / 'own.pt2', choose_shape(model), aten=True)
    # For images of several sizes.
    assert len({check.size for check in checks}) == 3


def test_a_mixer_of_ones_own_stands_in_configs_pyramids_and_reports():
    section = {'name': 'aft_simple_nano', 'mixer': 'distance', 'num_heads': 4, 'first_slope': 0.2}
    assert check_model(section) == section
    pyramid = timm.create_model('aft_pyramid_nano', mixer='distance', depths=(1, 1, 1, 1), num_heads=8, num_classes=3)
    assert 'stages.*.blocks.*.attn.slope' in pyramid.no_weight_decay()
    assert pyramid.eval()(images()).shape == (2, 3)
    assert [row['layer'] for row in bias_statistics(make())] == [1, 2]


def test_an_argument_that_it_does_not_have_is_an_error_with_those_that_it_has():
    with pytest.raises(TypeError, match="'distance' has no kernel_size; it takes num_heads, local_conv, first_slope"):
        make(kernel_size=3)
