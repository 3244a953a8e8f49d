"""Train a model of multi-query associative recall (Arora et al. 2023, arXiv 2312.04927).

python -m train.recall --config FILE [--eval] [section.key=value ...]
torchrun --nproc-per-node 8 -m train.recall --config FILE [section.key=value ...]

FILE is a YAML experiment, or the name of one of the package such as small/recall; `section.key=value` changes one value
of it, for example `data.pairs=8 data.context=32 optim.lr=1e-3 run.dir=runs/first`. The sequences are generated:
data.pairs keys with their values, then each key again, whose value is to be predicted; data.context has at least four
tokens for each pair. Loss and accuracy are those of these answers.

A run writes into its folder config.yaml (the resolved experiment, which reproduces the run), summary.csv and steps.csv,
curves.png, result.json, tensorboard/, best.pth and last.pth. It ends after schedule.max_updates, or once data.goal is
reached. run.resume=auto continues an interrupted run or starts a new one.

--eval only evaluates: it prints the name of the weights and the accuracy on data.eval_split. The weights are those of
run.init_from on the command line, else best.pth in the folder of the run, else run.init_from of a file.
"""

import math
from collections.abc import Mapping, Sequence

from train.command_line import parse_args, run_command

EXAMPLE = 'small/recall'

if __name__ == '__main__':
    parse_args(__doc__, EXAMPLE)

from aft_vision.data import RecallDataset
from train.distributed import World
from train.sequence import Likelihood, SequenceData, run_sequences
from train.sequence_schema import RecallConfig
from train.state import TrainState


class Recall(Likelihood):
    """Sequences with answers, and the percentage of these that are right.

    Args:
        unit, bits_unit, length: As in Likelihood.
        goal: Percentage at which a run ends; None for no such end.
    """

    metrics = ('loss', 'bits', 'accuracy')
    best = 'accuracy'
    lower_is_better = False

    def __init__(self, unit: str, bits_unit: str, length: int, goal: float | None) -> None:
        super().__init__(unit, bits_unit, length)
        self.goal = goal

    def describe(self, row: Mapping[str, float]) -> str:
        line = super().describe(row)
        return line if math.isnan(row['eval_accuracy']) else f'{line}, {row["eval_accuracy"]:.2f} % right'


class RecallSequences(SequenceData):
    """Generated sequences with keys, values and queries."""

    name, unit, bits_unit, measure = 'recall', 'sequences', 'bits/answer', '% right answers'

    def __init__(self, config: RecallConfig, world: World) -> None:
        super().__init__(config, world)
        self.length, self.vocab_size = config.data.context, config.data.vocab_size

    @property
    def objective(self) -> Likelihood:
        return Recall(self.unit, self.bits_unit, self.length, self.config.data.goal)

    def train_data(self) -> RecallDataset:
        data = self.config.data
        return RecallDataset(data, 'train', data.epoch_size, self.config.run.seed)

    def eval_data(self, split: str) -> RecallDataset:
        data = self.config.data
        return RecallDataset(data, split, {'valid': data.valid_size, 'test': data.test_size}[split])


def main(argv: Sequence[str] | None = None) -> TrainState | None:
    """Train or evaluate, as `run_sequences`."""
    return run_sequences(parse_args(__doc__, EXAMPLE, argv), RecallConfig, RecallSequences)


if __name__ == '__main__':
    run_command(main)
