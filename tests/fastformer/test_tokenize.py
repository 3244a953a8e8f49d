import sys
import unicodedata
import warnings

import nltk
import pytest
import torch
from nltk.tokenize import word_tokenize, wordpunct_tokenize
from nltk.tokenize.punkt import PunktParameters, save_punkt_params
from tokenizers import Tokenizer
from transformers import AutoTokenizer, pipeline

from aft_vision.fastformer import FastformerConfig, FastformerForSequenceClassification, tokenize
from aft_vision.fastformer.data.batches import token_ids
from aft_vision.fastformer.tokenize import METHODS, nltk_words, train_tokenizer, wordpunct_pre_tokenizer

TEXTS = [
    "The film isn't bad. Mr. Smith liked it!",
    'The film was bad, bad, BAD... <br /><br />5½ stars?',
    'A "good" film, by the way: café, naïve, Москва, 東京.',
]


@pytest.fixture(autouse=True)
def without_nltk_data(monkeypatch, tmp_path):
    monkeypatch.setattr(nltk.data, 'path', [str(tmp_path / 'nowhere')])
    tokenize._sentence_splitter.cache_clear()
    yield
    tokenize._sentence_splitter.cache_clear()


@pytest.fixture
def nltk_data(monkeypatch, tmp_path):
    """Data for English in the format of NLTK's punkt_tab, which knows one abbreviation."""
    parameters = PunktParameters()
    parameters.abbrev_types.add('mr')
    folder = tmp_path / 'nltk_data'
    monkeypatch.setattr(nltk.data, 'path', [str(folder)])
    (folder / 'tokenizers' / 'punkt_tab').mkdir(parents=True)
    save_punkt_params(parameters, str(folder / 'tokenizers' / 'punkt_tab' / 'english'))


def train(method, **options):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return train_tokenizer(TEXTS, method, **options)


def test_nltk_words_equal_word_tokenize_where_its_data_are(nltk_data):
    for text in TEXTS:
        assert nltk_words(text) == word_tokenize(text)
    assert 'Mr.' in nltk_words(TEXTS[0])


def test_nltk_words_divide_sentences_without_data_and_warn_once():
    with pytest.warns(UserWarning, match='punkt_tab') as caught:
        words = [nltk_words(text) for text in TEXTS]
    assert len(caught) == 1
    assert words[0] == ['The', 'film', 'is', "n't", 'bad', '.', 'Mr', '.', 'Smith', 'liked', 'it', '!']


def test_wordpunct_in_rust_equals_nltk_on_every_kind_of_character():
    skipped = ('Cn', 'Co', 'Cs', 'Lo')
    letters = [c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) == 'Lo']
    others = [c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) not in skipped]
    text = ' '.join(f'a{c}b.{c}' for c in [*others, *letters[::20]])
    assert [word for word, _ in wordpunct_pre_tokenizer().pre_tokenize_str(text)] == wordpunct_tokenize(text)


@pytest.mark.parametrize('method', METHODS)
def test_special_tokens_have_the_first_ids(method):
    tokenizer = train(method, vocab_size=300)
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert ids == (0, 1, 2, 3)
    assert tokenizer.padding_side == 'right'


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('lowercase', [True, False])
@pytest.mark.filterwarnings('ignore:NLTK has no punkt_tab')
def test_auto_tokenizer_loads_what_was_saved(tmp_path, method, lowercase):
    tokenizer = train(method, vocab_size=400, lowercase=lowercase, max_length=9)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = [*TEXTS, 'unseen Words: <pad> <s>', '']
    expected = tokenizer(texts, padding=True, truncation=True, return_tensors='pt')
    got = loaded(texts, padding=True, truncation=True, return_tensors='pt')
    assert type(loaded) is type(tokenizer)
    assert list(got) == ['input_ids', 'attention_mask']
    assert got['input_ids'].tolist() == expected['input_ids'].tolist()
    assert got['attention_mask'].tolist() == expected['attention_mask'].tolist()
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert got['input_ids'].shape[1] == 9


@pytest.mark.parametrize(('method', 'split'), [('nltk', nltk_words), ('wordpunct', wordpunct_tokenize)])
@pytest.mark.filterwarnings('ignore:NLTK has no punkt_tab')
def test_raw_text_becomes_the_words_of_the_method(method, split):
    tokenizer = train(method)
    for text in TEXTS:
        expected = [word.lower() for word in split(text)]
        assert tokenizer.tokenize(text) == expected
        assert tokenizer.convert_ids_to_tokens(tokenizer(text)['input_ids']) == expected
    assert tokenizer(TEXTS[0].split(), is_split_into_words=True)['input_ids'][0] == tokenizer.get_vocab()['the']


def test_byte_pairs_decode_to_the_text_they_came_from():
    tokenizer = train('bpe', vocab_size=300, lowercase=False)
    text = 'Unseen: ½ 東京, <pad> </s>'
    assert tokenizer.decode(tokenizer(text)['input_ids']) == text


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.filterwarnings('ignore:NLTK has no punkt_tab')
def test_a_text_that_reads_like_a_special_token_is_text(method):
    tokenizer = train(method, vocab_size=300)
    assert not set(tokenizer('film <pad> <s> </s> film')['input_ids']) & {0, 1, 2}


def test_the_vocabulary_keeps_the_most_frequent_words():
    tokenizer = train_tokenizer(['b b b a a d', 'c c'], vocab_size=6)
    assert tokenizer.get_vocab() == {'<pad>': 0, '<s>': 1, '</s>': 2, '<unk>': 3, 'b': 4, 'a': 5}
    assert tokenizer('c B a')['input_ids'] == [3, 4, 5]


