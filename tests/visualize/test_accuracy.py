import math
from pathlib import Path

import pytest
import timm
import torch
from helpers import photographs

from aft_vision.data import CorruptImageError
from aft_vision.visualize.accuracy import (
    LabelledPrediction,
    by_class,
    class_rows,
    confused_classes,
    draw_confusions,
    draw_examples,
    interval,
    label_photographs,
    predict_labelled,
)
from aft_vision.visualize.photographs import SkippedImages

NAMES = ['hat', 'shoe', 'shirt']


def make_answer(truth: int, prediction: int) -> LabelledPrediction:
    return LabelledPrediction(Path('any.png'), truth, prediction, 0.5, 0.5 if truth == prediction else 0.25)


@pytest.mark.parametrize(
    # Agresti and Coull (1998): 0 of 10 and 5 of 10; and many.
    ('right', 'count', 'low', 'high'),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (5000, 10_000, 0.4902, 0.5098)],
)
def test_the_interval_is_that_of_wilson(right, count, low, high):
    assert interval(right, count) == pytest.approx((low, high), abs=1e-3)


def test_every_class_is_shown_the_least_accurate_first():
    outcomes = {0: [1, 0], 1: [1], 2: [0], 3: [4, 4, 4], 4: [4, 4]}
    answers = [make_answer(truth, prediction) for truth, found in outcomes.items() for prediction in found]
    groups = by_class(answers)
    assert list(groups) == [2, 3, 0, 1, 4]
    assert [len(group) for group in groups.values()] == [1, 3, 2, 1, 2]


def test_a_row_of_a_class_has_its_accuracy_interval_precision_and_commonest_confusion():
    answers = [make_answer(0, 1), make_answer(0, 1), make_answer(0, 2), make_answer(0, 0), make_answer(1, 1)]
    low, high = (f'{100 * bound:.1f}' for bound in interval(1, 4))
    shirt, other = class_rows(by_class([*answers, make_answer(2, 0)]), NAMES)[:2]
    assert shirt == ['shirt', '1', '0.0%', '0.0 to 79.3%', '0.0%', 'hat (1)']
    assert other == ['hat', '4', '25.0%', f'{low} to {high}%', '50.0%', 'shoe (2)']
    (never,) = class_rows(by_class([make_answer(2, 0)]), NAMES)
    assert never[-2:] == ['never predicted', 'hat (1)']


def test_of_many_classes_the_matrix_has_those_that_are_most_often_confused():
    answers = [make_answer(0, 0), make_answer(1, 2), make_answer(3, 4), make_answer(4, 3), make_answer(3, 4)]
    assert confused_classes(answers) == [0, 1, 2, 3, 4]
    assert confused_classes(answers, at_most=2) == [3, 4]
    assert confused_classes(answers, at_most=4) == [1, 2, 3, 4]


def test_the_confusion_matrix_has_classes_in_its_rows_and_predictions_in_its_columns():
    answers = [make_answer(0, 0), make_answer(0, 2), make_answer(0, 2), make_answer(0, 1), make_answer(2, 2)]
    axes = draw_confusions(answers, NAMES, [0, 2]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ['hat', 'shirt']
    assert {text.get_position(): text.get_text() for text in axes.texts} == {(0, 0): '1', (1, 0): '2', (1, 1): '1'}
    # Shares of all photographs of the class, also of those in a column that is left out.
    assert axes.images[0].get_array().tolist() == [[0.25, 0.5], [0.0, 1.0]]


@pytest.mark.parametrize(
    ('folder', 'paths', 'labels'),
    [
        ('', ['hat/images/1.png', 'shoe/hat/1.png', 'glove/1.png', '1.png'], [0, 1, None, None]),
        ('', ['val/hat/images/1.png', 'val/shoe/1.png', 'glove/shirt/1.png'], [0, 1, 2]),
        ('val/hat', ['1.png', 'images/1.png', 'images/shoe/1.png'], [0, 0, 1]),
        # A folder above those that were asked for says nothing.
        ('hat/holiday', ['1.png', 'sea/1.png'], [None, None]),
    ],
)
def test_the_class_of_a_photograph_is_its_outermost_folder_with_the_name_of_one(tmp_path, folder, paths, labels):
    model = timm.create_model('aft_conv_tiny', depth=1, embed_dim=8, num_heads=4, patch_size=8, num_classes=3)
    model.pretrained_cfg.update(label_names=NAMES)
    assert label_photographs(model, [tmp_path / folder / path for path in paths], tmp_path / folder) == labels


def test_without_a_folder_the_class_is_the_parent_of_a_photograph():
    model = timm.create_model('aft_conv_tiny', depth=1, embed_dim=8, num_heads=4, patch_size=8, num_classes=3)
    model.pretrained_cfg.update(label_names=NAMES)
    assert label_photographs(model, [Path('hat/1.png'), Path('hat/sea/1.png')]) == [0, None]


def test_photographs_of_named_folders_are_judged_as_the_model_sees_them(tmp_path):
    model = timm.create_model('aft_conv_tiny', depth=1, embed_dim=8, num_heads=4, patch_size=8, num_classes=3).eval()
    model.pretrained_cfg.update(label_names=NAMES, input_size=(3, 32, 32), crop_pct=1.0)
    torch.nn.init.zeros_(model.head.weight)
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([0.0, 1.0, 0.0]))
    paths = []
    for folder, image in zip(('shoe', 'hat', 'glove'), photographs(3, (48, 40)), strict=True):
        paths.append(tmp_path / folder / 'a.png')
        paths[-1].parent.mkdir()
        image.save(paths[-1])
    truths = dict(zip(paths, label_photographs(model, paths), strict=True))
    shoe, hat = predict_labelled(model, truths)
    assert (shoe.is_right, hat.is_right) == (True, False)
    assert hat.probability == shoe.truth_probability == pytest.approx(math.e / (math.e + 2))
    assert hat.truth_probability == pytest.approx(1 / (math.e + 2))
    assert predict_labelled(model, {paths[2]: None}) == []
    damaged, skipped = tmp_path / 'hat' / '0.png', SkippedImages()
    damaged.write_bytes(b'damaged')
    assert predict_labelled(model, {damaged: 0, **truths}, skipped=skipped) == [shoe, hat]
    assert skipped.paths == {damaged}
    with pytest.raises(CorruptImageError):
        predict_labelled(model, {damaged: 0, **truths})
    figure = draw_examples([[shoe], [hat]], NAMES, model, columns=2)
    shown = [(axes.get_title(), *(text.get_text() for text in axes.texts)) for axes in figure.axes if axes.get_title()]
    said = 'prediction (58%):\nshoe'
    assert shown == [('truth: shoe', said), ('truth (21%): hat', said)]
