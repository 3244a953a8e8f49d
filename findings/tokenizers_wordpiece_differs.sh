#!/usr/bin/env bash
# tokenizers 0.23.3: a WordPiece trained again on the same texts has other words.
#
# Training draws no random numbers, so one guesses the same vocabulary, as BPE and Unigram give. Pairs that are equally
# frequent are merged in another order each time, in one process too, and the tokens of a text differ. Who trains a tokenizer
# in each run, rather than keeping its file, meets it: a checkpoint does not fit the next vocabulary.
#
# Seen: five trainings: BPE 1 vocabulary, Unigram 1, WordPiece several
PACKAGES='tokenizers==0.23.3'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import random

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

draw = random.Random(0)
words = [''.join(draw.choices('abcdefg', k=draw.randint(2, 7))) for _ in range(2000)]


def vocabularies(model, trainer):
    """The number of different sets of tokens in five trainings."""
    seen = set()
    for _ in range(5):
        tokenizer = Tokenizer(model())
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.train_from_iterator([' '.join(words)], trainer(vocab_size=300, show_progress=False))
        seen.add(frozenset(tokenizer.get_vocab()))
    return len(seen)


pairs = vocabularies(models.BPE, trainers.BpeTrainer)
likelihood = vocabularies(models.Unigram, trainers.UnigramTrainer)
pieces = vocabularies(models.WordPiece, trainers.WordPieceTrainer)
print(f'five trainings: BPE {pairs} vocabulary, Unigram {likelihood}, WordPiece {"several" if pieces > 1 else pieces}')
raise SystemExit((pairs, likelihood) != (1, 1) or pieces == 1)
P
