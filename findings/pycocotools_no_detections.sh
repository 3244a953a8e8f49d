#!/usr/bin/env bash
# pycocotools 2.0.11: an empty list of detections is an error; faster-coco-eval 1.8.0 gives an average precision of 0.
#
# `loadRes` looks at the first detection to see what kind they are, and there is none. One guesses 0, as nothing was found. Who
# evaluates a detector in its first epochs with a threshold on the scores meets it: take 0 if the list is empty.
#
# Seen: pycocotools IndexError, faster-coco-eval 0.0
PACKAGES='pycocotools==2.0.11 faster-coco-eval==1.8.0 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import contextlib
import io

import faster_coco_eval
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

box = {'id': 1, 'image_id': 1, 'category_id': 1, 'bbox': [10, 10, 20, 20], 'area': 400, 'iscrowd': 0}


def precision(data_set, evaluator):
    """The first figure of the summary, or the error."""
    with contextlib.redirect_stdout(io.StringIO()):
        known = data_set()
        known.dataset = {
            'images': [{'id': 1, 'width': 100, 'height': 100}],
            'annotations': [dict(box)],
            'categories': [{'id': 1, 'name': 'box'}],
        }
        known.createIndex()
        try:
            run = evaluator(known, known.loadRes([]), 'bbox')
        except IndexError as error:
            return type(error).__name__
        run.evaluate()
        run.accumulate()
        run.summarize()
    return str(float(run.stats[0]))


seen = precision(COCO, COCOeval), precision(faster_coco_eval.COCO, faster_coco_eval.COCOeval_faster)
print('pycocotools {}, faster-coco-eval {}'.format(*seen))
raise SystemExit(seen != ('IndexError', '0.0'))
P
