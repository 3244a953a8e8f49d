#!/usr/bin/env bash
# fvcore 0.1.5.post20221221: a matrix times a batch of matrices is counted once, not once for each element of the batch.
#
# `FlopCountAnalysis` multiplies the size of the left operand by the columns of the right one, so a batch that only the right
# one has is left out, without a word; the same product from the right is counted whole. One guesses that both sides count
# alike. Who mixes tokens by a weight of positions, `weight @ tokens` with (T, S) and (B, S, C), meets it: gMLP, MLP-Mixer in
# this form and attention-free transformers look cheaper by a factor of the batch: count one image.
#
# Seen: 8 images of 16 tokens, width 32: weight @ tokens 8192, from the right 65536, exact 65536
PACKAGES='fvcore==0.1.5.post20221221 torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import torch
from fvcore.nn import FlopCountAnalysis


class Product(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 16))

    def forward(self, tokens):
        return self.weight @ tokens


class FromTheRight(Product):
    def forward(self, tokens):
        return (tokens.mT @ self.weight.T).mT


tokens = torch.randn(8, 16, 32)
seen = [FlopCountAnalysis(model, tokens).total() for model in (Product(), FromTheRight())]
print('8 images of 16 tokens, width 32: weight @ tokens {}, from the right {}, exact {}'.format(*seen, 8 * 16 * 16 * 32))
raise SystemExit(seen != [16 * 16 * 32, 8 * 16 * 16 * 32])
P
