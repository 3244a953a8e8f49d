"""ROUGE of summaries, by the package rouge-score, and lead sentences as a baseline."""

import re
import warnings
from collections.abc import Sequence

from rouge_score.rouge_scorer import RougeScorer

from aft_vision.fastformer.tokenize import split_sentences

# Papers on CNN/DailyMail call rougeLsum R-L.
ROUGES = ('rouge1', 'rouge2', 'rougeL', 'rougeLsum')


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Compute mean ROUGE-1, 2, L and Lsum over pairs of texts: F scores in [0, 1] of stemmed lower-case words.

    `rougeLsum` compares sentence by sentence, so their order does not count. Lines are sentences; in a text of one
    line, `tokenize.split_sentences` finds them. Words are of the letters a to z and of digits; all else is passed over,
    and a warning says how many references have letters, but none of these.

    Raises:
        ValueError: the numbers of the texts differ or are zero.
    """
    rows = rouge_of_each(predictions, references)
    return {name: sum(row[name] for row in rows) / len(rows) for name in ROUGES}


def lead(text: str, sentences: int = 3) -> str:
    """Return the first sentences of a text, one per line: lead-3, a strong baseline for news.

    An end of a line ends a sentence.
    """
    first: list[str] = []
    for line in text.splitlines():
        first += split_sentences(line)
        if len(first) >= sentences:
            break
    return '\n'.join(first[:sentences])


def rouge_of_each(predictions: Sequence[str], references: Sequence[str]) -> list[dict[str, float]]:
    """Return the scores of `rouge` for every pair."""
    if len(predictions) != len(references) or not predictions:
        raise ValueError(
            f'expected as many predictions as references, at least one, got {len(predictions)} and {len(references)}'
        )
    _warn_of_other_letters(references)
    scorer = RougeScorer(list(ROUGES), use_stemmer=True)
    rows = []
    for prediction, reference in zip(predictions, references, strict=True):
        scores = scorer.score(_one_sentence_a_line(reference), _one_sentence_a_line(prediction))
        rows.append({name: float(scores[name].fmeasure) for name in ROUGES})
    return rows


def _warn_of_other_letters(references: Sequence[str]) -> None:
    """Warn about references without words that rouge-score counts."""
    others = [text for text in references if any(map(str.isalpha, text)) and not re.search('[a-z]', text.lower())]
    if others:
        warnings.warn(
            f'ROUGE counts only the letters a to z and digits: {len(others)} of {len(references)} references have '
            f'other letters only, such as {others[0]!r:.80}, and their scores say nothing of their words',
            stacklevel=3,
        )


def _one_sentence_a_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return '\n'.join(lines if len(lines) > 1 else split_sentences(text))
