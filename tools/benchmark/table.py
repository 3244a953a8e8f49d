"""AFT Tables 2, 4, 7 and 8: the paper's speed and memory next to this machine's."""

import argparse
from pathlib import Path
from typing import Any

import timm
import torch
import yaml

from aft_vision.models import AFTDecoder, create_decoder
from tools.benchmark.compare import Candidate, Prepared, compare, next_to_the_paper
from tools.benchmark.models import classifiers
from tools.benchmark.printer import Report

VOCABULARY = 256
CONFIGS = Path(__file__).parents[2] / 'configs'
Group = dict[str, tuple[float, float]]
# Models of timm or recipes, compared with the first of a group, with the paper's images or iterations/s, and GB.
PIXELS: tuple[Group, ...] = (
    {'transformer_l12_d512': (1.35, 30.6), 'aft_local_256_l12_d512': (1.68, 11.4)},
    {'transformer_l24_d256': (1.36, 30.4), 'aft_local_256_l24_d256': (1.67, 12.8), 'aft_simple_l24_d256': (2.15, 9.5)},
)
CHARACTERS: tuple[Group, ...] = (
    {'transformer_l12_d512': (1.42, 29.4), 'aft_local_32_l12_d512': (1.85, 11.3)},
    {'transformer_l24_d256': (1.57, 28.3), 'aft_local_32_l24_d256': (2.04, 11.2), 'aft_simple_l24_d256': (2.61, 9.6)},
)
IMAGES: tuple[Group, ...] = (
    {
        'deit_tiny_patch16_224': (2507, 1.9),
        'aft_full_tiny': (2523, 1.8),
        'aft_conv_tiny_k11_h32': (2359, 1.8),
        'aft_conv_tiny': (2365, 2.2),
    },
    {
        'deit_small_patch16_224': (1010, 2.9),
        'resnet50': (1257, 6.5),
        'aft_full_small': (1011, 2.6),
        'aft_conv_small_k11_h16': (989, 2.5),
        'aft_conv_small': (936, 3.2),
        'aft_conv_small_k15_h384': (936, 3.2),
    },
)
FINE_TUNED: tuple[Group, ...] = ({'deit_base_patch16_384': (89.6, 13.6), 'aft_conv_base_k25_h32_384': (98.5, 8.9)},)
# By number: what the paper measured on, pixels of a side or tokens, the folder of the recipes, and the groups.
TABLES: dict[int, tuple[str, int, str | None, tuple[Group, ...]]] = {
    2: ('eight V100, batch of 32', 3072, 'pixel', PIXELS),
    4: ('eight V100, batch of 128', 1024, 'char', CHARACTERS),
    7: ('V100, batch of 256', 224, None, IMAGES),
    8: ('device and batch not stated', 384, None, FINE_TUNED),
}


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure a table, the models of a group interleaved: training iterations of sequences, or inference of images.

    The paper's ratios to the first of a group are next to ours.

    Raises:
        ValueError: an option is for the other kind of tables.
    """
    measured_on, default_size, folder, groups = TABLES[args.number]
    of_images = folder is None
    if (args.depth if of_images else args.img_size) is not None:
        raise ValueError(f'{"--depth" if of_images else "--img-size"} changes nothing of table {args.number}')
    size, batch = args.img_size or default_size, args.batch_size or (32 if of_images else 1)
    what = f'inference at {size} px' if of_images else f'training iterations, T = {size}'
    direction = 'forward' if of_images else 'training'
    rows: list[dict[str, Any]] = []
    for paper in groups:
        models: dict[str, Any]
        if folder is None:
            models = {name: timm.create_model(name, device='meta') for name in paper}
            candidates = classifiers(list(paper), (batch, 3, size, size), device)
        else:
            models = {name: _create(folder, name, args.depth).to(device).train() for name in paper}
            candidates = next_to_the_paper([iteration(name, model, batch) for name, model in models.items()])
        options = dict(dtype=args.dtype, directions=[direction], count=batch if of_images else 1)
        rows += compare(candidates, device, args.rounds, **options)
        for row in rows[-len(candidates) :]:
            if (name := row['name']) in paper:
                ratios = [own / base for own, base in zip(paper[name], paper[next(iter(paper))], strict=True)]
                row |= {'paper_ratio': ratios[0], 'paper_memory_ratio': ratios[1]}
                row['parameters'] = sum(each.numel() for each in models[name].parameters())
    cut = '' if args.depth is None else f', every model cut to a depth of {args.depth}'
    return Report(rows, f'AFT Table {args.number}: {what}, batch of {batch}{cut}; the paper: {measured_on}')


def iteration(name: str, model: AFTDecoder, batch: int) -> Candidate:
    """Return a training iteration: loss of random tokens, gradients, and an update of AdamW."""

    def prepare(training: bool) -> Prepared:
        tokens = torch.randint(VOCABULARY, (batch, model.context), device=next(model.parameters()).device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def learn(loss: torch.Tensor) -> None:
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()

        return Prepared(lambda: model.nll(tokens).mean(), list(model.parameters()), [tokens], learn)

    return Candidate(name, prepare)


def _create(folder: str, name: str, depth: int | None) -> AFTDecoder:
    """Build the model of a recipe, cut to a depth if that is given."""
    recipe = yaml.safe_load((CONFIGS / folder / f'{name}.yaml').read_text())['model']
    return create_decoder(**{**recipe, **({} if depth is None else {'depth': depth})})
