"""Tokenisers for the text models: words as NLTK or wordpunct finds them, or byte pairs, with a vocabulary of the texts.

Each is a `PreTrainedTokenizerFast`, which takes raw text, and which `AutoTokenizer` loads once the package is imported.
"""

import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from tokenizers import Encoding, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BatchEncoding, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import LARGE_INTEGER

from .standalone import SavesCode

# In the order of their ids, 0 to 3.
SPECIAL_TOKENS = {'pad_token': '<pad>', 'bos_token': '<s>', 'eos_token': '</s>', 'unk_token': '<unk>'}
METHODS = ('nltk', 'wordpunct', 'bpe')
BYTES = 256


class TextTokenizer(SavesCode, PreTrainedTokenizerFast):
    """A fast tokeniser that cuts off long texts and encodes an empty one, as in training.

    A text without a token becomes one unknown token. A text is cut off at `model_max_length`, where that is set, unless
    the call has `truncation` or `max_length`: transformers' pipelines have neither.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> BatchEncoding:
        """Encode texts with the arguments of transformers."""
        return super().__call__(*args, **self._truncating(kwargs))

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Return the token ids of a text with the arguments of transformers."""
        return super().encode(*args, **self._truncating(kwargs))

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does, with the code, but without the truncation and the padding of the last call."""
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        return super().save_pretrained(*args, **kwargs)

    def _truncating(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        limited = self.model_max_length < LARGE_INTEGER and kwargs.get('max_length') is None
        return {'truncation': True, **kwargs} if limited else kwargs

    def _convert_encoding(self, encoding: Encoding, *args: Any, **kwargs: Any) -> Any:
        known = encoding if 1 in encoding.attention_mask else self._encode_unknown(len(encoding))
        return super()._convert_encoding(known, *args, **kwargs)

    def _encode_unknown(self, length: int) -> Encoding:
        """Encode one unknown token, padded to this length, or, if the length is 0, to the requested multiple."""
        # A template's tokens stand at (0, 0) of the text, of which they are no part.
        template = processors.TemplateProcessing(
            single=self.unk_token, special_tokens=[(self.unk_token, self.unk_token_id)]
        )
        encoding = template.process(Encoding())
        multiple = (self.backend_tokenizer.padding or {}).get('pad_to_multiple_of') or 1
        length = max(length, multiple)
        encoding.pad(length, direction=self.padding_side, pad_id=self.pad_token_id, pad_token=self.pad_token)
        return encoding


class TextTokenizerConfig(PreTrainedConfig):
    """The class of config under which `AutoTokenizer` registers TextTokenizer."""

    model_type = 'text_tokenizer'


class NltkTokenizer(TextTokenizer):
    """A text tokeniser that divides raw text with NLTK first; offsets count in the words joined by spaces."""

    def _encode_plus(self, text: Any, text_pair: Any = None, *args: Any, **kwargs: Any) -> BatchEncoding:
        if not kwargs.get('is_split_into_words', False):
            text, text_pair = _join_words(text), _join_words(text_pair)
        return super()._encode_plus(text, text_pair, *args, **kwargs)


class NltkTokenizerConfig(PreTrainedConfig):
    """The class of config under which `AutoTokenizer` registers NltkTokenizer."""

    model_type = 'nltk_tokenizer'


def train_tokenizer(
    texts: Iterable[str],
    method: str = 'wordpunct',
    vocab_size: int = 50_000,
    min_frequency: int = 1,
    lowercase: bool = True,
    max_length: int | None = None,
) -> PreTrainedTokenizerFast:
    """Make a tokeniser whose vocabulary is what is most frequent in texts; equal counts go by the alphabet.

    A text without a token, such as an empty one, becomes one unknown token.

    Args:
        texts: The training texts, read once.
        method: `nltk`: NLTK's word_tokenize. `wordpunct`: runs of word characters and runs of others but spaces, as
            NLTK's wordpunct_tokenize. `bpe`: byte pairs, which leave nothing unknown.
        vocab_size: Largest size, with the four special tokens; padding is 0, begin 1, end 2, unknown 3.
        min_frequency: Smallest count in the texts of a word, or of a pair of `bpe`.
        lowercase: Texts are lower-cased, after NLTK and before wordpunct and byte pairs.
        max_length: Where texts are cut off, in tokens, unless `truncation=False`; None for nowhere.

    Raises:
        ValueError: the method is unknown, the size is too small, or the texts have no words.
    """
    if isinstance(texts, str):
        raise ValueError('expected texts, such as a list of them, got one text')
    if method not in METHODS:
        raise ValueError(f'expected the method {", ".join(METHODS)}, got {method!r}')
    min_size = len(SPECIAL_TOKENS) + (BYTES if method == 'bpe' else 1)
    if vocab_size < min_size:
        raise ValueError(f'vocab_size must be at least {min_size} with the method {method}, got {vocab_size}')
    backend = _make_backend(method, lowercase)
    if method == 'nltk':
        texts = map(_join_words, texts)
    backend.train_from_iterator(texts, _make_trainer(method, vocab_size, min_frequency))
    if backend.get_vocab_size() < min_size:
        raise ValueError(f'expected texts with words that occur {min_frequency} times or more, got none')
    tokenizer_class = NltkTokenizer if method == 'nltk' else TextTokenizer
    return tokenizer_class(
        tokenizer_object=backend,
        **SPECIAL_TOKENS,
        model_max_length=max_length,
        model_input_names=['input_ids', 'attention_mask'],
        # Decoded text: "isn't it?" and not "isn ' t it ?". Byte pairs know their spaces.
        clean_up_tokenization_spaces=method != 'bpe',
        # A text that reads "<pad>" is a text.
        split_special_tokens=True,
    )


def nltk_words(text: str) -> list[str]:
    """Divide a text as NLTK's word_tokenize does; without NLTK's data, untrained Punkt finds the sentences.

    Untrained Punkt takes the full stop of an abbreviation, as in "Mr. Smith", for the end of a sentence, and so cuts it
    off; a warning says so once.
    """
    # Importing NLTK takes as long as a fifth of this package, and only its words need it.
    try:
        from nltk.tokenize import NLTKWordTokenizer
    except ImportError as error:
        raise ImportError(f'words by NLTK need it: pip install nltk ({error})') from error

    split_words = NLTKWordTokenizer().tokenize
    return [word for sentence in split_sentences(text) for word in split_words(sentence)]


def split_sentences(text: str) -> list[str]:
    """Divide a text into sentences as NLTK does, or, without its data, as `nltk_words` says."""
    return _sentence_splitter()(text)


@cache
def _sentence_splitter() -> Callable[[str], list[str]]:
    # Inside `try`, where transformers does not demand that it is installed.
    try:
        from nltk.tokenize.punkt import PunktSentenceTokenizer, PunktTokenizer

        return PunktTokenizer('english').tokenize
    except LookupError:
        warnings.warn(
            'NLTK has no punkt_tab data here, so sentences are divided by an untrained Punkt, which ends one after '
            'every abbreviation; for word_tokenize proper, run: python -m nltk.downloader punkt_tab',
            stacklevel=2,
        )
    return PunktSentenceTokenizer().tokenize


def _join_words(text: Any) -> Any:
    """Divide a text, or every text of a batch, and join its words by spaces."""
    if isinstance(text, str):
        return ' '.join(nltk_words(text))
    return text if text is None else [_join_words(part) for part in text]


def _make_backend(method: str, lowercase: bool) -> Tokenizer:
    if method == 'bpe':
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        backend = Tokenizer(models.WordLevel(unk_token=SPECIAL_TOKENS['unk_token']))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit() if method == 'nltk' else wordpunct_pre_tokenizer()
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    return backend


def wordpunct_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    r"""Build NLTK's wordpunct_tokenize, `\w+|[^\w\s]+`, in Rust, equal on every assigned character.

    Six Latin-1 characters are word characters for Rust's engine and not for NLTK; for two joiners it is the reverse.
    """
    joiners, no_words = '\u200c\u200d', '²³¹¼½¾'
    word, other = rf'[\w{joiners}&&[^{no_words}]]+', rf'[[^\w\s{joiners}]{no_words}]+'
    return pre_tokenizers.Split(Regex(f'{word}|{other}'), 'removed', invert=True)


def _make_trainer(method: str, vocab_size: int, min_frequency: int) -> trainers.Trainer:
    options: dict[str, Any] = dict(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS.values()),
        show_progress=False,
    )
    if method == 'bpe':
        return trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
    return trainers.WordLevelTrainer(**options)
