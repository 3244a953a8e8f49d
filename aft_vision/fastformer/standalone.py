"""Code in the folders of saved text models, with which transformers loads them where this package is not installed."""

import logging
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from aft_vision.inline import inline

from .encoder import ENCODERS

_logger = logging.getLogger(__name__)

MODELING, TOKENIZATION = 'modeling_fastformer', 'tokenization_fastformer'
# The Auto class of each class. A classifier also loads as AutoModel, without its head, as does the encoder of a writer.
AUTO_CLASSES = {
    'FastformerModel': 'AutoModel',
    'FastformerForSequenceClassification': 'AutoModelForSequenceClassification',
    'FastformerForConditionalGeneration': 'AutoModelForSeq2SeqLM',
    'FastformerForNewsRecommendation': 'AutoModel',
    'FastformerForConversion': 'AutoModel',
    'TextTokenizer': 'AutoTokenizer',
    'NltkTokenizer': 'AutoTokenizer',
}
HEADER = '''"""{name} of aft_vision, without that package.

Use it through transformers' Auto classes with trust_remote_code=True.
"""

'''


class SavesCode:
    """Base of models and tokenisers whose `save_pretrained` writes a file with their code next to their weights.

    transformers' Auto classes load such a folder where this package is not installed, with `trust_remote_code=True`.
    Classes, encoders and language models from elsewhere cannot be copied: a warning then says that the folder needs
    them.
    """

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does, with the code; `push_to_hub()` uploads it too, `push_to_hub=True` does not."""
        folder = Path(save_directory)
        write_code(self, folder)
        saved = super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        # safetensors 0.8 lets only the owner read what it writes. An adapter has a configuration of its own.
        for config in folder.glob('*config.json'):
            for weights in folder.glob('*.safetensors'):
                shutil.copymode(config, weights)
        return saved


# In the copied code: transformers itself copies the file that a class was loaded from.
COPIED = 'class SavesCode:\n    """Base of classes that transformers saves with this file."""'


def write_code(saved: Any, folder: Path) -> None:
    """Write the code of a model or tokeniser into a folder, and the entry of its configuration by which it is found."""
    name, is_tokenizer = type(saved).__name__, AUTO_CLASSES.get(type(saved).__name__) == 'AutoTokenizer'
    foreign = _find_foreign(saved)
    if foreign:
        _logger.warning('%s will load only where %s can be imported', folder, foreign)
        if not is_tokenizer:
            # Of an earlier save, or of the folder that the model was loaded from.
            vars(saved.config).pop('auto_map', None)
        return
    file = TOKENIZATION if is_tokenizer else MODELING
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f'{file}.py').write_text(HEADER.format(name=name) + _source(*_roots(saved)), encoding='utf-8')
    if is_tokenizer:
        # A pair of the slow and the fast one.
        saved._auto_map = {'AutoTokenizer': [None, f'{file}.{name}']}
        return
    saved.config.auto_map = {
        'AutoConfig': f'{file}.{type(saved.config).__name__}',
        **({'AutoModel': f'{file}.FastformerModel'} if name.endswith(('Classification', 'Generation')) else {}),
        AUTO_CLASSES[name]: f'{file}.{name}',
    }


def _find_foreign(saved: Any) -> str:
    # The name of something that the code needs and that is of neither this package nor transformers, or ''.
    if type(saved).__name__ not in AUTO_CLASSES or not _is_ours(type(saved)):
        return _name(type(saved))
    config = getattr(saved, 'config', None)
    if config is None:
        return ''
    text_config = getattr(config, 'text_config', None)
    if text_config is not None and not type(text_config).__module__.startswith('transformers.'):
        return _name(type(text_config))
    return next((_name(x) for x in (type(config), ENCODERS[config.encoder_mixer]) if not _is_ours(x)), '')


def _roots(saved: Any) -> list[str]:
    config = getattr(saved, 'config', None)
    needed: list[Any] = [type(saved)]
    if config is not None:
        needed = [type(config), ENCODERS[config.encoder_mixer], type(saved)]
    return [f'{x.__module__}:{x.__name__}' for x in needed]


@cache
def _source(*roots: str) -> str:
    return inline(*roots, replace={'SavesCode': COPIED})


def _is_ours(x: Any) -> bool:
    return x.__module__.startswith(f'{__package__}.')


def _name(x: Any) -> str:
    return f'{x.__module__}.{x.__name__}'
