#!/usr/bin/env bash
# pycocotools 2.0.11: with `maxDets=[1, 10, 50]` the first average precision is -1; faster-coco-eval 1.8.0 gives the value.
#
# `summarize` looks for 100 detections in its first line whatever `maxDets` says, and -1 means that it found none. One
# guesses the precision at the last entry, which the peer that calls itself a replacement gives. Who evaluates a detector of
# few or very many detections meets it, and a comparison of the two tools.
#
# Seen: pycocotools -1.000, faster-coco-eval 1.000
PACKAGES='pycocotools==2.0.11 faster-coco-eval==1.8.0 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import contextlib
import copy
import io

import faster_coco_eval
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

box = {'image_id': 1, 'category_id': 1, 'bbox': [10, 10, 20, 20], 'area': 400, 'iscrowd': 0}
truth = {
    'images': [{'id': 1, 'width': 100, 'height': 100}],
    'annotations': [{**box, 'id': 1}],
    'categories': [{'id': 1, 'name': 'box'}],
}


def precision(data_set, evaluator):
    """The first figure of the summary."""
    with contextlib.redirect_stdout(io.StringIO()):
        known = data_set()
        known.dataset = copy.deepcopy(truth)
        known.createIndex()
        run = evaluator(known, known.loadRes([{**box, 'score': 0.9}]), 'bbox')
        run.params.maxDets = [1, 10, 50]
        run.evaluate()
        run.accumulate()
        run.summarize()
    return float(run.stats[0])


first = precision(COCO, COCOeval)
second = precision(faster_coco_eval.COCO, faster_coco_eval.COCOeval_faster)
print(f'pycocotools {first:.3f}, faster-coco-eval {second:.3f}')
raise SystemExit(first != -1 or second < 0.999)
P
