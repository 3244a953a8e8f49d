from pathlib import Path

import pytest

from aft_vision.resolution import (
    distinct_names,
    draw_sizes,
    size_label,
)


def row(side: int) -> dict[str, int]:
    return {'height': side, 'width': side}


@pytest.mark.parametrize(
    ('row', 'label'),
    [
        (row(224), '224'),
        ({'height': 384, 'width': 256}, '384x256'),
        ({'max_tokens': 96}, 'native 96'),
    ],
)
def test_a_row_is_labelled_by_its_sizes(row, label):
    assert size_label(row) == label


def test_accuracy_has_standard_errors_and_the_size_of_training_is_marked():
    figure = {'top1': 36.0, 'top5': 90.0, 'samples': 100, 'images_per_second': 9.0, 'peak_memory_mb': 9.0}
    native = {'max_tokens': 16, **figure}
    accuracy = draw_sizes([{**row(32), **figure}, {**row(64), **figure}, native], [64, 64]).axes[0]
    top1, whole, *_ = accuracy.containers
    for bars, count in ((top1, 2), (whole, 1)):
        (spread,) = bars.lines[2]
        # Of 100 images at 36 %: 4.8 points.
        assert [tuple(end[1] for end in each) for each in spread.get_segments()] == [
            pytest.approx((31.2, 40.8))
        ] * count
    line = next(line for line in accuracy.lines if line.get_label() == 'size of training')
    assert list(line.get_xdata()) == [1, 1]


@pytest.mark.parametrize(
    ('paths', 'names'),
    [
        (['runs/a/best.pth', 'runs/b/best.pth'], ['a', 'b']),
        (['runs/a/best.pth', 'runs/a/last.pth'], ['best.pth', 'last.pth']),
        (['x/a/best.pth', 'y/b/export'], ['x/a/best.pth', 'y/b/export']),
        (['best.pth', 'best.pth'], ['best.pth', 'best.pth']),
    ],
)
def test_checkpoints_are_named_by_what_tells_them_apart(paths, names):
    assert distinct_names([Path(path) for path in paths]) == names
