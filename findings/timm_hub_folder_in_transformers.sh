#!/usr/bin/env bash
# timm 1.0.31, transformers 5.24.0: a folder that timm saves for the hub does not load in transformers.
#
# transformers has a wrapper for timm's models and takes their folders, and timm's `save_for_hf` writes the files it wants.
# One guesses that the two fit. timm writes `num_classes` at the top of config.json and under `model_args`, and the wrapper
# passes both. Who fine-tunes in timm and serves by transformers' pipeline meets it: remove the second one.
#
# Seen: TypeError, multiple values for keyword argument 'num_classes'; without the second one it loads
PACKAGES='timm==1.0.31 transformers==5.24.0 torch==2.14.1 torchvision==0.29.1 safetensors==0.8.0'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import json
from pathlib import Path

import timm
from transformers import AutoModelForImageClassification

model = timm.create_model('resnet10t', num_classes=4)
timm.models.save_for_hf(model, 'folder', model_config={'num_classes': 4}, model_args={'num_classes': 4})
try:
    AutoModelForImageClassification.from_pretrained('folder')
    seen = 'it loads'
except TypeError as error:
    seen = f'TypeError, {str(error).split("got ")[-1]}'
path = Path('folder/config.json')
config = json.loads(path.read_text())
del config['model_args']['num_classes']
path.write_text(json.dumps(config))
AutoModelForImageClassification.from_pretrained('folder')
print(f'{seen}; without the second one it loads')
raise SystemExit('num_classes' not in seen)
P
