import numpy as np
import pytest
import torch
from PIL import Image

from tools import scenes
from tools.scenes import OBJECT_SIDES, Scenes

WIDTH, HEIGHT = 96, 128
SIDE = 160


def make_photographs(classes: int = 4) -> list[tuple[Image.Image, int]]:
    """Photographs of a cross of the grey 60 (label + 1) on black, so that their corners are black."""
    photographs = []
    for label in range(classes):
        pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        pixels[:, 36:-36] = pixels[48:-48] = 60 * (label + 1)
        photographs.append((Image.fromarray(pixels), label))
    return photographs


def make_scenes(split: str = 'train', seed: int = 0) -> Scenes:
    return Scenes(make_photographs(), split, SIDE, seed)


def test_a_scene_depends_only_on_its_number_the_split_and_the_seed():
    image, target = make_scenes()[7]
    again, same = make_scenes()[7]
    assert torch.equal(image, again)
    assert torch.equal(target['boxes'], same['boxes'])
    assert torch.equal(target['labels'], same['labels'])
    others = [make_scenes()[8], make_scenes('test')[7], make_scenes(seed=1)[7]]
    assert all(other['boxes'].tolist() != target['boxes'].tolist() for _, other in others)


def test_a_scene_is_what_a_detector_of_torchvision_takes():
    image, target = make_scenes()[0]
    assert (image.shape, image.dtype) == ((3, SIDE, SIDE), torch.float32)
    assert image.min() >= 0
    assert image.max() <= 1
    assert target['boxes'].dtype == torch.float32
    assert target['labels'].dtype == torch.int64
    assert len(target['boxes']) == len(target['labels'])


@pytest.mark.parametrize('index', range(8))
def test_every_object_has_a_box_of_its_shape_and_label_and_nothing_else_is_shown(index):
    image, target = make_scenes()[index]
    outside = torch.ones(SIDE, SIDE, dtype=torch.bool)
    for x0, y0, x1, y1 in target['boxes'].int().tolist():
        assert 0 <= x0 < x1 <= SIDE
        assert 0 <= y0 < y1 <= SIDE
        assert (x1 - x0) / (y1 - y0) == pytest.approx(WIDTH / HEIGHT, rel=0.1)
        assert OBJECT_SIDES[0] * SIDE - 1 <= x1 - x0 <= OBJECT_SIDES[1] * SIDE
        outside[y0:y1, x0:x1] = False
    assert image[:, outside].max() == 0
    # The last object covers the others.
    x, y = ((target['boxes'][-1, :2] + target['boxes'][-1, 2:]) / 2).int().tolist()
    assert image[0, y, x].item() == pytest.approx(60 * target['labels'][-1].item() / 255, abs=1e-6)


def test_objects_overlap_but_half_of_each_is_visible():
    overlaps, counts = 0, set()
    for index in range(40):
        boxes = make_scenes()[index][1]['boxes'].int().tolist()
        shown = torch.zeros(SIDE, SIDE, dtype=torch.int64)
        for number, (x0, y0, x1, y1) in enumerate(boxes, start=1):
            shown[y0:y1, x0:x1] = number
        visible = shown.flatten().bincount(minlength=len(boxes) + 1)[1:]
        areas = torch.tensor([(x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in boxes])
        assert (visible >= 0.5 * areas).all()
        overlaps += int((visible < areas).any())
        counts.add(len(boxes))
    assert overlaps > 20
    # 3 to 8 are drawn; one without a place is left out, but never the first.
    assert {3, 4, 5, 6, 7, 8} <= counts <= {1, 2, 3, 4, 5, 6, 7, 8}


def test_an_object_that_would_hide_more_than_half_of_another_is_left_out(monkeypatch):
    monkeypatch.setattr(scenes, 'OBJECT_SIDES', (0.99, 0.99))
    photographs = [(Image.new('RGB', (9, 9), 'white'), 0)]
    for index in range(4):
        assert len(Scenes(photographs, 'train', SIDE)[index][1]['boxes']) == 1


def test_the_background_shows_photographs_and_not_one_colour():
    photographs = [(Image.fromarray(np.full((9, 9, 3), 20 * i, np.uint8)), 0) for i in range(12)]
    for index in range(4):
        image, target = Scenes(photographs, 'train', SIDE)[index]
        outside = torch.ones(SIDE, SIDE, dtype=torch.bool)
        for x0, y0, x1, y1 in target['boxes'].int().tolist():
            outside[y0:y1, x0:x1] = False
        assert len(image[0, outside].unique()) >= 3
