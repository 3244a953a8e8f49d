"""Multi-query associative recall (MQAR): the generated sequences of "Zoology" (Arora et al. 2023, arXiv 2312.04927)."""

from dataclasses import dataclass

import numpy as np

from aft_vision.data.ranges import check_ranges, within
from aft_vision.data.sampling import RECALL

SPLITS = ('train', 'valid', 'test')
# The token without a meaning, at every position without a key or a value.
FILLER = 0


@dataclass(frozen=True)
class RecallTask:
    """The sequences of a setting: pairs of a key and its value, then each key once more, as a query.

    The token after a query is its answer, the value. It is a target only: in the sequence its place holds the filler,
    as in Zoology, so that earlier answers do not narrow down the later ones.

    Attributes:
        pairs: Pairs of a key and a value, the first tokens of a sequence; no key or value occurs twice in them.
        context: Tokens of a sequence, at least four for each pair.
        vocab_size: Symbols, an even number: 0 is the filler, the others below the middle are keys, the rest are values.
        power: Exponent a of the places of the queries: the i-th of those after the pairs, from 1, is drawn with a
            probability proportional to i^(a - 1), each at most once; 1 is uniform. With four tokens for each pair all
            are drawn. Which key is at which place is uniform, so that places alone tell nothing about an answer.
    """

    pairs: int = within('[1, inf)', 4, 'pairs')
    context: int = within('[4, inf)', 64, 'tokens')
    vocab_size: int = within('[4, inf)', 256, 'symbols')
    power: float = within('(0, 1]', 0.01)

    def __post_init__(self) -> None:
        check_ranges(self, 'data')
        if self.vocab_size % 2:
            raise ValueError(f'expected data.vocab_size to be even, got {self.vocab_size}')
        for key, limit in (('context', self.context // 4), ('vocab_size', self.vocab_size // 2 - 1)):
            if self.pairs > limit:
                allowed = f'at most {limit}, which data.{key} = {getattr(self, key)} has place for'
                raise ValueError(f'expected data.pairs to be {allowed}, got {self.pairs}')

    def example(self, split: str, number: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Draw an example, which depends only on the task, the split, its number and the seed.

        Args:
            split: `train`, `valid` or `test`.
            number: At least 0.

        Returns:
            The tokens and the answers, both (T,) int64; an answer is where the model predicts it, 0 elsewhere.

        Raises:
            ValueError: the split is unknown.
        """
        if split not in SPLITS:
            raise ValueError(f'expected the split {", ".join(SPLITS)}, got {split!r}')
        rng = np.random.default_rng((RECALL, seed, SPLITS.index(split), number))
        half = self.vocab_size // 2
        # Faster than a choice without replacement.
        keys = 1 + rng.permutation(half - 1)[: self.pairs]
        values = half + rng.permutation(half)[: self.pairs]
        tokens, answers = np.full((2, self.context), FILLER)
        tokens[0 : 2 * self.pairs : 2], tokens[1 : 2 * self.pairs : 2] = keys, values
        places = np.arange(2 * self.pairs, self.context - 1, 2)
        # The largest sums of logarithm and Gumbel noise are a draw without replacement, whose order must not be kept.
        scores = (self.power - 1) * np.log(np.arange(1, len(places) + 1)) + rng.gumbel(size=len(places))
        queries = rng.permutation(places[np.argsort(-scores)[: self.pairs]])
        tokens[queries], answers[queries + 1] = keys, values
        return tokens, answers
