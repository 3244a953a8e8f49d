"""Fastformer text models in Hugging Face's form; importing this makes them known to its Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

# They register encoders and a tokeniser.
from . import baselines, tokenize
from .config import PRESETS, FastformerConfig, Preset
from .convert import convert_notebook_state_dict
from .encoder import ENCODERS, create_encoder, register_encoder
from .modeling import FastformerForSequenceClassification, FastformerModel, FastformerPreTrainedModel
from .seq2seq import FastformerForConditionalGeneration

AutoConfig.register('fastformer', FastformerConfig)
AutoModel.register(FastformerConfig, FastformerModel)
AutoModelForSequenceClassification.register(FastformerConfig, FastformerForSequenceClassification)
AutoModelForSeq2SeqLM.register(FastformerConfig, FastformerForConditionalGeneration)

__all__ = [
    'ENCODERS',
    'PRESETS',
    'FastformerConfig',
    'FastformerForConditionalGeneration',
    'FastformerForSequenceClassification',
    'FastformerModel',
    'FastformerPreTrainedModel',
    'Preset',
    'convert_notebook_state_dict',
    'create_encoder',
    'register_encoder',
]
