"""ROUGE of summaries, by the package rouge-score, and the first sentences of a text as the summary to beat."""

from collections.abc import Sequence

from rouge_score.rouge_scorer import RougeScorer

from aft_vision.fastformer.tokenize import split_sentences

# Papers on CNN/DailyMail call rougeLsum R-L.
ROUGES = ('rouge1', 'rouge2', 'rougeL', 'rougeLsum')


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """The means of ROUGE-1, 2, L and Lsum over pairs of texts: F scores in [0, 1], of the stems of lower-case words.

    `rougeLsum` compares sentence by sentence, so their order does not count. Lines are sentences; in a text of one
    line, `tokenize.split_sentences` finds them.

    Raises:
        ValueError: the numbers of the texts differ or are zero.
    """
    rows = rouge_of_each(predictions, references)
    return {name: sum(row[name] for row in rows) / len(rows) for name in ROUGES}


def rouge_of_each(predictions: Sequence[str], references: Sequence[str]) -> list[dict[str, float]]:
    """As `rouge`, of every pair."""
    if len(predictions) != len(references) or not predictions:
        raise ValueError(
            f'expected as many predictions as references, at least one, got {len(predictions)} and {len(references)}'
        )
    scorer = RougeScorer(list(ROUGES), use_stemmer=True)
    rows = []
    for prediction, reference in zip(predictions, references, strict=True):
        scores = scorer.score(_one_sentence_a_line(reference), _one_sentence_a_line(prediction))
        rows.append({name: float(scores[name].fmeasure) for name in ROUGES})
    return rows


def lead(text: str, sentences: int = 3) -> str:
    """The first sentences of a text, one a line: lead-3, the summary that news are hard to summarise better than.

    An end of a line ends a sentence.

    Raises:
        ValueError: sentences is below 1.
    """
    if sentences < 1:
        raise ValueError(f'sentences must be at least 1, got {sentences}')
    found: list[str] = []
    for line in text.splitlines():
        found += split_sentences(line)
        if len(found) >= sentences:
            break
    return '\n'.join(found[:sentences])


def _one_sentence_a_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return '\n'.join(lines if len(lines) > 1 else split_sentences(text))
