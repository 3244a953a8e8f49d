"""Mixers outside the package, and an operation: the blocks of docs/guide/own_mixer.md, as files."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import timm
import torch
import yaml
from contract import CONTRACT, compute, inputs_of
from fuzz import WHOLE, search
from helpers import CLOTHING, link_photographs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from aft_vision import ops, plugins
from aft_vision.export.verify import onnx_runner
from aft_vision.layers.base import CAUSAL_MIXERS, MIXERS
from aft_vision.models import AFTDecoder
from aft_vision.models.checkpoint import load_model
from aft_vision.models.deit_transfer import deit_to_aft
from aft_vision.ops import reference
from aft_vision.ops.declaration import OPERATIONS
from aft_vision.visualize import (
    Report,
    attention_heads,
    bias_rows,
    bias_statistics,
    capture_mixers,
    keyed_layers,
    report_sections,
)
from tools.export import main as export
from tools.predict import main as predict
from train.command_line import run_command
from train.imagenet import main
from train.model_section import check_model

ROOT = Path(__file__).parents[1]
GATED, SCAN, DECODED, OPERATION, MIXER, *EXAMPLES = re.findall(
    r'^```python\n(.*?)^```', (ROOT / 'docs/guide/own_mixer.md').read_text(), re.DOTALL | re.MULTILINE
)
GATED_SIZES: dict[str, Any] = dict(embed_dim=16, depth=1, img_size=32, num_classes=3)
ARGUMENTS: dict[str, Any] = dict(mixer='distance', num_heads=4, embed_dim=16, depth=2, num_classes=3, img_size=32)


def forget(*names: str) -> None:
    """Remove what a test registers and imports."""
    for name in names:
        for mixers in (MIXERS, CAUSAL_MIXERS):
            mixers.pop(name, None)
        sys.modules.pop(f'{name}_mixer', None)


@pytest.fixture
def gated(tmp_path, monkeypatch):
    """The current folder, with the gated mixer in `own/gated_mixer.py`, which other tests do not see."""
    (tmp_path / 'own').mkdir()
    (tmp_path / 'own' / 'gated_mixer.py').write_text(GATED)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forget('gated')


def make_gated(**kwargs: Any) -> Any:
    plugins.import_plugins(['own/gated_mixer.py'])
    return timm.create_model('aft_simple_nano', mixer='gated', **GATED_SIZES | kwargs)


@pytest.fixture
def scan():
    """The module of the scan."""
    module = ModuleType('scan_mixer')
    sys.modules['scan_mixer'] = module
    exec(compile(SCAN, 'scan_mixer.py', 'exec'), vars(module))
    yield module
    forget('scan')


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
    del OPERATIONS['distance'], WHOLE['distance'], sys.modules['distance']
    forget('distance')


def test_a_mixer_in_plain_torch_is_trained_resumed_compiled_predicted_with_and_exported(gated, capsys):
    data = link_photographs(gated / 'photographs', 4, 1, classes=2)
    section = 'model={name: aft_simple_nano, mixer: gated, embed_dim: 16, depth: 1, patch_size: 8}'
    start = ['--quiet', '--import', 'own/gated_mixer.py', '--config', 'smoke/one_epoch']
    main([*start, section, f'data.dir={data}', 'data.batch_size=4', 'run.dir=run'])
    assert yaml.safe_load(Path('run/config.yaml').read_text())['run']['imports'] == ['own/gated_mixer.py']
    forget('gated')
    # The run remembers its module.
    state = main(['--quiet', '--config', 'run/config.yaml', 'run.resume=auto', 'schedule.epochs=2'])
    assert len(state.progress.history) == 2
    mixer = state.model.blocks[0].attn
    decays = {id(p) for group in state.optimizer.param_groups if group['weight_decay'] for p in group['params']}
    assert id(mixer.split.weight) in decays
    assert id(mixer.tokens.weight) not in decays
    assert mixer.tokens.weight.abs().max() > 0
    photograph = str(next(data.rglob('*.jpg')))
    forget('gated')
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run_command(predict, [photograph, '--checkpoint', 'run'])
    remedy = 'import the module that registers it, in a command by --import MODULE_OR_FILE'
    assert re.search(rf"^error: run/best.pth: .*got 'gated'; {remedy}\n", capsys.readouterr().err)
    (row,) = predict([photograph, '--checkpoint', 'run', '--import', 'own/gated_mixer.py'])
    assert len(row['classes']) == 2
    forget('gated')
    words = ['--checkpoint', 'run/export', '--format', 'onnx', '--out', 'model.onnx']
    export(['--import', 'own/gated_mixer.py', *words])
    model, x = load_model('run'), images()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend='eager')
        for run in (onnx_runner('model.onnx'), compiled):
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)


def test_every_model_starts_with_the_values_that_a_mixer_initialises(gated, scan):
    for model in (make_gated(depth=2), AFTDecoder(8, dim=16, depth=2, mixer='scan')):
        for _ in range(2):
            mixer = model.blocks[1].attn
            if mixer.causal:
                assert mixer.split.bias.tolist() == [4.0] * 16 + [0.0] * 16
            else:
                assert (mixer.tokens.weight.unique().tolist(), mixer.tokens.bias.unique().tolist()) == ([0.0], [1.0])
            assert 0.015 < mixer.split.weight.std() < 0.025
            # Those of a model that is initialised again too.
            for p in model.parameters():
                nn.init.ones_(p)
            model.init_weights()


def test_reports_and_pictures_leave_out_what_a_mixer_does_not_have(gated):
    model = make_gated().eval()
    photograph = next(CLOTHING.rglob('*.jpg'))
    report = Report(model, [photograph], averaged=[photograph])
    assert [section.title for section in report_sections(report)] == [
        'Model',
        f'{photograph.parent.name}/{photograph.name}',
    ]
    assert '<dd>gated' in report_sections(report)[0].build()
    assert 'as the model sees it' in report_sections(report)[1].build()
    for draw in (bias_statistics, attention_heads, lambda model: capture_mixers(model, images())):
        with pytest.raises(ValueError, match='expected a model with'):
            draw(model)
    # Of two blocks the second has attention, which is drawn as that of the second.
    assert [*keyed_layers(make_gated(depth=2, attention_blocks=[1]), attention=True).values()] == [1]


def test_a_mixer_in_plain_torch_takes_the_weights_of_a_vit_around_it(gated):
    vit = timm.create_model('vit_tiny_patch16_224', patch_size=8, num_heads=2, **GATED_SIZES)
    model = make_gated(num_classes=3)
    loaded, report = deit_to_aft(vit.state_dict(), model)
    model.load_state_dict(loaded)
    assert torch.equal(model.blocks[0].mlp.fc1.weight, vit.blocks[0].mlp.fc1.weight)
    of_attention = [str(each) for key, outcomes in report.items() if '.attn.' in key for each in outcomes]
    assert of_attention == ['left out (the model has no such tensor)'] * 4
    assert 'attn.split' in ' '.join(loaded)


def test_what_a_mixer_in_plain_torch_cannot_do_is_an_error(gated):
    with pytest.raises(TypeError, match="mixer='gated' has no query_gate: leave out query_gate=False"):
        make_gated(query_gate=False)
    with pytest.raises(ValueError, match="mixer='gated' needs the whole grid: patch_drop_rate must be 0"):
        make_gated(patch_drop_rate=0.5)
    with pytest.raises(ValueError, match=r'for another size GatedMixer must define set_grid\(\)'):
        make_gated().set_input_size(64)


@torch.no_grad()
def test_a_scan_of_ones_own_decodes_what_it_computes_for_whole_sequences(scan):
    exec(compile(DECODED, 'own_mixer.md', 'exec'), namespace := {})
    model, tokens = namespace['text'], namespace['samples']
    assert tokens.shape == (2, 8)
    session = model.session(2)
    rows = [session.step(tokens[:, t - 1] if t else None) for t in range(8)]
    torch.testing.assert_close(torch.stack(rows, 1), model(tokens))
    h, x = torch.zeros(2, 32), torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
    mixer = model.blocks[0].attn
    for t, y in enumerate(mixer(x).unbind(1)):
        a, v = mixer.split(x[:, t]).chunk(2, -1)
        h = a.sigmoid() * h + (1 - a.sigmoid()) * v
        torch.testing.assert_close(y, mixer.proj(h))


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
    assert report.failure is None


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


def test_a_mixer_of_ones_own_stands_in_configs_pyramids_and_reports():
    section = {'name': 'aft_simple_nano', 'mixer': 'distance', 'num_heads': 4, 'reach': 3}
    assert check_model(section) == section
    pyramid = timm.create_model('aft_pyramid_nano', mixer='distance', depths=(1, 1, 1, 1), num_heads=8, num_classes=3)
    assert 'stages.*.blocks.*.attn.table' in pyramid.no_weight_decay()
    assert pyramid.eval()(images()).shape == (2, 3)
    assert [row['layer'] for row in bias_statistics(make())] == [1, 2]


def test_the_commands_of_the_page_are_those_that_the_commands_take(gated):
    # Imports what takes seconds.
    from test_docs import check_module, commands

    found = [words for words in commands('guide/own_mixer.md') if '-m' in words]
    (gated / 'gated_mixer.py').write_text(GATED)
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
