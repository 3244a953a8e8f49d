import gzip
import zipfile

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from aft_vision.fastformer.glove import DEFAULT_STD, Coverage, glove_matrix, load_glove, read_glove
from aft_vision.fastformer.tokenize import train_tokenizer

DIM = 4
WORDS = ['the', 'film', 'was', 'bad', ',', 'Paris']


def vector(seed: int, dim: int = DIM) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=dim).round(4).astype(np.float32)


def glove_lines(words=WORDS, dim=DIM):
    return [' '.join([word, *map(str, vector(seed, dim))]) for seed, word in enumerate(words)]


@pytest.fixture
def tokenizer():
    return train_tokenizer(['the film was bad, Bad unseen words in Paris'], lowercase=False)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / 'glove.6B.4d.txt'
    path.write_text('\n'.join(glove_lines()) + '\n', encoding='utf-8')
    return path


def row_of(embedding, tokenizer, word):
    return embedding.weight[tokenizer.get_vocab()[word]].detach().numpy()


def test_rows_hold_the_vectors_of_their_words(tokenizer, path):
    embedding = nn.Embedding(len(tokenizer), DIM)
    coverage = load_glove(embedding, tokenizer, path)
    for seed, word in enumerate(WORDS):
        np.testing.assert_array_equal(row_of(embedding, tokenizer, word), vector(seed))
    # Drawn: begin, end, unknown, "unseen", "words", "in".
    assert coverage == Coverage(found=7, drawn=6, padding=1)
    assert not embedding.weight[tokenizer.pad_token_id].any()
    assert embedding.weight.requires_grad


def test_a_cased_word_takes_the_lower_cased_vector_unless_it_has_its_own(tokenizer, path):
    embedding = nn.Embedding(len(tokenizer), DIM)
    load_glove(embedding, tokenizer, path)
    np.testing.assert_array_equal(row_of(embedding, tokenizer, 'Bad'), vector(WORDS.index('bad')))
    path.write_text('\n'.join(glove_lines([*WORDS, 'Bad'])))
    load_glove(embedding, tokenizer, path)
    np.testing.assert_array_equal(row_of(embedding, tokenizer, 'Bad'), vector(len(WORDS)))


def test_special_tokens_are_drawn_even_if_the_file_has_them(tokenizer, path):
    path.write_text('\n'.join(glove_lines([*WORDS, '<unk>'])))
    embedding = nn.Embedding(len(tokenizer), DIM)
    load_glove(embedding, tokenizer, path)
    assert not np.array_equal(row_of(embedding, tokenizer, '<unk>'), vector(len(WORDS)))


@pytest.mark.parametrize('padding_idx', [None, 0])
def test_post_init_keeps_the_vectors(tokenizer, path, padding_idx):
    config = BertConfig(
        vocab_size=len(tokenizer) + 3,
        hidden_size=DIM,
        num_attention_heads=1,
        num_hidden_layers=1,
        intermediate_size=4,
        pad_token_id=padding_idx,
    )
    embedding = nn.Embedding(config.vocab_size, DIM)
    load_glove(embedding, tokenizer, path)
    expected = embedding.weight.clone()

    class Loaded(BertModel):
        def post_init(self):
            self.embeddings.word_embeddings = embedding
            super().post_init()

    model = Loaded(config)
    model.init_weights()
    assert model.get_input_embeddings() is embedding
    torch.testing.assert_close(embedding.weight, expected, rtol=0, atol=0)


def test_drawn_rows_have_mean_and_covariance_of_the_found():
    generator = np.random.default_rng(0)
    found = generator.normal(size=(500, DIM)) @ generator.normal(size=(DIM, DIM)) + generator.normal(size=DIM)
    words = {f'w{i}': i for i in range(20_500)}
    vectors = {f'w{i}': row for i, row in enumerate(found)}
    matrix, coverage = glove_matrix(words, 20_500, vectors, DIM, None, seed=0)
    drawn = matrix[500:]
    assert coverage == Coverage(500, 20_000, 0)
    covariance = np.cov(found, rowvar=False)
    scale = np.sqrt(np.diag(covariance))
    assert np.abs((drawn.mean(0) - found.mean(0)) / scale).max() < 5 / np.sqrt(20_000)
    assert np.abs((np.cov(drawn, rowvar=False) - covariance) / np.outer(scale, scale)).max() < 8 / np.sqrt(20_000)


