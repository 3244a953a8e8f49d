"""Train a model of CIFAR10's sub-pixels.

python -m train.pixel --config FILE [--eval] [section.key=value ...]
torchrun --nproc-per-node 8 -m train.pixel --config FILE [section.key=value ...]

FILE is a YAML experiment, or the name of one of the package such as pixel/aft_local_256_l24_d256; `section.key=value`
changes one value, for example `data.dir=/data/cifar10 run.dir=runs/first run.max_seconds=600`. data.dir is a folder
with cifar-10-batches-py (torchvision's), or an .npz with x_train and x_test; nothing is downloaded.

A run writes into its folder config.yaml (the resolved experiment, which reproduces the run), summary.csv and steps.csv,
curves.png, result.json, tensorboard/, best.pth and last.pth, which tools.sample_pixels loads.
run.resume=auto continues an interrupted run or starts a new one.

--eval only evaluates: it prints the name of the weights and the bits per dimension on all images of data.eval_split.
The weights are those of run.init_from on the command line, else best.pth in the folder of the run, else run.init_from
of a file.
"""

from collections.abc import Sequence

from train.command_line import parse_args, run_command

EXAMPLE = 'smoke/pixel'

if __name__ == '__main__':
    parse_args(__doc__, EXAMPLE)

from aft_vision.data import EvalDataset, PixelDataset, read_cifar10
from aft_vision.data.pixels import TOKENS
from train.sequence import SequenceData, run_sequences
from train.sequence_schema import PixelConfig
from train.state import TrainState


class PixelSequences(SequenceData):
    """The images of CIFAR10."""

    name, unit, bits_unit = 'pixel', 'images', 'bits/dim'
    length, vocab_size = TOKENS, 256

    def train_data(self) -> PixelDataset:
        config = self.config
        return PixelDataset(read_cifar10(config.data.dir, 'train'), config.augment, config.run.seed)

    def eval_data(self, split: str) -> EvalDataset:
        return EvalDataset(read_cifar10(self.config.data.dir, split).reshape(-1), TOKENS)


def main(argv: Sequence[str] | None = None) -> TrainState | None:
    """Train or evaluate, as `run_sequences`."""
    return run_sequences(parse_args(__doc__, EXAMPLE, argv), PixelConfig, PixelSequences)


if __name__ == '__main__':
    run_command(main)
