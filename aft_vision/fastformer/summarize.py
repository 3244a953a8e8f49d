"""Summaries of texts by a trained model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from aft_vision.fastformer.data.batches import token_ids
from aft_vision.modes import in_evaluation


def load_summarizer(
    folder: str | Path, device: str | torch.device = 'cpu'
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model that summarises, and its tokenizer.

    Raises:
        ValueError: the folder has no model with an encoder and a decoder.
    """
    folder = Path(folder)
    if not (folder / 'config.json').is_file():
        raise ValueError(f'expected a folder with a saved model, got {folder}, which has no config.json')
    config = AutoConfig.from_pretrained(folder)
    # transformers would initialise a model of another task at random, with a long warning.
    known: Any = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.get(type(config), None)
    saved = (config.architectures or ['none'])[0]
    if known is None or saved != known.__name__:
        raise ValueError(
            f'expected a model that summarises, with an encoder and a decoder, got {folder} with a {saved}'
        )
    return AutoModelForSeq2SeqLM.from_pretrained(folder).to(device), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def summarize(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    batch_size: int = 8,
    **options: Any,
) -> list[str]:
    """Summarise texts with `model.generate`, on the model's device.

    Args:
        model: With an encoder and a decoder; what `generation_config` of it says holds where `options` does not.
        texts: Texts of any length; they are cut off at the longest text of the model, `max_position_embeddings`.
        batch_size: Texts that are summarised at once.
        options: Passed to `generate`, such as `num_beams`, `max_new_tokens`, `min_new_tokens`, `no_repeat_ngram_size`.

    Returns:
        A summary for each text, without the special tokens.

    Raises:
        ValueError: `texts` is one text.
    """
    if isinstance(texts, str):
        raise ValueError('expected texts, such as a list of them, got one text')
    # transformers has a separate type for models that generate.
    generate: Any = model.generate
    summaries: list[str] = []
    with in_evaluation(model):
        for start in range(0, len(texts), batch_size):
            batch = _encode(texts[start : start + batch_size], tokenizer, model)
            summaries += decode(generate(**batch, **options), tokenizer)
    return summaries


def decode(sequences: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Decode generated tokens (B, T) to stripped texts without special tokens."""
    return [text.strip() for text in tokenizer.batch_decode(sequences, skip_special_tokens=True)]


def _encode(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> dict[str, torch.Tensor]:
    longest = getattr(model.config, 'max_position_embeddings', None)
    batch = tokenizer.pad({'input_ids': token_ids(texts, tokenizer, longest)}, return_tensors='pt')
    return {name: batch[name].to(model.device) for name in ('input_ids', 'attention_mask')}
