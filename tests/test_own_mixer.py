"""An operation and a mixer outside the package: the first two blocks of docs/guide/own_mixer.md, as two files."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from contract import CONTRACT, compute, inputs_of
from fuzz import WHOLE, search
from helpers import link_photographs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from aft_vision import ops
from aft_vision.layers.mixers import MIXERS
from aft_vision.ops import reference
from aft_vision.ops.declaration import OPERATIONS
from aft_vision.visualize import bias_rows, bias_statistics
from train.imagenet import main
from train.model_section import check_model

ROOT = Path(__file__).parents[1]
OPERATION, MIXER, *EXAMPLES = re.findall(
    r'^```python\n(.*?)^```', (ROOT / 'docs/guide/own_mixer.md').read_text(), re.DOTALL | re.MULTILINE
)
ARGUMENTS: dict[str, Any] = dict(mixer='distance', num_heads=4, embed_dim=16, depth=2, num_classes=3, img_size=32)


@pytest.fixture(autouse=True, scope='module')
def registered(tmp_path_factory):
    """Import the two files, and give the function of the operation; other tests see neither."""
    folder = tmp_path_factory.mktemp('own')
    (folder / 'distance.py').write_text(OPERATION)
    (folder / 'distance_mixer.py').write_text(MIXER)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        import distance_mixer

        OPERATIONS['distance'].reference = term_by_term
        WHOLE['distance'] = lambda inputs: whole_bias(inputs.table, inputs.grid).permute(1, 2, 0)
        yield distance_mixer.distance
    for known in (MIXERS, OPERATIONS, WHOLE):
        del known['distance']
    del sys.modules['distance'], sys.modules['distance_mixer']


def whole_bias(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """(h, T, T), looked up pair by pair."""
    places = [divmod(i, grid[1]) for i in range(grid[0] * grid[1])]
    distances = torch.tensor([[abs(y - a) + abs(x - b) for a, b in places] for y, x in places])
    return F.pad(table, (0, int(distances.max()) + 1))[:, distances]


def term_by_term(
    q: Tensor | None, k: Tensor, v: Tensor, table: Tensor, grid: tuple[int, int], mask: Tensor | None = None
) -> Tensor:
    """AFT Eq. 2 for each head, with a bias that is looked up pair by pair."""
    biases = whole_bias(table, grid)
    heads = [
        reference.aft_full(
            q if q is None else q[..., part], k[..., [h]].expand(-1, -1, len(part)), v[..., part], biases[h], mask
        )
        for h, part in enumerate(torch.arange(v.shape[2]).chunk(len(table)))
    ]
    return torch.cat(heads, -1)


@pytest.mark.parametrize('promise', CONTRACT)
def test_an_operation_of_ones_own_keeps_the_promises_of_every_operation(promise: str):
    CONTRACT[promise]('distance')


def test_an_operation_of_ones_own_is_called_by_what_registered_it(registered: Any):
    inputs = inputs_of('distance')
    assert torch.equal(registered(*inputs.values(), None, 'auto'), compute('distance', **inputs))
    with pytest.raises(ValueError, match='the 4 heads of table must divide the 6 channels of v'):
        compute('distance', **inputs | {'table': torch.zeros(4, 3)})
    with pytest.raises(ValueError, match="expected a new name, got 'distance', which is registered"):
        ops.register(OPERATIONS['distance'])


def test_an_operation_of_ones_own_is_counted_as_products_of_all_pairs():
    with FlopCounterMode(display=False) as counter:
        compute('distance', **inputs_of('distance'))
    assert counter.get_total_flops() == 2 * 2 * 15 * 15 * (6 + 3)
    assert 'aft_vision::distance' in ops.jit_handles()


def test_an_operation_of_ones_own_is_fuzzed():
    report = search('distance', 'eager', 30)
    assert report.cases >= 15
    assert not report.failures


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


def test_a_mixer_of_ones_own_trains_without_weight_decay_of_its_biases(tmp_path):
    data = link_photographs(tmp_path / 'photographs', 8, 2)
    config = ['--quiet', '--config', str(ROOT / 'configs/smoke/one_epoch.yaml'), f'data.dir={data}']
    section = ['model={name: aft_simple_nano, mixer: distance, num_heads: 4, reach: 3, embed_dim: 16, depth: 1}']
    main([*config, *section, 'data.batch_size=12', f'run.dir={tmp_path / "run"}'])
    trained = torch.load(tmp_path / 'run/last.pth', weights_only=True)['state_dict']['blocks.0.attn.table']
    assert trained.shape == (4, 3)
    assert trained.abs().min() > 0
    assert 'blocks.*.attn.table' in make().no_weight_decay()


@torch.no_grad()
def test_a_mixer_of_ones_own_takes_any_size_and_ignores_padding():
    model = make().eval()
    mask = torch.zeros(2, 5, 6, dtype=torch.bool)
    mask[:, :4, :3] = True
    torch.testing.assert_close(model(F.pad(images(32, 24), (0, 24, 0, 8)), attn_mask=mask), model(images(32, 24)))


@torch.no_grad()
def test_a_mixer_of_ones_own_compiles():
    model = make().eval()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend='eager')(images()), model(images()))


def test_a_mixer_of_ones_own_stands_in_configs_pyramids_and_reports():
    section = {'name': 'aft_simple_nano', 'mixer': 'distance', 'num_heads': 4, 'reach': 3}
    assert check_model(section) == section
    pyramid = timm.create_model('aft_pyramid_nano', mixer='distance', depths=(1, 1, 1, 1), num_heads=8, num_classes=3)
    assert 'stages.*.blocks.*.attn.table' in pyramid.no_weight_decay()
    assert pyramid.eval()(images()).shape == (2, 3)
    assert [row['layer'] for row in bias_statistics(make())] == [1, 2]


def test_an_argument_that_it_does_not_have_is_an_error_with_those_that_it_has():
    with pytest.raises(TypeError, match="'distance' has no kernel_size; it takes num_heads, local_conv, reach"):
        make(kernel_size=3)


def test_the_commands_of_the_page_are_those_that_the_commands_take(registered, monkeypatch):
    # Imports what takes seconds.
    from test_docs import check_module, commands

    monkeypatch.chdir(Path(sys.modules['distance_mixer'].__file__).parent)
    found = [words for words in commands('guide/own_mixer.md') if '-m' in words]
    assert len(found) == 3
    for words in found:
        check_module(*words)


@torch.no_grad()
def test_the_examples_of_the_page_run_and_export_a_model_for_images_of_several_sizes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {'__name__': 'own'}
    code = '\n'.join([MIXER.replace('@register_mixer', ''), *EXAMPLES]).replace('depth=2', 'depth=1')
    with torch.enable_grad():
        exec(compile(code, 'own_mixer.md', 'exec'), namespace)
    program, model = torch.export.load('distance.pt2').module(), namespace['model']
    for size in ((32, 48), (64, 32)):
        torch.testing.assert_close(program(images(*size)), model(images(*size)), rtol=1e-4, atol=1e-5)
