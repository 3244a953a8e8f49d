#!/usr/bin/env bash
# webdataset 1.0.2: a worker without a shard is an error, not an idle worker.
#
# One shard read by a DataLoader with two workers ends in ValueError "No samples found in dataset". With
# `empty_check=False` all samples come. One guesses that a worker with nothing to do ends quietly, as
# with other iterable data sets. Who has fewer shards than workers, as in a validation split, meets it.
#
# Seen: 2 workers: ValueError; with empty_check=False: 10 samples
PACKAGES='webdataset==1.0.2 torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import webdataset
from torch.utils.data import DataLoader

with webdataset.TarWriter('shard.tar') as shard:
    for index in range(10):
        shard.write({'__key__': f'{index:03}', 'cls': index})


def read(**options):
    """The number of samples that two workers give, or the error."""
    stream = webdataset.WebDataset('shard.tar', shardshuffle=False, **options)
    try:
        return f'{sum(1 for _ in DataLoader(stream, batch_size=None, num_workers=2))} samples'
    except ValueError as error:
        return type(error).__name__


seen = read(), read(empty_check=False)
print('2 workers: {}; with empty_check=False: {}'.format(*seen))
raise SystemExit(seen != ('ValueError', '10 samples'))
P
