"""Memory of dense features against the number of pixels."""

import argparse
import math

import torch

from tools.benchmark.compare import DIRECTIONS, compare
from tools.benchmark.models import classifiers, model_names
from tools.benchmark.printer import Report
from tools.benchmark.scaling import report_fits


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the memory of dense features (`features_only`, the last three maps) at image sizes.

    Sizes are padded to whole patches. A model with fused attention is measured with materialised attention too.

    Raises:
        ValueError: there are fewer than two sizes to fit a line through, or timm has no such model.
    """
    sizes = sorted(args.sizes, key=math.prod)
    if math.prod(sizes[0]) == math.prod(sizes[-1]):
        raise ValueError(f'expected at least 2 image sizes of different area, got {sizes}')
    rows = []
    for name in model_names(*args.models):
        for size in sizes:
            candidates = classifiers([name], (args.batch_size, 3, *size), device, dense=True)
            found = compare(candidates, device, 0, dtype=args.dtype, directions=DIRECTIONS[: 1 + args.training])
            rows += [{**row, 'size': size, 'pixels': args.batch_size * math.prod(size)} for row in found]
    head = f'dense features, batch of {args.batch_size}, beyond weights and images'
    return report_fits(rows, 'pixels', head, ('peak_bytes', 'saved_bytes'))
