"""Alternatives next to each other: operations, layers, classifiers, tables, and what happens when one fails."""

import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn.functional as F
import yaml
from helpers import randn

from tools.benchmark import compare, models, ops, table
from tools.benchmark.__main__ import main, parse_args
from tools.benchmark.compare import PAPER_BASELINE, Candidate, Prepared, math_attention
from tools.benchmark.meters import peak_memory
from tools.benchmark.table import TABLES

CPU = torch.device('cpu')
DEIT = 'deit_tiny_patch16_224'
PAPER_DEIT = f'{DEIT}, {PAPER_BASELINE}'
CONFIGS = Path(__file__).parents[2] / 'configs'
ROWS = [(number, name, *row) for number in TABLES for group in TABLES[number][3] for name, row in group.items()]


@pytest.fixture
def uncompiled(monkeypatch):
    """A compiler that gives back what it gets."""
    monkeypatch.setattr(torch, 'compile', lambda function, **kwargs: function)


def constant(name: str, value: float = 1.0, **kwargs) -> Candidate:
    return Candidate(name, lambda training: Prepared(lambda: torch.tensor(value)), **kwargs)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_math_attention_forms_the_weights_and_gives_the_same_result(dtype):
    q, k, v = (randn(1, 2, 128, 8, seed=seed, dtype=dtype) for seed in range(3))
    fused, weights = F.scaled_dot_product_attention(q, k, v), 2 * 128 * 128 * q.element_size()
    with math_attention():
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), fused, rtol=2e-2, atol=2e-2)
        peak = peak_memory(lambda: F.scaled_dot_product_attention(q, k, v), CPU)
    assert 2 * weights <= peak < 3 * weights
    assert peak_memory(lambda: F.scaled_dot_product_attention(q, k, v), CPU) < 2 * weights


@pytest.mark.usefixtures('unmetered', 'uncompiled')
def test_operations_and_layers_stand_next_to_attention(monkeypatch, capsys):
    monkeypatch.setattr(ops, 'make_groups', partial(ops.make_groups, tokens=40))
    rows = main(['ops', '--batch-size', '1', '--rounds', '1', '--compile', '--allow-load'])['rows']
    shown = capsys.readouterr().out
    assert [row for row in rows if 'error' in row] == []
    groups = ['full', 'conv', 'causal', 'layers', 'causal_layers', 'onehot']
    names = {name: {row['name'] for row in rows if row['group'] == name} for name in groups}
    assert {'AFT-conv, h=16', 'AFT-conv, h=384'} <= names['conv'] & names['layers']
    assert {'AFT-local causal', 'AFT-simple causal'} <= names['causal'] & names['causal_layers']
    for row in rows:
        assert row['milliseconds'] > 0
        assert ('saved_bytes' in row) == (row['direction'] == 'training' and row['form'] == 'eager')
        # The compiler would fuse it.
        assert row['form'] == 'eager' or PAPER_BASELINE not in row['name']
        if row['name'] in ('SDPA', 'SDPA causal', 'attention', 'causal attention'):
            assert row['ratio'] == 1.0
        assert row['name'] in shown
    assert all(any(PAPER_BASELINE in name for name in names[group]) for group in groups if group != 'onehot')


@pytest.mark.parametrize('heads', [4, 16])
def test_the_one_offset_operation_computes_what_the_convolution_computes(heads):
    convolution, onehot, _ = ops.onehot_candidates((2, 196, 16), heads)
    torch.testing.assert_close(onehot.prepare(False).forward(), convolution.prepare(False).forward())


def test_the_saved_bytes_are_what_a_backward_needs():
    x, images = torch.ones(1000, requires_grad=True), torch.ones(1000)
    _, training = compare.compare([Candidate('exp', lambda learns: Prepared(lambda: x.exp(), [x]))], CPU, 1)
    assert training['saved_bytes'] == 4000
    # The result that is saved, the gradient of x, and nothing else.
    assert 8000 <= training['peak_bytes'] < 8000 + 1024
    for given, size in (([], 4000), ([images], 0)):
        candidate = Candidate('product', lambda _, given=given: Prepared(lambda: x * images, [x], given))
        (row,) = compare.compare([candidate], CPU, 0, directions=['training'])
        assert row['saved_bytes'] == size
        # No times were asked for.
        assert 'milliseconds' not in row


