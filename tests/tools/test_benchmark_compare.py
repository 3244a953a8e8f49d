"""Alternatives side by side: operations, layers, classifiers, and what happens when a compiler fails."""

import pytest
import torch
import torch.nn.functional as F
from helpers import randn

from tools.benchmark import classifiers, compare, sections, times
from tools.benchmark.__main__ import main
from tools.benchmark.classifiers import format_classifiers, measure_classifiers
from tools.benchmark.columns import format_comparison
from tools.benchmark.compare import PAPER_BASELINE, Candidate, Prepared, math_attention
from tools.benchmark.layers import make_layer_groups
from tools.benchmark.memory import peak_memory
from tools.benchmark.models import check_model
from tools.benchmark.operations import depthwise, make_groups
from tools.benchmark.times import time_compiled

CPU = torch.device('cpu')
TINY = dict(dim=96, grid=(3, 3), tokens=40)


def uncompiled(function, **kwargs):
    """A compiler that gives back what it gets."""
    return function


@pytest.fixture
def small(monkeypatch):
    """The smallest operations and layers, and no compiler."""
    monkeypatch.setattr(sections.operations, 'make_groups', lambda batch: make_groups(batch, **TINY))
    monkeypatch.setattr(sections.layers, 'make_layer_groups', lambda batch: make_layer_groups(batch, **TINY))
    monkeypatch.setattr(torch, 'compile', uncompiled)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_math_attention_forms_the_weights_and_gives_the_same_result(dtype):
    q, k, v = (randn(1, 2, 128, 8, seed=seed, dtype=dtype) for seed in range(3))
    fused, weights = F.scaled_dot_product_attention(q, k, v), 2 * 128 * 128 * q.element_size()
    with math_attention():
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), fused, rtol=2e-2, atol=2e-2)
        peak = peak_memory(lambda: F.scaled_dot_product_attention(q, k, v), CPU)
    assert 2 * weights <= peak < 3 * weights
    assert peak_memory(lambda: F.scaled_dot_product_attention(q, k, v), CPU) < 2 * weights


