#!/usr/bin/env bash
# torch 2.14.1: a package of AOTInductor reads any image as if it had the layout of the example, without a word.
#
# The compiled code has the strides of the example in it and does not look at those of its input. An image in channels_last, a
# crop that is a view of a larger image, or one that is expanded over a batch gives other results. One guesses that the package
# copies or refuses, as the exported program and torch.compile give the right result. Whoever decodes to channels_last or crops
# by indexing meets it: `images.contiguous()`.
#
# Seen: errors of results of about 1: contiguous 0.0, channels_last 0.9, a view of a larger image 0.8
PACKAGES='torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import torch
from torch import _inductor


class Mean(torch.nn.Module):
    def forward(self, x):
        return (x * torch.arange(x.shape[-1])).mean((2, 3))


torch.manual_seed(0)
example = torch.randn(2, 3, 16, 16)
exported = torch.export.export(Mean(), (example,))
package = _inductor.aoti_load_package(_inductor.aoti_compile_and_package(exported, package_path='mean.pt2'))
images = example, example.to(memory_format=torch.channels_last), torch.randn(2, 3, 20, 20)[..., 2:18, 2:18]
seen = [float((package(x) - Mean()(x)).abs().max()) for x in images]
print('errors of results of about 1: contiguous {:.1f}, channels_last {:.1f}, a view of a larger image {:.1f}'.format(*seen))
raise SystemExit(seen[0] > 1e-4 or min(seen[1:]) < 0.1)
P
