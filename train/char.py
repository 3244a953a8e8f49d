"""Train a model of the characters of a text.

python -m train.char --config FILE [--eval] [section.key=value ...]
torchrun --nproc-per-node 8 -m train.char --config FILE [section.key=value ...]

FILE is a YAML experiment, or the name of one of the package such as char/aft_local_32_l24_d256; `section.key=value`
changes one value of it, for example `data.file=/data/enwik8.zip run.dir=runs/first run.max_seconds=600`. data.file is
enwik8, text8 (with data.vocabulary=text8) or any other file, plain, .zip or .xz; nothing is downloaded. The first 90M,
5M and 5M bytes, or 90 %, 5 % and 5 % of a shorter file, are for training, validation and test.

A run writes into its folder config.yaml (the resolved experiment, which reproduces the run), summary.csv and steps.csv,
curves.png, result.json, tensorboard/, best.pth and last.pth. run.resume=auto continues an interrupted run or starts a
new one.

--eval only evaluates: it prints the name of the weights and the bits per character on data.eval_split. The weights are
those of run.init_from on the command line, else best.pth in the folder of the run, else run.init_from of a file.

With data.eval_stride=N each character is predicted from at least data.context - N characters.
"""

from collections.abc import Sequence

from train.command_line import parse_args, run_command

EXAMPLE = 'smoke/char'

if __name__ == '__main__':
    parse_args(__doc__, EXAMPLE)

from aft_vision.data import VOCABULARIES, EvalDataset, WindowDataset, read_text
from train.distributed import World
from train.sequence import SequenceData, run_sequences
from train.sequence_schema import CharConfig
from train.state import TrainState


class CharSequences(SequenceData):
    """Windows of a text."""

    name, unit, bits_unit = 'char', 'windows', 'bits/character'

    def __init__(self, config: CharConfig, world: World) -> None:
        super().__init__(config, world)
        self.text = read_text(config.data.file, config.data.vocabulary)
        self.note = self.text.note
        self.length, self.vocab_size = config.data.context, VOCABULARIES[config.data.vocabulary]
        self.facts = {'vocabulary': config.data.vocabulary}

    @property
    def bits_measure(self) -> str:
        stride = self.config.data.eval_stride or self.length
        return f'{self.bits_unit} (context {self.length}, stride {stride})'

    def train_data(self) -> WindowDataset:
        return WindowDataset(self.text.train, self.length, self.config.run.seed)

    def eval_data(self, split: str) -> EvalDataset:
        return EvalDataset(getattr(self.text, split), self.length, self.config.data.eval_stride)


def main(argv: Sequence[str] | None = None) -> TrainState | None:
    """Train or evaluate, as `run_sequences`."""
    return run_sequences(parse_args(__doc__, EXAMPLE, argv), CharConfig, CharSequences)


if __name__ == '__main__':
    run_command(main)
