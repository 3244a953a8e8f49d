#!/usr/bin/env bash
# timm 1.0.31: `FastCollateMixup(mode='pair')` cuts patches into the images of the data set.
#
# CutMix of a pair exchanges two patches in the arrays that the samples came with. `Mixup` copies first, and the other modes
# write into the new batch, so one guesses that a collate function only reads. Who keeps decoded images in memory and trains
# with two images a pair meets it: after an epoch the images have patches of others and their own labels.
#
# Seen: images of the data set changed by one batch of 8: batch 0, elem 0, pair 8
PACKAGES='timm==1.0.31 torch==2.14.1 torchvision==0.29.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import numpy as np
from timm.data import FastCollateMixup

seen = []
for mode in ('batch', 'elem', 'pair'):
    np.random.seed(0)
    data_set = [(np.full((3, 32, 32), 10 * index, np.uint8), index) for index in range(8)]
    FastCollateMixup(mixup_alpha=0, cutmix_alpha=1, mode=mode, num_classes=8)(data_set)
    seen.append(sum(bool((image != 10 * index).any()) for image, index in data_set))
print('images of the data set changed by one batch of 8: batch {}, elem {}, pair {}'.format(*seen))
raise SystemExit(seen[:2] != [0, 0] or seen[2] == 0)
P
