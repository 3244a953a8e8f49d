import pytest
import timm
import torch
from helpers import randn

from tools.benchmark import pixels
from tools.benchmark.models import create_classifier, create_dense, has_fused_attention, materialise_attention
from tools.benchmark.onehot import FORMS, Shape, measure_onehot
from tools.benchmark.paper import TABLES, PaperTable
from tools.benchmark.pixels import fit_pixels, measure_pixels
from tools.benchmark.tables import measure_table

CPU = torch.device('cpu')
ROWS = [row for table in TABLES.values() for row in table.rows]


@pytest.mark.parametrize('row', [row for row in ROWS if row.model], ids=lambda row: f'{row.name}-{row.model}')
def test_a_row_of_the_paper_names_the_model_that_it_prints(row):
    model = timm.create_model(row.model, device='meta')
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    # 79.7 is not reproducible with kernel 25 and 32 heads, which have 79.86.
    assert millions == pytest.approx(row.parameters, abs=0.2 if row.parameters == 79.7 else 0.1)
    if row.name.startswith('AFT-conv'):
        heads, size, _ = model.blocks[0].attn.kernel.weight.shape
        assert (size, heads) == (row.kernel, row.heads)
    elif row.name.startswith('DeiT'):
        assert model.blocks[0].attn.num_heads == row.heads


def test_every_row_is_compared_with_a_row_of_its_table():
    for table in TABLES.values():
        baselines = {row.name for row in table.rows if row.name == row.baseline}
        assert {row.baseline for row in table.rows} == baselines
        assert all(name.startswith('DeiT') for name in baselines)


def test_a_measured_row_has_exact_parameters_and_ratios_to_deit(monkeypatch):
    names = ('deit_tiny_patch16_224', 'aft_conv_tiny_k11_h32')
    monkeypatch.setitem(TABLES, 7, PaperTable(tuple(row for row in ROWS if row.model in names), 224, 'V100'))
    deit, materialised, conv = measure_table(7, 1, None, CPU, 'float32', rounds=3)
    assert (deit['measured']['parameters'], conv['measured']['parameters']) == (5_717_416, 5_356_072)
    assert (deit['measured']['ratio'], deit['measured']['memory_ratio']) == (1.0, 1.0)
    assert conv['paper']['ratio'] == pytest.approx(2359 / 2507)
    assert conv['paper']['memory_ratio'] == pytest.approx(1.8 / 1.9)
    assert materialised['paper'] is None
    # Two matrices of 3 heads, before and after the softmax.
    assert materialised['measured']['peak_memory_bytes'] > 2 * 3 * 197**2 * 4
    for row in (materialised, conv):
        low, high = row['measured']['ratio_quartiles']
        assert 0 < low <= row['measured']['ratio'] <= high


def test_materialised_attention_gives_the_same_result():
    images = randn(1, 3, 32, 32).float()
    model = create_classifier('deit_tiny_patch16_224', 32, CPU)
    assert has_fused_attention(model)
    with torch.no_grad():
        expected = model(images)
        materialise_attention(model)
        assert not has_fused_attention(model)
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match='a model with fused attention, got a VisionTransformer without'):
        materialise_attention(model)


def test_a_classifier_is_fused_and_a_feature_extractor_takes_any_size():
    model = create_classifier('aft_conv_tiny', 32, CPU)
    assert not model.training
    assert model.blocks[0].attn.kernel.fused is not None
    for name in ('aft_full_tiny', 'deit_tiny_patch16_224', 'resnet18'):
        maps = create_dense(name, CPU)(randn(1, 3, 64, 43).float())
        assert maps[-1].shape[-2:] == ((2, 2) if name == 'resnet18' else (4, 3))


@pytest.fixture
def shallow(monkeypatch):
    """Feature extractors of two blocks."""
    kwargs = dict(features_only=True, out_indices=[0, 1], dynamic_img_size=True, dynamic_img_pad=True)
    monkeypatch.setattr(pixels, 'create_dense', lambda name, device: timm.create_model(name, **kwargs).to(device))


