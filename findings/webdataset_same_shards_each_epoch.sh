#!/usr/bin/env bash
# webdataset 1.0.2: `shardshuffle` draws one order of the shards, and every epoch has it.
#
# The generator of the order is seeded again at each pass by the same number, with `seed` and without it. One guesses another
# order in each epoch, as from a DataLoader and from this library's own `shuffle` of samples. Who trains on more shards than
# the buffer of samples holds meets it: `detshuffle=True`.
#
# Seen: three passes over 8 shards have 1 order; with a seed 1, with detshuffle 3
PACKAGES='webdataset==1.0.2 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import webdataset

for index in range(8):
    with webdataset.TarWriter(f'{index}.tar') as shard:
        shard.write({'__key__': str(index), 'cls': index})


def orders(**options):
    """The number of different orders in three passes."""
    stream = webdataset.WebDataset('{0..7}.tar', shardshuffle=100, **options)
    return len({tuple(sample['__key__'] for sample in stream) for _ in range(3)})


seen = orders(), orders(seed=1), orders(seed=1, detshuffle=True)
print('three passes over 8 shards have {} order; with a seed {}, with detshuffle {}'.format(*seen))
raise SystemExit(seen != (1, 1, 3))
P
