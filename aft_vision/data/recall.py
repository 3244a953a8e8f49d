"""Multi-query associative recall (MQAR): the generated sequences of "Zoology" (Arora et al. 2023, arXiv 2312.04927)."""

from dataclasses import dataclass

import numpy as np

from aft_vision.data.ranges import check_ranges, within
from aft_vision.data.sampling import RECALL

SPLITS = ('train', 'valid', 'test')
# The token without a meaning, at every position without a key or a value.
FILLER = 0
# Examples that are drawn at a time, which bounds the memory of a large vocabulary.
CHUNK = 1000


@dataclass(frozen=True)
class RecallTask:
    """The sequences of a setting: pairs of a key and its value, then each key once more, as a query.

    The token after a query is its answer, the value. It is a target only: in the sequence its position holds the
    filler, as in Zoology, so that earlier answers do not narrow down the later ones.

    Attributes:
        pairs: Pairs of a key and a value, the first tokens of a sequence; no key or value occurs twice in them.
        context: Tokens of a sequence, at least four for each pair.
        vocab_size: Symbols, an even number: 0 is the filler, the others below the middle are keys, the rest are values.
        power: Exponent a of the positions of the queries: the i-th of those after the pairs, from 1, is drawn with a
            probability proportional to i^(a - 1), each at most once; 1 is uniform. With four tokens for each pair all
            are drawn. Which key is where is uniform, so that positions tell nothing about an answer.
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

    def examples(self, split: str, count: int, seed: int = 0, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Draw the first examples of a split and epoch; each depends only on these, its number, the seed and the task.

        Args:
            split: `train`, `valid` or `test`.
            count: Number of examples N.

        Returns:
            The tokens and the answers, both (N, T) int64; an answer is where the model predicts it, 0 elsewhere.
        """
        # With a generator for each part, an example does not depend on the number of those after it.
        rngs = [np.random.default_rng((RECALL, seed, SPLITS.index(split), epoch, part)) for part in range(4)]
        half, pairs = self.vocab_size // 2, self.pairs
        keys = 1 + _draw(rngs[0], count, np.zeros(half - 1), pairs)
        values = half + _draw(rngs[1], count, np.zeros(half), pairs)
        tokens, answers = np.full((2, count, self.context), FILLER)
        tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
        slots = (self.context - 2 * pairs) // 2
        queries = 2 * (pairs + _draw(rngs[2], count, (self.power - 1) * np.log(np.arange(1, slots + 1)), pairs))
        # Likely positions are drawn first: in this order they would tell which key is asked for.
        order = _draw(rngs[3], count, np.zeros(pairs), pairs)
        np.put_along_axis(tokens, queries, np.take_along_axis(keys, order, 1), 1)
        np.put_along_axis(answers, queries + 1, np.take_along_axis(values, order, 1), 1)
        return tokens, answers


def _draw(rng: np.random.Generator, count: int, log_weights: np.ndarray, drawn: int) -> np.ndarray:
    """Draw `count` times `drawn` different indices (count, drawn) in turn, with probabilities as these weights."""
    parts = []
    for start in range(0, count, CHUNK):
        # The order of the sums with Gumbel noise is distributed as draws without replacement.
        noise = rng.gumbel(size=(min(CHUNK, count - start), len(log_weights)))
        parts.append(np.argsort(-(log_weights + noise), axis=1)[:, :drawn])
    return np.concatenate(parts)