@pytest.mark.usefixtures('shallow')
def test_memory_of_aft_conv_is_linear_in_pixels_and_materialised_attention_is_not():
    rows = measure_pixels(['aft_conv_tiny', 'deit_tiny_patch16_224'], [(384, 384), (224, 224), (256, 384)])
    conv, fused, materialised = fit_pixels(rows)
    assert [fit['label'] for fit in (fused, materialised)] == [
        f'deit_tiny_patch16_224, {kind} attention' for kind in ('fused', 'materialised')
    ]
    assert 0.85 < conv['exponent'] <= 1.05
    assert 0.9 < fused['exponent'] <= 1.05
    assert materialised['exponent'] > 1.4
    assert {fit['baseline'] for fit in (conv, fused, materialised)} == {fused['label']}
    # The input of a block, the queries, keys and values, and the result: 5 maps at least, of 192 channels in float32.
    assert conv['bytes_per_pixel'] > 5 * 192 * 4 / 16**2
    largest = [row['inference_bytes'] for row in rows if row['pixels'] == 384 * 384]
    assert largest[2] > 2 * 3 * 577**2 * 4 > largest[1]


@pytest.mark.usefixtures('shallow')
def test_training_keeps_the_attention_weights_that_are_materialised():
    rows = measure_pixels(['deit_tiny_patch16_224'], [(64, 64), (128, 64)], batch_size=2, training=True)
    assert [row['pixels'] for row in rows] == [2 * 64 * 64, 2 * 128 * 64] * 2
    for row in rows:
        assert row['saved_bytes'] < row['training_bytes']
        assert row['inference_bytes'] < row['saved_bytes']
    more = rows[3]['saved_bytes'] - rows[1]['saved_bytes']
    # In 2 blocks of 3 heads, of 2 images with 32 patches and a class token; fused attention keeps a number per row.
    assert more == pytest.approx(2 * 2 * 3 * (33**2 - 33) * 4, rel=0.01)


def test_fits_find_exponent_and_slope():
    pixels = [10_000, 40_000, 90_000]
    rows = [
        dict(label=label, attention=attention, pixels=x, inference_bytes=value(x))
        for label, attention, value in (
            ('line', None, lambda x: 40 * x + 1000),
            ('power', 'fused', lambda x: 3 * x**1.5),
            ('half', None, lambda x: 20 * x),
        )
        for x in pixels
    ]
    line, power, half = fit_pixels(rows)
    assert line['bytes_per_pixel'] == pytest.approx(40)
    assert line['exponent'] == pytest.approx(1.0, abs=0.01)
    assert power['exponent'] == pytest.approx(1.5)
    assert (half['exponent'], half['bytes_per_pixel']) == pytest.approx((1.0, 20))
    assert power['slope_ratio'] == 1.0
    assert half['slope_ratio'] == pytest.approx(20 / power['bytes_per_pixel'])


def test_one_size_has_no_curve():
    with pytest.raises(ValueError, match='at least 2 image sizes of different area'):
        measure_pixels(['aft_conv_tiny'], [(64, 32), (32, 64)])


def test_the_one_offset_operation_is_timed_on_what_the_convolution_computes():
    rows = measure_onehot(CPU, 'float32', 1, (Shape(2, 16, 4), Shape(1, 16, 16)))
    assert [row['form'] for row in rows] == [*FORMS] * 4
    assert [row['direction'] for row in rows[:6]] == ['forward'] * 3 + ['training'] * 3
    for row in rows:
        assert (row['difference'] is None) == (row['form'] != 'one-hot')
        assert row['difference'] is None or row['difference'] < 1e-5
        assert row['milliseconds'] > 0
        assert row['form'] != 'convolution' or row['ratio'] == 1.0
