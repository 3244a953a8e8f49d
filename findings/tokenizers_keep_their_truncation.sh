#!/usr/bin/env bash
# tokenizers 0.23.3: truncation and padding are stored in tokenizer.json, and a loaded tokenizer goes on with them.
#
# A tokenizer that was cut to 4 tokens for one batch is saved so, and whoever loads the file gets 4 tokens of any text,
# without a word. One guesses that these are options of a call. Who trains a tokenizer, batches texts and then saves it meets
# it: `no_truncation()` before `save`.
#
# Seen: 8 words, 4 tokens after loading
PACKAGES='tokenizers==0.23.3'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

words = 'one two three four five six seven eight'
tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words.split())}, unk_token='one'))
tokenizer.pre_tokenizer = Whitespace()
tokenizer.enable_truncation(4)
tokenizer.save('tokenizer.json')
count = len(Tokenizer.from_file('tokenizer.json').encode(words).ids)
print(f'{len(words.split())} words, {count} tokens after loading')
raise SystemExit(count != 4)
P
