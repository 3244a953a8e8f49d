"""Fastformer text models for transformers; importing the package registers them with its Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoTokenizer

from .config import PRESETS, FastformerConfig, Preset
from .conversion import FastformerConversionConfig, FastformerForConversion
from .encoder import ENCODERS, create_encoder, register_encoder
from .hierarchy import FastformerHierarchyConfig
from .modeling import FastformerForSequenceClassification, FastformerModel, FastformerPreTrainedModel
from .newsrec import FastformerForNewsRecommendation, FastformerNewsConfig
from .notebook import convert_notebook_state_dict
from .seq2seq import FastformerForConditionalGeneration
from .tokenize import NltkTokenizer, NltkTokenizerConfig, TextTokenizer, TextTokenizerConfig

AutoConfig.register('fastformer', FastformerConfig)
AutoConfig.register('fastformer_conversion', FastformerConversionConfig)
AutoConfig.register('fastformer_news', FastformerNewsConfig)
AutoModel.register(FastformerConfig, FastformerModel)
AutoModel.register(FastformerConversionConfig, FastformerForConversion)
AutoModel.register(FastformerNewsConfig, FastformerForNewsRecommendation)
AutoModelForSequenceClassification.register(FastformerConfig, FastformerForSequenceClassification)
AutoModelForSeq2SeqLM.register(FastformerConfig, FastformerForConditionalGeneration)
AutoTokenizer.register(TextTokenizerConfig, fast_tokenizer_class=TextTokenizer)
AutoTokenizer.register(NltkTokenizerConfig, fast_tokenizer_class=NltkTokenizer)

__all__ = [
    'ENCODERS',
    'PRESETS',
    'FastformerConfig',
    'FastformerConversionConfig',
    'FastformerForConditionalGeneration',
    'FastformerForConversion',
    'FastformerForNewsRecommendation',
    'FastformerForSequenceClassification',
    'FastformerHierarchyConfig',
    'FastformerModel',
    'FastformerNewsConfig',
    'FastformerPreTrainedModel',
    'Preset',
    'convert_notebook_state_dict',
    'create_encoder',
    'register_encoder',
]