def test_calls_are_compared_with_their_own_baselines(monkeypatch):
    monkeypatch.setattr(compare, 'time_rounds', lambda *args, **kwargs: [[8.0, 8.0], [4.0, 6.0], [2.0, 1.0]])
    monkeypatch.setattr(compare, 'peak_memory', lambda call, device: call().item())
    candidates = [constant('a', 8.0), constant('b', 4.0, baseline='gone'), constant('c', 2.0, baseline='b')]
    rows = compare.compare(candidates, CPU, 2, directions=['forward'])
    assert [row['ratio'] for row in rows] == [1.0, None, 4.0]
    assert [row['ratio_quartiles'] for row in rows] == [(1.0, 1.0), None, (3.0, 5.0)]
    assert [row['milliseconds'] for row in rows] == [8000.0, 5000.0, 1500.0]
    assert [row['peak_ratio'] for row in rows] == [1.0, None, 0.5]
    (single, *_) = compare.compare(candidates, CPU, 2, directions=['forward'], single=True, memory=False)
    assert single['p99_milliseconds'] == 8000.0
    assert 'peak_bytes' not in single


@pytest.mark.usefixtures('unmetered')
def test_weights_are_cast_in_every_call():
    found = []

    def prepare(training: bool) -> Prepared:
        weight = torch.zeros(4, 4, requires_grad=True)

        def forward() -> torch.Tensor:
            # As an optimizer would; autocast that has cast the weight does not see it.
            weight.data += 1
            result = torch.ones(1, 4) @ weight
            found.append((result.dtype, result[0, 0].item() / 4 - weight[0, 0].item()))
            return result

        return Prepared(forward, [weight])

    compare.compare([Candidate('matmul', prepare)], CPU, 1, dtype='bfloat16')
    assert {dtype for dtype, _ in found} == {torch.bfloat16}
    # Up to 256 bfloat16 has every integer.
    assert {lag for _, lag in found[:50]} == {0.0}


class Exhausting(torch.nn.Linear):
    """A model that has memory for so many calls."""

    def __init__(self, calls: int) -> None:
        super().__init__(3, 2)
        self.calls = calls

    def forward(self, images):
        self.calls -= 1
        if self.calls < 0:
            raise torch.OutOfMemoryError('tried to allocate 9 GiB\nand more')
        return super().forward(images.mean((2, 3)))


def exhausting(name: str, calls: int) -> Candidate:
    def prepare(training: bool) -> Prepared:
        model = Exhausting(calls if training else 10**9)
        return Prepared(lambda: model(torch.ones(1, 3, 2, 2)), list(model.parameters()))

    return Candidate(name, prepare)


# 7 are one for the shape of the gradient, 4 that are timed and 2 for the peak: none is left for what is kept.
@pytest.mark.parametrize('calls', [0, 1, 3, 6, 7])
def test_what_runs_out_of_memory_loses_its_row_and_no_other(calls, monkeypatch):
    time_rounds = compare.time_rounds
    # Each is called once to warm up, once to say how often it is repeated, and once a round.
    monkeypatch.setattr(
        compare, 'time_rounds', lambda *args, **more: time_rounds(*args, **{**more, 'min_seconds': 0.0})
    )
    rows = compare.compare([exhausting('first', 10**9), exhausting('second', calls)], CPU, 2)
    lost = [row for row in rows if 'error' in row]
    assert [(row['name'], row['direction']) for row in lost] == [('second', 'training')]
    assert lost[0]['error'] == 'OutOfMemoryError: tried to allocate 9 GiB'
    assert 'milliseconds' not in lost[0]
    assert all(row['ratio'] > 0 for row in rows if row not in lost)


@pytest.mark.usefixtures('unmetered')
@pytest.mark.parametrize('faster', [False, True])
def test_classifiers_are_measured_at_sizes_and_one_that_cannot_is_named(monkeypatch, faster):
    monkeypatch.setattr(models, 'onednn_is_faster', lambda: faster)
    command = ['models', '--baseline', DEIT, '--models', 'aft_conv_tiny', '--rounds', '1', '--batch-size', '2']
    rows = main([*command, '--sizes', '40x32', '32', '--allow-load'])['rows']
    failed = {row['name']: row['error'] for row in rows if row['size'] == (40, 32) and 'error' in row}
    assert 'multiples of the patch size' in failed['aft_conv_tiny']
    found = {row['name']: row for row in rows if row['size'] == (32, 32)}
    # That of timm is another one where ours multiplies faster.
    assert list(found) == [DEIT, *[f'{DEIT}, {models.TIMM_DEFAULTS}'] * faster, PAPER_DEIT, 'aft_conv_tiny']
    assert found[DEIT]['ratio'] == 1.0
    for row in found.values():
        assert row['per_second'] == pytest.approx(2e3 / row['milliseconds'])