def test_drawn_rows_follow_the_seed(tokenizer, path):
    embeddings = [nn.Embedding(len(tokenizer), DIM) for _ in range(3)]
    for embedding, seed in zip(embeddings, (1, 1, 2), strict=True):
        load_glove(embedding, tokenizer, path, seed)
    first, same, other = (row_of(embedding, tokenizer, 'unseen') for embedding in embeddings)
    np.testing.assert_array_equal(first, same)
    assert not np.allclose(first, other)


@pytest.mark.parametrize('found', [0, 1])
def test_rows_are_drawn_by_default_where_fewer_than_two_words_are_found(found):
    words = {f'w{i}': i for i in range(5000)}
    vectors = {f'w{i}': vector(i) for i in range(found)}
    matrix, coverage = glove_matrix(words, 5000, vectors, DIM, None, seed=0)
    assert coverage.found == found
    assert abs(matrix[found:].std() / DEFAULT_STD - 1) < 0.05
    assert abs(matrix[found:].mean()) < DEFAULT_STD / 20


@pytest.mark.parametrize('ending', ['.gz', '.zip'])
def test_archives_are_read(path, tmp_path, ending):
    archive = tmp_path / ('glove' + ending)
    if ending == '.gz':
        archive.write_bytes(gzip.compress(path.read_bytes()))
    else:
        with zipfile.ZipFile(archive, 'w') as file:
            file.write(path, path.name)
    vectors = read_glove(archive, ['film', 'absent'], DIM)
    assert list(vectors) == ['film']
    np.testing.assert_array_equal(vectors['film'], vector(1))


def test_tokens_with_spaces_and_odd_bytes_are_no_damage(path):
    lines = [*(line.encode() for line in glove_lines(['the', '. . .', 'at name@domain.com', '\x85', 'film', 'film']))]
    path.write_bytes(b'\n'.join([*lines, b'caf\xe9 1 2 3 4']))
    vectors = read_glove(path, ['film', '. . .', '\x85', '.'], DIM)
    assert set(vectors) == {'film', '. . .', '\x85'}
    np.testing.assert_array_equal(vectors['. . .'], vector(1))
    # The first of two lines of a word counts.
    np.testing.assert_array_equal(vectors['film'], vector(4))


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('film 0.1 0.2 0.3', r'line 2: expected a token and 4 numbers, got 4 fields'),
        ('', r'line 2: expected a token and 4 numbers, got 1 fields'),
        ('film 0.1 0.2 x 0.4', r"line 2: expected numbers after the token: .*'x'"),
        ('film 0.1 0.2  0.4', r'line 2: expected numbers after the token'),
        ('film 0.1 0.2 nan 0.4', r'line 2: expected finite numbers'),
    ],
)
def test_a_damaged_line_is_named(path, line, message):
    path.write_text('\n'.join(['the 1 2 3 4', line, 'was 1 2 3 4']))
    with pytest.raises(ValueError, match=message):
        read_glove(path, WORDS, DIM)


@pytest.mark.parametrize('dim', [2, 6])
def test_a_file_of_another_width_is_named(path, dim):
    with pytest.raises(ValueError, match=f'a token and {dim} numbers a line, got 4 in'):
        read_glove(path, WORDS, dim)


def test_an_embedding_with_too_few_rows_is_rejected(tokenizer, path):
    with pytest.raises(ValueError, match=f'{len(tokenizer)} rows or more.*got 5'):
        load_glove(nn.Embedding(5, DIM), tokenizer, path)
