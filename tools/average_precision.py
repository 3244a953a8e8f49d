"""Average precision of detected boxes, by pycocotools."""

import contextlib
import io
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def average_precision(
    targets: Sequence[dict[str, Tensor]], found: Sequence[dict[str, Tensor]], use_classes: bool = True
) -> dict[str, float]:
    """Compute COCO's average precision in percent.

    Args:
        targets: For each image `boxes` (N, 4) as x0, y0, x1, y1 and `labels` (N,).
        found: Likewise, with `scores` (N,).
        use_classes: False also matches boxes of different classes.

    Returns:
        `ap`, the mean over the overlaps 0.5, 0.55, ..., 0.95, and `ap50`, that at 0.5.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    rows = torch.cat([_to_rows(i, each, each['scores']) for i, each in enumerate(found)]).double().numpy()
    if not len(rows):
        return {'ap': 0.0, 'ap50': 0.0}
    true = torch.cat([_to_rows(i, each, torch.zeros(len(each['labels']))) for i, each in enumerate(targets)]).tolist()
    truth = COCO()
    truth.dataset = {
        'images': [{'id': i} for i in range(len(targets))],
        'categories': [
            {'id': int(label)} for label in torch.cat([each['labels'] for each in (*targets, *found)]).unique()
        ],
        # An id of 0 would count as no match.
        'annotations': [
            {'id': i, 'image_id': int(image), 'bbox': box, 'area': box[2] * box[3], 'category_id': int(label)}
            | {'iscrowd': 0}
            for i, (image, *box, _, label) in enumerate(true, start=1)
        ],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(np.ascontiguousarray(rows)), 'bbox')
        evaluation.params.useCats = int(use_classes)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: 100 * float(value) for name, value in zip(('ap', 'ap50'), evaluation.stats, strict=False)}


def _to_rows(image: int, found: dict[str, Tensor], scores: Tensor) -> Tensor:
    # (N, 7): image, left, top, width, height, score, label.
    corner, end = found['boxes'].split(2, dim=1)
    number = torch.full((len(corner), 1), float(image))
    return torch.cat([number, corner, end - corner, scores[:, None], found['labels'][:, None]], dim=1)
