"""Measure models and operations against their alternatives, and what a training run consists of.

python -m tools.benchmark --operations [--batch-size B] [--compile]
python -m tools.benchmark --layers [--batch-size B] [--compile]
python -m tools.benchmark --classifiers [--models NAME ...] [--sizes 224 384 ...] [--training] [--compile]
python -m tools.benchmark --scaling [T ...] [--training] [--most-seconds 5] [--most-gib 4] [--png FILE]
python -m tools.benchmark --fastformer [T ...] [--total-tokens N] [--models NAME ...] [--most-seconds 30] [--png FILE]
python -m tools.benchmark --conversion [M ...] [--ads 20] [--text-tokens 16] [--models NAME ...] [--rounds 100]
python -m tools.benchmark --table {2,4} [--batch-size 1] [--depth N] [--compile]
python -m tools.benchmark --table {7,8} [--batch-size 32] [--img-size PX] [--compile]
python -m tools.benchmark --memory [--models NAME ...] [--sizes 224 512x683 ...] [--training] [--png FILE]
python -m tools.benchmark --onehot
python -m tools.benchmark --goals [--rows 4 5 14]
python -m tools.benchmark --decode [--compile]
python -m tools.benchmark --loader IMAGENET IMAGENET_FFCV [--augment deit] [--workers 8]

--operations and --layers compare AFT with multi-head attention, forward and in training: times, peak memory, and what
is kept for the backward. Attention is F.scaled_dot_product_attention; SDPA math forms the (T, T) weights, as all
attention did when the paper was written: the paper's baseline. A depthwise F.conv2d stands beside AFT-conv.

--classifiers measures models of timm at sizes against DeiT small, with PoolFormer-S12, ConvNeXt-T, MambaOut-T and
XCiT-S12 beside ours. A model that refuses a size or fails is named with the reason, and so is the paper's baseline
where its weights would not fit into memory.

--scaling measures operations at lengths T, fits exponents over the upper half of the range, and draws both curves. An
operation stops before a length at which a call could take more than the limits.

--fastformer is Fig. 2 of the Fastformer paper: its classifier of MIND with each of the encoders, on random embeddings
of texts of T tokens, as many texts as make up the tokens of a batch, forward and in training. Figures are of one text;
otherwise as --scaling.

--conversion is Table 8 of the Fastformer paper but for the quality: the predictor of conversions with each of the
encoders, one user with M behaviours and a few ads a call. Median and 99th percentile of the latency, and peak memory,
once with the encoding of all texts, once with the vectors of the texts at hand, as a server keeps them, and once of a
step of training.

--table 2 and 4 print the tables of pixel and character models with training iterations here beside the printed ones.
The full rows are heavy on a CPU: --depth N cuts every model to N blocks. --table 7 and 8 are the image models in
inference: exact parameters, images/s, and the memory that is allocated at most beyond weights and images. Models have
random weights, are in eval mode, and fused by `timm.utils.reparameterize_model`, as one deploys them. Ratios are to the
Transformer or DeiT of the same size: above 1 is faster than it, or takes more memory.

--memory measures dense features (`features_only`) at image sizes, and fits the memory as a power of the number of
pixels (the exponent) and as a line (bytes per pixel, and their ratio to DeiT's). With --training, also the peak of
forward and backward, and what is kept for the backward.

--onehot times ops.aft_onehot (Eq. 10) against ops.aft_conv with the same kernel, zero but for one entry a head, and
against ops.aft_simple, the bound: forward, and forward with backward.

--goals measures what this project promises, against fused attention and timm's DeiT, each figure with a floor and a
goal, and exits with 1 if a figure is below its floor or fails. Ratios are times: above 1 is faster than the
alternative. Figures that need a device which is not here are open; all others are of the CPU, with two threads unless
--threads says otherwise. Each is on standard error as it comes.

--decode times one token of the pixel models of Table 2 (L = 24, d = 256) with the state of what came before, at several
positions of the 3,072 and for 1 and 16 images at once: the Transformer with its cache of keys and values, AFT-local and
AFT-simple. The time of a whole image is the trapezoid sum of that.

--loader reads the training images of each data set (a folder, a tar file, or a folder of FFCV files), one after the
other in every round, and prints images/s twice: of reading, up to the uint8 batches that the loading processes give,
and of batches that are ready, normalised on the device. With each comes the ratio to the first data set: the median
over the rounds, and its range. With --augment deit and a device that is not the CPU, the automatic augmentation of
FFCV's images is part of getting ready.

Times are medians; ratios are taken within a round, where the alternatives run one after the other in one process, and
come with their quartiles over the rounds. --compile adds every row under torch.compile, compared with the compiled
baseline; compiling is no part of the times.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from tools.benchmark.options import SECTIONS, Section, parse_args

# Before the imports that take seconds: --help and a mistyped option are answered at once.
if __name__ == '__main__':
    parse_args(description=__doc__)

import torch

from aft_vision.commandline import run_command
from aft_vision.evaluate import resolve_device
from tools.benchmark import sections
from tools.machine import LoadMeter, check_load, count_cores, describe_backends, describe_machine, refuse_load


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Print what was chosen, draw it and write it as JSON if wanted.

    Returns:
        `machine` and `backends` (each a line for a device), `settings`, `load` (the share of the cores that other
        processes used meanwhile, or None), `rows`, and for some sections more.

    Raises:
        ValueError: a data set, a model, the device or another option is not valid.
        OSError: other processes load the machine, before or meanwhile.
        SystemExit: a figure of --goals is below its floor, or could not be measured.
    """
    args = parse_args(argv, __doc__)
    section = SECTIONS[args.section]
    settings = {name: value for name, value in vars(args).items() if value is not None}
    threads = torch.get_num_threads()
    try:
        found, report = _measure(section, args)
    finally:
        # Whoever calls this from Python goes on with the threads of before.
        torch.set_num_threads(threads)
    print(report.text)
    if section.is_timed and found['load'] is not None:
        print(f'other processes used {found["load"]:.1%} of the cores')
    if args.png is not None and report.draw is not None:
        report.draw(args.png)
    result = {**found, 'settings': settings, **report.figures}
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2, default=str) + '\n')
    if any(row.get('verdict') in ('below', 'failed') for row in result['rows']):
        raise SystemExit(1)
    return result


def _measure(section: Section, args: argparse.Namespace) -> tuple[dict[str, Any], sections.Report]:
    """Print what a section is measured on, and measure it on an idle machine, if times are asked for.

    Returns:
        `machine`, `backends` and `load`; and the report.
    """
    device = resolve_device(args.device)
    if args.threads is not None and args.threads < 1:
        raise ValueError(f'expected --threads to be at least 1, got {args.threads}')
    must_be_idle = section.is_timed and not args.allow_load
    if must_be_idle:
        check_load()
    if section.threads is not None or args.threads is not None:
        torch.set_num_threads(args.threads or min(section.threads or 1, count_cores()))
    places = [device] if section.devices is None else getattr(sections, section.devices)(args)
    machine = '\n'.join(describe_machine(place, section.describe_precision(args.dtype)) for place in places)
    backends = '\n'.join(map(describe_backends, places))
    print(f'{machine}\n{backends}')
    meter = LoadMeter()
    report = getattr(sections, section.run)(args, device)
    load = meter.load()
    if must_be_idle:
        refuse_load(load)
    return {'machine': machine, 'backends': backends, 'load': load}, report


if __name__ == '__main__':
    run_command(main)
