#!/usr/bin/env bash
# peft 0.21.2, timm 1.0.31: `layers_to_transform` finds no block of a timm ViT.
#
# The number of a block is looked for behind a module within another, as in `model.layers.1`; timm's blocks lie at the top, as
# `blocks.1`. One guesses that numbered blocks are found, as the same `target_modules` without numbers are. Who adapts the
# last blocks only meets it: `layers_pattern='blocks'`.
#
# Seen: layers_to_transform=[1]: ValueError; with layers_pattern='blocks': blocks.1.attn.qkv
PACKAGES='peft==0.21.2 timm==1.0.31 torch==2.14.1 torchvision==0.29.1'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import timm
from peft import LoraConfig, get_peft_model


def adapted(**options):
    """The layers with an adapter, or the error."""
    config = LoraConfig(r=4, target_modules=['qkv'], layers_to_transform=[1], **options)
    try:
        model = get_peft_model(timm.create_model('vit_tiny_patch16_224', depth=3), config)
    except ValueError:
        return 'ValueError'
    names = [name for name, _ in model.named_parameters() if 'lora_A' in name]
    return ', '.join(name.split('.lora_A')[0].removeprefix('base_model.model.') for name in names)


seen = adapted(), adapted(layers_pattern='blocks')
print("layers_to_transform=[1]: {}; with layers_pattern='blocks': {}".format(*seen))
raise SystemExit(seen != ('ValueError', 'blocks.1.attn.qkv'))
P