@pytest.mark.usefixtures('small')
@pytest.mark.parametrize(
    ('section', 'names'),
    [
        ('--operations', ['AFT-full', 'AFT-conv, h=4', 'AFT-conv, h=d=96', 'conv2d, depthwise 11 x 11']),
        ('--layers', ['AFT-full', 'AFT-conv, h=4', 'AFT-local causal, s=40', 'AFT-simple causal']),
    ],
)
def test_operations_and_layers_stand_beside_attention(section, names, capsys):
    rows = main([section, '--batch-size', '1', '--rounds', '1', '--compile', '--allow-load'])['rows']
    shown = capsys.readouterr().out
    for shape in {row['shape'] for row in rows}:
        own = [row for row in rows if row['shape'] == shape]
        fused, paper = own[:2]
        assert fused['eager']['ratio'] == fused['compiled']['ratio'] == 1.0
        assert paper['name'].endswith(PAPER_BASELINE)
        # The compiler would fuse it.
        assert paper['compiled'] is None
        assert [row['direction'] for row in own] == ['forward'] * (len(own) // 2) + ['training'] * (len(own) // 2)
        for row in own:
            assert row['eager']['milliseconds'] > 0
            assert ('saved_bytes' in row['eager']) == (row['direction'] == 'training')
    found = {row['name']: row for row in rows}
    for name in names:
        assert found[name]['compiled']['compile_seconds'] >= 0
        assert name in shown
    assert 'compiled' in shown


def test_a_depthwise_convolution_of_tokens_is_that_of_their_map():
    prepared = depthwise((2, 12, 4), (3, 4), torch.float32, False, CPU)
    x, weight = prepared.leaves
    maps = x.transpose(1, 2).reshape(2, 4, 3, 4)
    expected = F.conv2d(maps, weight, padding=5, groups=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(prepared.forward(), expected)


def test_the_saved_bytes_are_what_a_backward_needs():
    x = torch.ones(1000, requires_grad=True)
    rows = compare.compare([Candidate('exp', lambda training: Prepared(lambda: x.exp(), [x]))], CPU, 1)
    assert 'saved_bytes' not in rows[0]['eager']
    assert rows[1]['eager']['saved_bytes'] == 4000
    # The result that is saved, the gradient of x, and nothing else.
    assert 8000 <= rows[1]['eager']['peak_bytes'] < 8000 + 1024


def test_calls_are_compared_with_their_own_baselines(monkeypatch):
    monkeypatch.setattr(times, 'time_rounds', lambda *args, **kwargs: [[8.0, 8.0], [4.0, 6.0], [2.0, 1.0]])
    calls = dict.fromkeys('abc', list)
    found = times.time_calls(calls, CPU, 2, baselines={'a': 'a', 'b': 'gone', 'c': 'b'})
    assert [found[name]['ratio'] for name in 'abc'] == [1.0, None, 4.0]
    assert [found[name]['ratio_quartiles'] for name in 'abc'] == [(1.0, 1.0), None, (3.0, 5.0)]
    assert [found[name]['milliseconds'] for name in 'abc'] == [8000.0, 5000.0, 1500.0]
    assert times.time_calls(calls, CPU, 2)['c']['ratio'] == 6.0


def test_what_is_given_is_not_kept_for_the_backward():
    x, images = torch.ones(1000, requires_grad=True), torch.ones(1000)
    found = [
        compare.compare([Candidate('product', lambda _, given=given: Prepared(lambda: x * images, [x], given))], CPU, 1)
        for given in ([], [images])
    ]
    assert [rows[1]['eager']['saved_bytes'] for rows in found] == [4000, 0]


def test_weights_are_cast_anew_in_every_call():
    found = {False: [], True: []}

    def prepare(training: bool) -> Prepared:
        weight = torch.zeros(4, 4, requires_grad=True)

        def forward() -> torch.Tensor:
            # As an optimizer would; autocast that has cast the weight does not see it.
            weight.data += 1
            result = torch.ones(1, 4) @ weight
            found[training].append((result.dtype, result[0, 0].item() / 4 - weight[0, 0].item()))
            return result

        return Prepared(forward, [weight])

    compare.compare([Candidate('matmul', prepare)], CPU, 1, dtype='bfloat16')
    assert {dtype for dtype, _ in [*found[False], *found[True]]} == {torch.bfloat16}
    # Up to 256 bfloat16 has every integer.
    assert {lag for calls in found.values() for _, lag in calls[:50]} == {0.0}


def test_a_row_that_cannot_be_compiled_says_so_and_ends_nothing(monkeypatch):
    def compile_some(function, **kwargs):
        if function() < 0:
            raise ValueError('negative\nand more')
        return function

    monkeypatch.setattr(torch, 'compile', compile_some)
    makers = {value: (lambda wrap, value=value: wrap(lambda: value)) for value in (-1.0, 2.0, 3.0)}
    found = time_compiled(makers, CPU, 1)
    assert found[-1.0] == {'error': 'ValueError: negative'}
    # What it would be compared with is not there.
    assert found[2.0]['ratio'] is None
    assert found[2.0]['milliseconds'] > 0
    del makers[-1.0]
    found = time_compiled(makers, CPU, 1)
    assert found[2.0]['ratio'] == 1.0
    row = {'name': 'x', 'direction': 'forward', 'eager': {**found[2.0]}, 'compiled': {'error': 'ValueError: negative'}}
    assert 'failed: ValueError: negative' in format_comparison([row])


def test_what_is_compiled_runs_as_one_graph_and_is_not_timed_while_it_compiles(monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiler = torch.compile
    monkeypatch.setattr(torch, 'compile', lambda function, **kwargs: compiler(function, backend=backend, **kwargs))
    q, k, v = (randn(1, 9, 4, seed=seed, dtype=torch.float32) for seed in range(3))
    prepared = Prepared(lambda: torch.ops.aft_vision.aft_simple(q, k, v, None, False, 'auto')[0])
    (forward,) = compare.compare([Candidate('simple', lambda _: prepared)], CPU, 3, training=False, compiled=True)
    assert len(graphs) == 1
    assert forward['compiled']['compile_seconds'] > forward['compiled']['milliseconds'] / 1e3


def test_classifiers_are_measured_at_sizes_and_a_model_that_cannot_is_named(monkeypatch):
    # Models that are small enough to be tested with.
    monkeypatch.setattr(classifiers, 'BASELINE', 'deit_tiny_patch16_224')
    rows = measure_classifiers(['aft_conv_tiny'], [(40, 32), (32, 32)], 2, CPU, 'float32', 1)
    refused = [row for row in rows if row['refused']]
    assert [(row['name'], row['height'], row['width']) for row in refused] == [('aft_conv_tiny', 40, 32)]
    assert 'multiples of the patch size' in refused[0]['refused']
    baseline = 'deit_tiny_patch16_224'
    names = [baseline, f'{baseline}, materialised, {PAPER_BASELINE}', 'aft_conv_tiny']
    assert [row['name'] for row in rows if row['height'] == 32] == names
    for row in rows:
        if not row['refused']:
            assert row['eager']['images_per_second'] == pytest.approx(2e3 / row['eager']['milliseconds'])
    shown = format_classifiers(rows)
    # Nothing is kept for a backward that is not asked for.
    assert 'images/s' in shown
    assert 'kept' not in shown
    assert '  aft_conv_tiny refused: ValueError' in shown
    assert shown.index('40 x 32 px') < shown.index('aft_conv_tiny refused') < shown.index('32 x 32 px')


def test_a_model_with_a_bug_is_not_said_to_refuse_its_images(monkeypatch):
    def create(name, size, device, **kwargs):
        if name == 'resnet10t':
            raise RuntimeError('a bug\nin it')
        return torch.nn.Sequential(torch.nn.AvgPool2d(32), torch.nn.Flatten(), torch.nn.Linear(3, 2))

    monkeypatch.setattr(classifiers, 'create_classifier', create)
    monkeypatch.setattr(classifiers, 'too_large', lambda *args: 'it is large')
    rows = measure_classifiers(['resnet10t'], [(32, 32)], 2, CPU, 'float32', 1)
    found = {row['name']: (row['refused'], row['failed']) for row in rows}
    assert found == {
        classifiers.BASELINE: (None, None),
        f'{classifiers.BASELINE}, materialised, {PAPER_BASELINE}': ('it is large', None),
        'resnet10t': (None, 'RuntimeError: a bug'),
    }
    assert 'resnet10t failed: RuntimeError: a bug' in format_classifiers(rows)


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


# 7 are one for the shape of the gradient, 4 that are timed and 2 for the peak: none is left for what is kept.
@pytest.mark.parametrize('calls', [0, 1, 3, 6, 7])
def test_a_model_that_runs_out_of_memory_after_it_was_tried_loses_its_row_alone(calls, monkeypatch):
    tried, kept, time_rounds, saved_memory = [], [], times.time_rounds, compare.saved_memory
    # Each is called once to warm up, once to say how often it is repeated, and once a round.
    monkeypatch.setattr(times, 'time_rounds', lambda *args, **more: time_rounds(*args, **more, least_seconds=0.0))
    monkeypatch.setattr(compare, 'saved_memory', lambda *args: (kept.append(1), saved_memory(*args))[1])

    def create(name, size, device, training=False, **kwargs):
        if name != 'resnet10t':
            return Exhausting(10**9).train(training)
        tried.append(name)
        # The first is the probe's, then come that of the forward and that of training.
        return Exhausting(calls if len(tried) == 3 else 10**9).train(training)

    monkeypatch.setattr(classifiers, 'create_classifier', create)
    rows = measure_classifiers(
        ['resnet10t', 'resnet18'], [(32, 32)], 2, CPU, 'float32', 2, training=True, most_bytes=10**9
    )
    assert len(kept) == 3 + (calls == 7)
    lost = [row for row in rows if row['failed']]
    assert [(row['name'], row['direction']) for row in lost] == [('resnet10t', 'training')]
    assert lost[0]['failed'] == 'OutOfMemoryError: tried to allocate 9 GiB'
    assert len(rows) == 8
    for row in rows:
        assert row in lost or (row['eager']['images_per_second'] > 0 and row['eager']['ratio'] > 0)
    shown = format_classifiers(rows)
    assert 'training resnet10t' in next(line for line in shown.splitlines() if 'failed:' in line)
    assert 'kept MiB' in shown


def test_nothing_is_compared_with_a_baseline_that_runs_out_of_memory(monkeypatch):
    monkeypatch.setattr(torch, 'compile', uncompiled)
    models = {'first': Exhausting(2), 'second': Exhausting(10**9)}
    candidates = [
        Candidate(name, lambda _, model=model: Prepared(lambda: model(torch.ones(1, 3, 2, 2))))
        for name, model in models.items()
    ]
    first, second = compare.compare(candidates, CPU, 2, training=False, compiled=True)
    assert first['eager'] == {'error': 'OutOfMemoryError: tried to allocate 9 GiB'}
    assert first['compiled'] is None
    for kind in ('eager', 'compiled'):
        assert second[kind]['milliseconds'] > 0
        assert second[kind]['ratio'] is None
    with pytest.raises(RuntimeError, match='first failed: OutOfMemoryError'):
        compare.require_figures([second, first])


def test_what_fails_once_it_is_compiled_says_so(monkeypatch):
    monkeypatch.setattr(torch, 'compile', uncompiled)
    model = Exhausting(2)
    found = time_compiled({'good': lambda wrap: int, 'bad': lambda wrap: lambda: model(torch.ones(1, 3, 2, 2))}, CPU, 1)
    assert found['bad'] == {'error': 'OutOfMemoryError: tried to allocate 9 GiB'}
    assert found['good']['compile_seconds'] >= 0


def test_a_model_is_tried_on_images_as_they_are_measured(monkeypatch):
    taken = []

    def create(name, size, device):
        return lambda images: taken.append((images.shape, torch.is_autocast_enabled('cpu')))

    monkeypatch.setattr(classifiers, 'create_classifier', create)
    assert classifiers.probe('any', (5, 3, 48, 32), CPU, 'bfloat16') == {}
    assert taken == [((5, 3, 48, 32), True)]


def test_a_size_that_the_baseline_refuses_has_no_ratios(monkeypatch):
    monkeypatch.setattr(classifiers, 'BASELINE', 'aft_conv_tiny')
    monkeypatch.setattr(torch, 'compile', uncompiled)
    model, refused = measure_classifiers(['resnet10t'], [(40, 32)], 1, CPU, 'float32', 1, compiled=True)
    assert refused['name'] == 'aft_conv_tiny'
    assert model['eager']['ratio'] is model['compiled']['ratio'] is None
    assert model['eager']['images_per_second'] > 0


def test_materialised_attention_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(classifiers, 'compare', lambda *args, **kwargs: [])
    # Three matrices of (6, 5, 5) in float32, of each image and in training of each block.
    for training, needed in ((False, 2 * 1800), (True, 12 * 2 * 1800)):
        for limit, count in ((needed, 0), (needed - 1, 1)):
            rows = measure_classifiers([], [(32, 32)], 2, CPU, 'float32', 1, training=training, most_bytes=limit)
            assert [row['name'] for row in rows] == [f'{classifiers.BASELINE}, materialised, {PAPER_BASELINE}'] * count


def test_an_unknown_classifier_is_rejected_before_anything_is_measured():
    for name in (classifiers.BASELINE, *classifiers.MODELS):
        check_model(name)
    with pytest.raises(ValueError, match=r"such as aft_conv_tiny, .*got 'aft_conv_tinny'"):
        main(['--classifiers', '--models', 'aft_conv_tinny', '--allow-load'])
