"""AFT Tables 2, 4, 7 and 8: the paper's speed and memory next to those of this machine."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import yaml

from aft_vision.models import AFTDecoder, create_decoder
from tools.benchmark.compare import Candidate, Prepared, check_weights, compare, written_out
from tools.benchmark.models import classifiers, with_rate
from tools.benchmark.printer import Report

VOCABULARY = 256
CONFIGS = Path(__file__).parents[2] / 'configs'


class PaperTable(NamedTuple):
    """A table of the paper.

    Args:
        measured_on: The paper's device and batch.
        size: Side of the images in pixels, or tokens of a sequence.
        folder: Place of the recipes below configs/, for sequences.
        rows: A model of timm or a recipe, with its images or iterations/s and its GB. They are compared with the last
            attention above them.
    """

    measured_on: str
    size: int
    folder: str | None
    rows: dict[str, tuple[float, float]]

    def groups(self) -> list[list[str]]:
        """Return the names of the rows, those that are compared with one another together."""
        groups: list[list[str]] = []
        for name in self.rows:
            if name.startswith(('transformer', 'deit')):
                groups.append([])
            groups[-1].append(name)
        return groups


PIXELS = {
    'transformer_l12_d512': (1.35, 30.6),
    'aft_local_256_l12_d512': (1.68, 11.4),
    'transformer_l24_d256': (1.36, 30.4),
    'aft_local_256_l24_d256': (1.67, 12.8),
    'aft_simple_l24_d256': (2.15, 9.5),
}
CHARACTERS = {
    'transformer_l12_d512': (1.42, 29.4),
    'aft_local_32_l12_d512': (1.85, 11.3),
    'transformer_l24_d256': (1.57, 28.3),
    'aft_local_32_l24_d256': (2.04, 11.2),
    'aft_simple_l24_d256': (2.61, 9.6),
}
IMAGES: dict[str, tuple[float, float]] = {
    'deit_tiny_patch16_224': (2507, 1.9),
    'aft_full_tiny': (2523, 1.8),
    'aft_conv_tiny_k11_h32': (2359, 1.8),
    'aft_conv_tiny': (2365, 2.2),
    'deit_small_patch16_224': (1010, 2.9),
    'resnet50': (1257, 6.5),
    'aft_full_small': (1011, 2.6),
    'aft_conv_small_k11_h16': (989, 2.5),
    'aft_conv_small': (936, 3.2),
    'aft_conv_small_k15_h384': (936, 3.2),
}
FINE_TUNED = {'deit_base_patch16_384': (89.6, 13.6), 'aft_conv_base_k25_h32_384': (98.5, 8.9)}
TABLES = {
    2: PaperTable('eight V100, batch of 32', 3072, 'pixel', PIXELS),
    4: PaperTable('eight V100, batch of 128', 1024, 'char', CHARACTERS),
    7: PaperTable('V100, batch of 256', 224, None, IMAGES),
    8: PaperTable('device and batch not stated', 384, None, FINE_TUNED),
}


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure a table, the models of a group interleaved: training iterations of sequences, or inference of images.

    The rows are those of `compare`, the paper's baseline of each group among them, with `parameters`, `per_second`
    (iterations or images) and the paper's figures: `paper_speed`, `paper_memory_gb`, and their ratios to the first of
    the group, `paper_ratio` and `paper_memory_ratio`.

    Raises:
        ValueError: an option is for the other kind of tables.
    """
    table = TABLES[args.number]
    for value, option, numbers in ((args.img_size, '--img-size', (7, 8)), (args.depth, '--depth', (2, 4))):
        if value is not None and args.number not in numbers:
            raise ValueError(f'{option} is for tables {numbers[0]} and {numbers[1]}, got table {args.number}')
    size = args.img_size or table.size
    rows: list[dict[str, Any]] = []
    models: dict[str, Any]
    for names in table.groups():
        if table.folder is None:
            batch = count = args.batch_size or 32
            what, direction, shape = f'inference at {size} px', 'forward', (batch, 3, size, size)
            models = {name: timm.create_model(name, device='meta') for name in names}
            candidates = classifiers(names, shape, device)
        else:
            batch, count = args.batch_size or 1, 1
            what, direction = f'training iterations, T = {size}', 'training'
            models = {name: _create(table.folder, name, args.depth) for name in names}
            candidates = _iterations(models, batch, device)
        for row in compare(candidates, device, args.rounds, dtype=args.dtype, directions=[direction]):
            parameters = sum(each.numel() for each in models.get(row['name'], models[names[0]]).parameters())
            rows.append({**with_rate(row, count), 'parameters': parameters})
            if row['name'] in models:
                (speed, memory_gb), (first_speed, first_gb) = table.rows[row['name']], table.rows[names[0]]
                rows[-1] |= {'paper_speed': speed, 'paper_ratio': speed / first_speed}
                rows[-1] |= {'paper_memory_gb': memory_gb, 'paper_memory_ratio': memory_gb / first_gb}
    cut = '' if args.depth is None else f', every model cut to a depth of {args.depth}'
    return Report(rows, f'AFT Table {args.number}: {what}, batch of {batch}{cut}; the paper: {table.measured_on}')


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


def _iterations(models: dict[str, AFTDecoder], batch: int, device: torch.device) -> list[Candidate]:
    """Return training iterations of models, the paper's baseline of the first one after it."""
    first, *others = (iteration(name, model.to(device).train(), batch) for name, model in models.items())
    baseline, paper = models[first.name], written_out(first)
    attention: Any = baseline.blocks[0].attn

    def prepare(training: bool) -> Prepared:
        check_weights(batch, attention.num_heads, baseline.context, len(baseline.blocks), device)
        return paper.prepare(training)

    return [first, paper._replace(prepare=prepare), *others]


def _create(folder: str, name: str, depth: int | None) -> AFTDecoder:
    """Build the model of a recipe, cut to a depth if that is given."""
    recipe = yaml.safe_load((CONFIGS / folder / f'{name}.yaml').read_text())['model']
    return create_decoder(**{**recipe, **({} if depth is None else {'depth': depth})})
