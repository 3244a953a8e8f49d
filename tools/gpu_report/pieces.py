"""The pieces of the report: their commands, without the file to write, the most valuable first."""

import argparse

from aft_vision.cores import count_cores

OPERATORS = ('conv', 'full', 'axial', 'local_causal', 'simple', 'onehot', 'simple_causal')
MODELS = (
    '--baseline deit_small_patch16_224 --models aft_conv_small aft_conv_small_k11_h16 aft_axial_small aft_full_small'
)
TINY_MODELS = '--baseline deit_tiny_patch16_224 --models aft_conv_tiny --sizes 32 --batch-size 1 --rounds 1'
# The measurements say how much other processes used.
CUDA = '--device cuda --dtype bfloat16 --allow-load'
# Trainings; where one is stopped, the next run goes on with it.
TRAIN = 'train.imagenet --quiet run.throughput_batches=0 run.tensorboard=false'
RECIPE = '--config imagenet/deit_300e data.batch_size=256 ema.decay=null'
TRAINED = ('aft_conv_small', 'deit_small_patch16_224')
TINY_RECIPE = '--config smoke/one_epoch data.batch_size=400 model.depth=1 model.embed_dim=32 model.num_heads=2'
TINY_TRAINED = ('aft_conv_nano', 'deit_tiny_patch16_224')


def make_pieces(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the words after `python -m` of each piece, by its name; before the first point is its group.

    Those of a training lack its folder.
    """
    commands = dry_commands() if args.dry_run else commands_of_all()
    found = {name: command.split() for name, command in commands.items()}
    for name in TINY_TRAINED if args.dry_run else TRAINED if args.data else ():
        epochs = args.epochs or (1 if args.dry_run else 50)
        words = f'{TRAIN} {TINY_RECIPE if args.dry_run else RECIPE} schedule.epochs={epochs}'.split()
        data = [f'data.dir={args.data}', f'data.num_workers={min(count_cores(), 16)}'] if args.data else []
        found[f'd.{name}'] = [*words, f'model.name={name}', *data]
    return dict(sorted(found.items(), key=lambda item: item[0][0]))


def commands_of_all() -> dict[str, str]:
    """Return the commands on a GPU."""
    kernels = 'tools.verify_gpu --thorough'
    pairs = [(operator, dtype) for dtype in ('bfloat16', 'float32', 'float16') for operator in OPERATORS]
    sizes = [(size, batch) for size in (224, 384, 512) for batch in (256, 64, 1)]
    models, table = f'tools.benchmark models {CUDA} {MODELS}', f'tools.benchmark table {CUDA}'
    return {
        **{f'a.{name}.{dtype}': f'{kernels} --operators {name} --dtypes {dtype}' for name, dtype in pairs},
        'b.speed': 'tools.benchmark goals --rows 17 --allow-load',
        'b.roofline': 'tools.benchmark goals --rows 18 --allow-load',
        'b.peers': 'tools.gpu_report.peers',
        'c.training': f'{models} --graph --sizes 224 --batch-size 128 --training',
        **{f'c.{size}px.{batch}': f'{models} --graph --sizes {size} --batch-size {batch}' for size, batch in sizes},
        'c.compiled.training': f'{models} --compile --sizes 224 --batch-size 128 --training',
        **{f'c.compiled.{batch}': f'{models} --compile --sizes 224 --batch-size {batch}' for batch in (256, 1)},
        # Images or sequences of a batch on one of the paper's GPUs.
        'e.table7': f'{table} 7 --batch-size 256',
        'e.table2': f'{table} 2 --batch-size 4',
        'e.table4': f'{table} 4 --batch-size 16',
    }


def dry_commands() -> dict[str, str]:
    """Return the commands of a dry run."""
    kernels = 'tools.verify_gpu --thorough --dry-run --dtypes float32 --operators'
    return {
        **{f'a.{name}.float32': f'{kernels} {name}' for name in OPERATORS},
        'b.speed': 'tools.benchmark goals --rows 17 18 --rounds 1 --allow-load',
        'b.peers': 'tools.gpu_report.peers --rounds 1 --dry-run',
        'c.32px.1': f'tools.benchmark models {TINY_MODELS} --training --allow-load',
        'e.table4': 'tools.benchmark table 4 --depth 1 --batch-size 1 --rounds 1 --allow-load',
    }
