#!/usr/bin/env bash
# rouge-score 0.1.2: a text in other than Latin letters scores 0 against itself.
#
# The default tokenizer keeps a-z and 0-9 and drops the rest, so a Russian or Chinese summary has no words. One guesses an
# error or 1. Who evaluates summaries in other languages meets it: `RougeScorer(..., tokenizer=...)`.
#
# Seen: rouge1 of a Russian sentence against itself 0.0, of an English one 1.0
PACKAGES='rouge-score==0.1.2'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
from rouge_score.rouge_scorer import RougeScorer

scorer = RougeScorer(['rouge1'])
seen = [scorer.score(text, text)['rouge1'].fmeasure for text in ('погода сегодня хорошая', 'the weather is fine')]
print('rouge1 of a Russian sentence against itself {}, of an English one {}'.format(*seen))
raise SystemExit(seen != [0, 1])
P
