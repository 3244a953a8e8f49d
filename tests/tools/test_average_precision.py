import pytest
import torch
from torch import Tensor

from tools.average_precision import average_precision

BOXES = torch.tensor([[0.0, 0.0, 30.0, 40.0], [50.0, 10.0, 90.0, 70.0]])
TARGETS = [{'boxes': BOXES, 'labels': torch.tensor([1, 2])}, {'boxes': BOXES[:1], 'labels': torch.tensor([2])}]


def find(targets: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{**target, 'scores': torch.linspace(0.9, 0.5, len(target['labels']))} for target in targets]


def test_the_average_precision_of_the_true_boxes_is_100():
    assert average_precision(TARGETS, find(TARGETS)) == {'ap': 100, 'ap50': 100}


def test_boxes_of_another_class_count_only_where_boxes_alone_do():
    found = find([{**target, 'labels': 3 + target['labels']} for target in TARGETS])
    assert average_precision(TARGETS, found) == {'ap': 0, 'ap50': 0}
    assert average_precision(TARGETS, found, use_classes=False) == {'ap': 100, 'ap50': 100}


def test_a_box_counts_at_the_overlaps_that_it_has():
    # 0.67 is above 0.5, 0.55, 0.6 and 0.65: four of ten.
    scale = torch.tensor([0.67, 1.0, 0.67, 1.0])
    targets = [{'boxes': BOXES[:1], 'labels': torch.tensor([1])}]
    found = find([{'boxes': BOXES[:1] * scale, 'labels': torch.tensor([1])}])
    assert average_precision(targets, found) == pytest.approx({'ap': 40, 'ap50': 100})


def test_a_missed_box_and_a_wrong_one_with_a_higher_score_lower_the_precision():
    targets = [{'boxes': BOXES, 'labels': torch.tensor([1, 1])}]
    # Precision is 1 up to a recall of 0.5: 51 of COCO's 101 recalls.
    missed = find([{'boxes': BOXES[:1], 'labels': torch.tensor([1])}])
    assert average_precision(targets, missed)['ap50'] == pytest.approx(100 * 51 / 101)
    wrong = torch.tensor([[200.0, 200.0, 220.0, 220.0]])
    behind = find([{'boxes': torch.cat([wrong, BOXES]), 'labels': torch.tensor([1, 1, 1])}])
    assert average_precision(targets, behind)['ap50'] == pytest.approx(100 * 2 / 3)


def test_nothing_found_has_no_precision():
    empty = {'boxes': torch.zeros(0, 4), 'labels': torch.zeros(0, dtype=torch.int64), 'scores': torch.zeros(0)}
    assert average_precision(TARGETS, [empty, empty]) == {'ap': 0, 'ap50': 0}
    assert average_precision(TARGETS, [empty, *find(TARGETS[1:])])['ap50'] == pytest.approx((0 + 100 * 51 / 101) / 2)
