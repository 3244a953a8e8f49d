"""The keys of the trainers, which the trainers print."""

raise SystemExit('error: train.keys is gone: --keys of a trainer prints its keys, as aft-vision train --keys')
