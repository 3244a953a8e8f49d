#!/usr/bin/env bash
# peft 0.21.2, timm 1.0.31: `target_modules='all-linear'` works on a model of timm, and adapts its classifier too.
#
# PEFT's documentation speaks of transformers, so one guesses an error. Every linear layer gets an adapter, the head
# included, which for a model of transformers is left out. A new head then trains as a frozen random matrix plus a
# low-rank one. Who fine-tunes a timm model on other classes meets it: name the layers, and give the head to
# `modules_to_save`.
#
# Seen: 5 adapters, the last of head; weights of the head that train: none
PACKAGES='peft==0.21.2 timm==1.0.31 torch==2.14.1 torchvision==0.29.1'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import timm
from peft import LoraConfig, get_peft_model

model = timm.create_model('vit_tiny_patch16_224', depth=1, num_classes=4)
model = get_peft_model(model, LoraConfig(r=4, target_modules='all-linear'))
adapted = [name.split('.lora_A')[0].removeprefix('base_model.model.') for name, _ in model.named_parameters() if 'lora_A' in name]
trains = [name for name, value in model.named_parameters() if 'head.base_layer' in name and value.requires_grad]
print(f'{len(adapted)} adapters, the last of {adapted[-1]}; weights of the head that train: {trains or "none"}')
raise SystemExit(len(adapted) != 5 or adapted[-1] != 'head' or bool(trains))
P
