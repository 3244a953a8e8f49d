#!/usr/bin/env bash
# ptflops 0.7.5: `a @ b` and `torch.einsum` count as nothing, and a matrix times a batch counts without the batch.
#
# Its default backend replaces `torch.matmul` and the like while it counts; the operator `@` and einsum do not go through them,
# and nothing says so. `torch.matmul(weight, tokens)` of (T, S) and (B, S, C) is counted as one product. One guesses that the
# four ways to write a product count alike. Who compares models that multiply outside of `nn.Linear` meets it, as attention or
# a token mixer written with `@` is free: `backend='aten'`, or `torch.bmm`.
#
# Seen: 8 images of 16 tokens, width 32, exact 65536: @ 0, einsum 0, matmul 8192, bmm 65536; @ with backend='aten' 65536
PACKAGES='ptflops==0.7.5 torch==2.14.1 torchvision==0.29.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import torch
from ptflops import get_model_complexity_info

FORMS = {
    '@': lambda weight, tokens: weight @ tokens,
    'einsum': lambda weight, tokens: torch.einsum('ts,bsc->btc', weight, tokens),
    'matmul': lambda weight, tokens: torch.matmul(weight, tokens),
    'bmm': lambda weight, tokens: torch.bmm(weight.expand(8, 16, 16), tokens),
}


class Mixer(torch.nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = FORMS[form]
        self.weight = torch.nn.Parameter(torch.randn(16, 16))

    def forward(self, tokens):
        return self.form(self.weight, tokens)


def count(form, backend='pytorch'):
    """The multiply-adds of eight images."""
    options = dict(as_strings=False, print_per_layer_stat=False, backend=backend)
    options['input_constructor'] = lambda shape: {'tokens': torch.randn(8, *shape)}
    return get_model_complexity_info(Mixer(form), (16, 32), **options)[0]


exact = 8 * 16 * 16 * 32
seen = [count(form) for form in FORMS]
counted = ', '.join(f'{form} {number}' for form, number in zip(FORMS, seen, strict=True))
other = count('@', 'aten')
print(f"8 images of 16 tokens, width 32, exact {exact}: {counted}; @ with backend='aten' {other}")
raise SystemExit(seen != [0, 0, exact // 8, exact] or other != exact)
P