@pytest.mark.parametrize(('training', 'needed'), [(False, 2 * 900), (True, 12 * 2 * 900)])
def test_attention_whose_weights_do_not_fit_is_not_even_tried(monkeypatch, training, needed):
    # Three matrices of (3, 5, 5) in float32, of each image and in training of each block.
    prepare = models.classifiers([DEIT], (2, 3, 32, 32), CPU)[1].prepare
    with torch.set_grad_enabled(training):
        monkeypatch.setattr(compare, 'free_memory', lambda device: 2 * needed)
        prepare(training)
        monkeypatch.setattr(compare, 'free_memory', lambda device: 2 * needed - 2)
        with pytest.raises(MemoryError, match=r'its weights alone take 0\.0 GiB or more, the limit is 0\.0 GiB'):
            prepare(training)


def test_the_models_of_the_docs_are_known_and_others_are_rejected_with_close_names():
    models.model_names(*parse_args(['models']).models)
    with pytest.raises(ValueError, match='got aft_conv_tinny; did you mean aft_conv_tiny'):
        main(['models', '--models', 'aft_conv_tinny', '--sizes', '32', '64', '--allow-load'])


def test_a_runtime_is_given_the_exported_model_and_one_that_is_absent_is_named(monkeypatch):
    exported, asked = [], []

    def export(model, path, shape, tolerance):
        exported.append((type(model).__name__, path.name, shape))
        assert not torch.is_inference_mode_enabled()

    compiled = lambda *args: asked.append(args) or (lambda images: [images + 1])  # noqa: E731
    monkeypatch.setitem(sys.modules, 'openvino', SimpleNamespace(Core=lambda: SimpleNamespace(compile_model=compiled)))
    monkeypatch.setattr(models, 'export_onnx', export)
    monkeypatch.setattr(models, 'peak_resident', lambda call: 2**20 * int(call().shape[2] == 160))
    command = ['models', '--baseline', 'test_vit', '--models', 'test_byobnet', '--batch-size', '2', '--sizes', '160']
    command += ['--runtimes', 'openvino', '--rounds', '1', '--allow-load']
    first, row = main(command)['rows']
    assert exported[0] == ('VisionTransformer', 'test_vit.onnx', models.InputShape((160, 160), True, 2))
    assert (first['ratio'], row['form']) == (1.0, 'openvino')
    assert row['per_second'] == pytest.approx(2e3 / row['milliseconds'])
    assert (row['peak_bytes'], row['peak_ratio']) == (2**20, 1.0)
    path, device, config = asked[0]
    assert (Path(path).name, device) == ('test_vit.onnx', 'CPU')
    assert config['INFERENCE_NUM_THREADS'] == torch.get_num_threads()
    assert config['INFERENCE_PRECISION_HINT'] == 'f32'
    monkeypatch.setitem(sys.modules, 'openvino', None)
    assert all('openvino' in row['error'] for row in main(command)['rows'])


@pytest.mark.parametrize(('number', 'name', 'speed', 'memory_gb'), ROWS)
def test_a_row_of_the_paper_names_a_model_and_has_the_figures_of_its_recipe(number, name, speed, memory_gb):
    _, size, folder, _ = TABLES[number]
    if folder is None:
        assert timm.is_model(name)
        return
    text = (CONFIGS / folder / f'{name}.yaml').read_text()
    header = ' '.join(line.lstrip('# ') for line in text.splitlines() if line.startswith('#'))
    assert f'AFT Table {number}, row "' in header
    printed = re.search(r'([\d.]+) iterations/s and ([\d.]+) GB per GPU', header)
    assert (float(printed[1]), float(printed[2])) == (speed, memory_gb)
    # One block, for time; all are alike.
    model = table.create_decoder(**yaml.safe_load(text)['model'] | {'depth': 1}, device='meta')
    assert model.context == size