def test_rare_words_are_unknown():
    tokenizer = train_tokenizer(['b b b a a d', 'c c'], min_frequency=3)
    assert tokenizer('b a')['input_ids'] == [4, 3]


def test_case_counts_unless_words_are_lower_cased():
    assert len(train_tokenizer(['A a'], lowercase=False)) == len(train_tokenizer(['A a'])) + 1


@pytest.mark.parametrize(
    ('texts', 'options', 'message'),
    [
        (['a'], {'method': 'spacy'}, "got 'spacy'"),
        (['a'], {'vocab_size': 4}, 'at least 5'),
        (['a'], {'method': 'bpe', 'vocab_size': 259}, 'at least 260'),
        ([], {}, 'got none'),
        ([' ', '\n'], {}, 'got none'),
        (['a b'], {'min_frequency': 2}, 'got none'),
    ],
)
def test_train_tokenizer_rejects(texts, options, message):
    with pytest.raises(ValueError, match=message):
        train_tokenizer(texts, **options)


@pytest.mark.filterwarnings('ignore:NLTK has no punkt_tab')
@pytest.mark.parametrize('method', ['nltk', 'wordpunct'])
def test_decoded_words_read_like_a_text(tmp_path, method):
    text = "The film isn't bad, is it? No: it's good!"
    train_tokenizer([text], method, lowercase=False).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = [tokenizer.bos_token_id, *tokenizer(text)['input_ids'], tokenizer.eos_token_id, tokenizer.pad_token_id]
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    # Where the spaces were before other signs cannot be known.
    assert decoded.replace(' :', ':') == text


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.filterwarnings('ignore:NLTK has no punkt_tab')
def test_a_text_without_a_token_is_one_unknown_token_however_it_is_read(tmp_path, method):
    train(method, vocab_size=400).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    film = tokenizer('bad film')['input_ids']
    assert tokenizer('') == {'input_ids': [3], 'attention_mask': [1]}
    assert (
        tokenizer(['', 'bad film', ''])['input_ids'] == [[3], film, [3]] == token_ids(['', 'bad film', ''], tokenizer)
    )
    padded = tokenizer(['', 'bad film'], padding=True, return_tensors='pt')
    assert padded['input_ids'].tolist() == [[3, *[0] * (len(film) - 1)], film]
    assert padded['attention_mask'].tolist() == [[1, *[0] * (len(film) - 1)], [1] * len(film)]
    assert tokenizer('', padding='max_length', max_length=3)['attention_mask'] == [1, 0, 0]
    multiple = tokenizer(['', ''], padding=True, pad_to_multiple_of=4)
    assert multiple == {'input_ids': [[3, 0, 0, 0]] * 2, 'attention_mask': [[1, 0, 0, 0]] * 2}
    # Special tokens are still read as text.
    assert tokenizer('<unk>', add_special_tokens=False)['input_ids'] == tokenizer('<unk>')['input_ids'] != []
    assert len(tokenizer('<unk> film')['input_ids']) > len(tokenizer('film')['input_ids']) + 1


def test_the_unknown_token_of_a_text_without_one_is_at_no_place_of_it():
    tokenizer = train('wordpunct')
    assert tokenizer('', return_offsets_mapping=True)['offset_mapping'] == [(0, 0)]
    padded = tokenizer([' ', 'bad film'], padding=True, return_offsets_mapping=True)
    assert padded['offset_mapping'] == [[(0, 0), (0, 0)], [(0, 3), (4, 8)]]
    assert padded[0].tokens == ['<unk>', '<pad>']
    tokenizer.padding_side = 'left'
    assert tokenizer([' ', 'bad film'], padding=True)['input_ids'][0] == [0, 3]


@pytest.mark.parametrize('method', ['wordpunct', 'bpe'])
def test_a_file_for_other_programs_has_neither_truncation_nor_padding(tmp_path, method):
    tokenizer, text = train(method, vocab_size=400), TEXTS[0]
    expected = tokenizer(text)['input_ids']
    tokenizer([text, text[:9]], truncation=True, max_length=3, padding='max_length')
    tokenizer.save_pretrained(tmp_path)
    assert Tokenizer.from_file(str(tmp_path / 'tokenizer.json')).encode(text).ids == expected
    assert len(expected) > 3
    assert AutoTokenizer.from_pretrained(tmp_path)(text)['input_ids'] == expected


@pytest.mark.parametrize('method', METHODS)
def test_a_pipeline_cuts_a_text_off_as_training_does(tmp_path, nltk_data, method: str):
    tokenizer = train_tokenizer(TEXTS, method, vocab_size=300, max_length=6)
    small = dict(hidden_size=8, num_attention_heads=2, max_position_embeddings=6)
    model = FastformerForSequenceClassification(FastformerConfig(vocab_size=len(tokenizer), **small)).eval()
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    text = ' '.join(TEXTS)
    classify = pipeline('text-classification', str(tmp_path), top_k=None)
    found = {row['label']: row['score'] for row in classify([text])[0]}
    expected = model(torch.tensor(token_ids([text], tokenizer, 6))).logits.softmax(-1)[0].tolist()
    assert [found['LABEL_0'], found['LABEL_1']] == pytest.approx(expected)
    # A call that says how long a text may be has its way.
    assert len(tokenizer(text, truncation=False)['input_ids']) > 6
    assert len(tokenizer(text, truncation=True, max_length=4)['input_ids']) == 4
    assert len(tokenizer(text)['input_ids']) == len(tokenizer.encode(text)) == 6
    assert len(tokenizer.encode(text, truncation=False)) > 6
