#!/usr/bin/env bash
# webdataset 1.0.2: a member's key ends at the first dot of its name, so frame_0.5.jpg and frame_0.7.jpg are one sample.
#
# One guesses that a field is what follows the last dot, as with any file. Here the two frames are the fields 5.jpg and
# 7.jpg of the sample frame_0, and a reader of `jpg` finds none. Who names files by numbers or times meets it: replace the
# dots before shards are written.
#
# Seen: 1 sample: __key__ frame_0, fields 5.jpg, 7.jpg
PACKAGES='webdataset==1.0.2 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import io
import tarfile

import webdataset

with tarfile.open('shard.tar', 'w') as shard:
    for name in ('frame_0.5.jpg', 'frame_0.7.jpg'):
        member = tarfile.TarInfo(name)
        member.size = 3
        shard.addfile(member, io.BytesIO(b'abc'))
samples = list(webdataset.WebDataset('shard.tar', shardshuffle=False))
fields = sorted(key for key in samples[0] if not key.startswith('__'))
print(f'{len(samples)} sample: __key__ {samples[0]["__key__"]}, fields {", ".join(fields)}')
raise SystemExit(len(samples) != 1 or fields != ['5.jpg', '7.jpg'])
P
