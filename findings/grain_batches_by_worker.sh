#!/usr/bin/env bash
# grain 0.2.18: `worker_count` changes which records are in a batch, and how many batches there are.
#
# 10 records in batches of 4 are 3 batches without workers and 4 with two: each worker batches its own half of the records.
# One guesses that workers only work ahead, as the batches of torch's DataLoader do not depend on them. Who counts updates
# of a schedule, or compares two machines, meets it.
#
# Seen: 0 workers [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]; 2 workers [[0, 2, 4, 6], [1, 3, 5, 7], [8], [9]]
PACKAGES='grain==0.2.18'
. "$(dirname "$0")/environment"
cat > batches.py <<'P'
import sys

import grain
from absl import flags

if __name__ == '__main__':
    flags.FLAGS(sys.argv[:1])
    seen = {}
    for workers in (0, 2):
        loader = grain.DataLoader(
            data_source=grain.sources.RangeDataSource(0, 10, 1),
            sampler=grain.samplers.IndexSampler(10, shuffle=False, num_epochs=1),
            operations=[grain.transforms.Batch(4)],
            worker_count=workers,
        )
        seen[workers] = [batch.tolist() for batch in loader]
    print('; '.join(f'{workers} workers {batches}' for workers, batches in seen.items()))
    raise SystemExit(len(seen[0]) != 3 or seen[2] != [[0, 2, 4, 6], [1, 3, 5, 7], [8], [9]])
P
"$PY" batches.py