@pytest.mark.usefixtures('unmetered')
def test_iterations_are_measured_next_to_the_papers(monkeypatch):
    monkeypatch.setattr(compare, 'free_memory', lambda device: 2**31)
    sizes, create = dict(depth=1, context=24, dim=32), table.create_decoder
    monkeypatch.setattr(table, 'create_decoder', lambda **recipe: create(**{**recipe, **sizes}))
    command = ['table', '4', '--batch-size', '2', '--rounds', '1', '--allow-load']
    rows = main(command)['rows']
    assert [row['name'] for row in rows[:3]] == [
        'transformer_l12_d512',
        f'transformer_l12_d512, {PAPER_BASELINE}',
        'aft_local_32_l12_d512',
    ]
    first, paper, _, simple = rows[3:]
    assert (first['ratio'], first['peak_ratio']) == (1.0, 1.0)
    assert 'paper_ratio' not in paper
    assert simple['paper_ratio'] == pytest.approx(2.61 / 1.57)
    assert simple['paper_memory_ratio'] == pytest.approx(9.6 / 28.3)
    # One block of the whole model's width here.
    model = create('aft_simple_char', **sizes)
    assert simple['parameters'] == sum(parameter.numel() for parameter in model.parameters())
    assert simple['per_second'] == pytest.approx(1e3 / simple['milliseconds'])
    monkeypatch.setattr(compare, 'free_memory', lambda device: 2**9)
    rows = main(command)['rows']
    refused = [row['name'] for row in rows if row.get('error', '').startswith('MemoryError')]
    assert refused == [row['name'] for row in rows if PAPER_BASELINE in row['name']]


def test_an_iteration_changes_the_weights_and_needs_the_same_memory_each_time():
    model = table.create_decoder('aft_simple_char', depth=1, context=8, dim=8)
    step = table.iteration('step', model, 1).prepare(True).call(learns=True)
    before = model.head.weight.detach().clone()
    first, second = (peak_memory(step, CPU) for _ in range(2))
    assert not torch.equal(before, model.head.weight)
    # Gradients and the state of AdamW are there since the first call.
    assert 0 < first == second


def test_a_measured_table_has_the_papers_figures_next_to_ours(monkeypatch, capsys):
    *head, groups = TABLES[7]
    chosen = {name: groups[0][name] for name in (DEIT, 'aft_conv_tiny_k11_h32')}
    monkeypatch.setitem(TABLES, 7, (*head, (chosen,)))
    command = ['table', '7', '--batch-size', '1', '--img-size', '32', '--rounds', '1', '--allow-load']
    deit, paper, conv = main(command)['rows']
    assert (deit['name'], paper['name'], conv['name']) == (DEIT, PAPER_DEIT, 'aft_conv_tiny_k11_h32')
    assert (deit['parameters'], conv['parameters']) == (5_717_416, 5_356_072)
    assert (deit['ratio'], deit['peak_ratio']) == (1.0, 1.0)
    assert conv['paper_ratio'] == pytest.approx(2359 / 2507)
    assert conv['paper_memory_ratio'] == pytest.approx(1.8 / 1.9)
    low, high = conv['ratio_quartiles']
    assert 0 < low <= conv['ratio'] <= high
    shown = capsys.readouterr().out
    assert 'AFT Table 7: inference at 32 px, batch of 1; the paper: V100, batch of 256' in shown
    line = next(line for line in shown.splitlines() if 'aft_conv_tiny' in line)
    for text in ('0.94', '5,356,072', f'{conv["per_second"]:.4g}'):
        assert text in line
    for options in (['7', '--depth', '2'], ['2', '--img-size', '32']):
        with pytest.raises(ValueError, match=f'{options[1]} changes nothing of table {options[0]}'):
            main(['table', *options, '--allow-load'])


def test_a_graph_is_compared_with_the_graph_of_the_baseline(monkeypatch: pytest.MonkeyPatch):
    captured = []

    def capture(call):
        captured.append(call)
        call()
        return lambda: None  # a replay, which computes what it did

    monkeypatch.setattr(compare, 'capture', capture)
    x = torch.ones(9, requires_grad=True)
    candidates = [Candidate(name, lambda learns: Prepared(lambda: x.exp(), [x])) for name in ('first', 'second')]
    rows = compare.compare(candidates, CPU, 1, directions=['training'], graph=True)
    assert [(row['name'], row['form']) for row in rows] == [
        *(('first', 'eager'), ('first', 'graph')),
        *(('second', 'eager'), ('second', 'graph')),
    ]
    assert len(captured) == 2
    assert all('ratio' in row for row in rows)
    assert ['peak_bytes' in row for row in rows] == [True, False, True, False]
