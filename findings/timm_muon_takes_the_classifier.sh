#!/usr/bin/env bash
# timm 1.0.31: `create_optimizer_v2(model, 'muon')` orthogonalises the classifier's updates too.
#
# Muon's authors leave the output layer to AdamW, and a model of timm names its classifier, so one guesses that timm does the
# same. Only vectors, the class token, the position embedding and matrices with a side below 4, as a classifier of 3 classes,
# are AdamW's. Who compares with published recipes meets it: `fallback_list=['head.weight']`.
#
# Seen: weights with Muon: patch_embed.proj, qkv, proj, fc1, fc2, head; with fallback_list: patch_embed.proj, qkv, proj, fc1, fc2
PACKAGES='timm==1.0.31 torch==2.14.1 torchvision==0.29.1'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import timm
import torch
from timm.optim import create_optimizer_v2


def orthogonalised(**options):
    """Layers whose weights Muon updates."""
    model = timm.create_model('vit_tiny_patch16_224', depth=1, num_classes=10)
    optimizer = create_optimizer_v2(model, 'muon', **options)
    model(torch.randn(2, 3, 224, 224)).sum().backward()
    optimizer.step()
    names = [name for name, value in model.named_parameters() if 'momentum_buffer' in optimizer.state[value]]
    return [name.removesuffix('.weight').removeprefix('blocks.0.').removeprefix('attn.').removeprefix('mlp.') for name in names]


every, without = orthogonalised(), orthogonalised(fallback_list=['head.weight'])
print(f'weights with Muon: {", ".join(every)}; with fallback_list: {", ".join(without)}')
raise SystemExit(every[-1] != 'head' or 'head' in without)
P
