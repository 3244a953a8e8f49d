"""Code in the folders of saved text models, with which transformers loads them where this package is not installed."""

import inspect
import logging
import re
import shutil
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

_logger = logging.getLogger(__name__)

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
# The prefix of copied modules, as others may have a `config.py` in such a folder, and Python itself has a `tokenize`.
PREFIX = 'fastformer_'


class SavesCode:
    """Base of models and tokenisers whose `save_pretrained` writes their code next to their weights.

    transformers' Auto classes load such a folder where this package is not installed, with `trust_remote_code=True`.
    The code is the module of a class and those that it imports, which may import only transformers, torch, NLTK and
    modules of this folder, the latter as `from .name import`. Classes, encoders and language models from elsewhere
    cannot be copied: a warning then says that the folder needs them.
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

    def needed_classes(self) -> list[Any]:
        """Return the classes that are needed to load this, except a language model's."""
        return [type(self)]


def write_code(saved: Any, folder: Path) -> None:
    """Write the code of a model or tokeniser into a folder, and the entry of its configuration by which it is found."""
    name, is_tokenizer = type(saved).__name__, AUTO_CLASSES.get(type(saved).__name__) == 'AutoTokenizer'
    foreign = _find_foreign(saved)
    if foreign:
        _logger.warning('%s will load only where %s can be imported', folder, foreign)
        if not is_tokenizer:
            # It may be there from an earlier save, or from the folder that the model was loaded from.
            vars(saved.config).pop('auto_map', None)
        return
    folder.mkdir(parents=True, exist_ok=True)
    source = inspect.getfile(type(saved))
    for file in map(Path, [source, *get_relative_import_files(source)]):
        code = re.sub(rf'^(\s*from \.)(?!{PREFIX})(\w+ import )', rf'\1{PREFIX}\2', file.read_text('utf-8'), flags=re.M)
        (folder / f'{_copied_name(file)}.py').write_text(code, encoding='utf-8')
    if is_tokenizer:
        # A pair of the slow and the fast one.
        saved._auto_map = {'AutoTokenizer': [None, _reference(type(saved))]}
        return
    saved.config.auto_map = {'AutoConfig': _reference(type(saved.config)), AUTO_CLASSES[name]: _reference(type(saved))}
    if name.endswith(('Classification', 'Generation')):
        saved.config.auto_map['AutoModel'] = f'{PREFIX}modeling.FastformerModel'


def _reference(x: type) -> str:
    return f'{_copied_name(Path(inspect.getfile(x)))}.{x.__name__}'


def _copied_name(file: Path) -> str:
    # The name of a module in the folder; one that was loaded from such a folder keeps its own.
    return f'{PREFIX}{file.stem.removeprefix(PREFIX)}'


def _find_foreign(saved: Any) -> str:
    # Return the name of a class that the code needs from outside this package and transformers, or ''.
    if type(saved).__name__ not in AUTO_CLASSES:
        return _full_name(type(saved))
    text_config = getattr(getattr(saved, 'config', None), 'text_config', None)
    if text_config is not None and not type(text_config).__module__.startswith('transformers.'):
        return _full_name(type(text_config))
    return next((_full_name(x) for x in saved.needed_classes() if _package(x) != _package(type(saved))), '')


def _package(x: type) -> str:
    return x.__module__.rpartition('.')[0]


def _full_name(x: Any) -> str:
    return f'{x.__module__}.{x.__name__}'
