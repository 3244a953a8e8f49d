"""Train Fastformer, or a Transformer that it is compared with, for the task that the experiment names.

python -m train.fastformer --config FILE [--eval] [section.key=value ...]
torchrun --nproc-per-node 8 -m train.fastformer --config FILE [section.key=value ...]

FILE is a YAML experiment, or the name of one of the package such as fastformer/imdb; `section.key=value` changes one
value of it, for example `data.path=/data/imdb model.encoder_mixer=longformer run.seeds=[0,1,2]`. Data are downloaded
only by `data.kind=hub`, and by `cnn_dailymail` and `pubmed` without data.path.

Each of run.seeds is a run of its own on transformers' Trainer: the epoch that is best in validation is tested, once.
The folder of the runs receives config.yaml (the resolved experiment), result.json (mean and standard deviation of all
seeds) and, for each seed, seed_N with checkpoints, result.json and best/, a saved model with its tokenizer for the
`from_pretrained` of transformers' Auto class. run.resume=auto continues interrupted runs.

--eval only evaluates: it prints the metrics of run.init_from, or of every seed's best/, on data.eval_split.
"""

import dataclasses
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from train.command_line import parse_args, run_command

EXAMPLE = 'smoke/fastformer'

if __name__ == '__main__':
    parse_args(__doc__, EXAMPLE)

import torch
from accelerate import PartialState
from datasets import disable_progress_bars
from transformers.utils import logging

from aft_vision.cores import limit_threads
from aft_vision.devices import resolve_device
from aft_vision.files import write_json
from train.checkpoint import holds_run, lock_run
from train.config import save_config
from train.fastformer.run import CONFIG, RESULT, TextRun
from train.fastformer.schema import TextConfig
from train.fastformer.tasks import TASKS, load_text_config
from train.fastformer.trainer import describe, describe_value
from train.key_list import format_keys, list_keys
from train.run import find_run_dir

# Keys that may change when runs are resumed; of `run` all except RUN_KEYS.
FREE_DATA_KEYS = ('eval_batch_size', 'eval_split', 'num_workers')
RUN_KEYS = ('init_from', 'amp', 'attention')
# Keys that determine the training examples of any task.
SPLIT_KEYS = (
    'kind hub_config revision drop_incomplete drop_missing max_texts valid_path test_path text_columns label_column '
    'summary_column skip_lines bodies split_column division test_share valid_share split_seed'
).split()


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    """Train or evaluate, as the command line says.

    Returns:
        The summary of all seeds; None after an evaluation.

    Raises:
        ValueError: the experiment, the data or the model to start from is not valid.
        FileExistsError: the folder already holds runs.
    """
    args = parse_args(__doc__, EXAMPLE, argv)
    if args.keys:
        for name, task in TASKS.items():
            print(f'task={name}\n\n{format_keys(list_keys(task.schema, task.schema.model_schema()))}\n')
        return None
    config = load_text_config(args.config, args.overrides)
    folder = find_run_dir(config.run.dir, args.config, Path('runs') / 'fastformer')
    if config.run.cpu_threads is not None:
        torch.set_num_threads(config.run.cpu_threads)
    elif resolve_device(config.run.device).type == 'cpu':
        limit_threads(by_load=args.eval)
    if args.quiet or (argv is None and not sys.stderr.isatty()):
        logging.disable_progress_bar()
        disable_progress_bars()
    check_files(config)
    run = TASKS[config.task].read(config, folder, args.quiet)
    # Transformers' Trainer joins the processes that torchrun started through the same object.
    processes = PartialState(cpu=config.run.device == 'cpu')
    try:
        # Before the folder is made, this refuses a batch that cannot be shared out, or one process for several GPUs.
        run.arguments(folder, config.run.seeds[0])
        if args.eval:
            for source, metrics in evaluate(run).items():
                results = describe({name: metrics[name] for name in run.metrics if name in metrics})
                processes.print(f'{source}, {config.data.eval_split}: {results or "ranked, without labels to measure"}')
            return None
        run.check_splits()
        with lock_run(folder) if processes.is_main_process else nullcontext():
            if processes.is_main_process:
                begin(run)
            processes.wait_for_everyone()
            summary = run.summarize_seeds([run.train(seed) for seed in config.run.seeds])
            if processes.is_main_process:
                finish(run, summary)
            return summary
    finally:
        processes.destroy_process_group()


def begin(run: TextRun) -> None:
    """Create the folder of the runs, write the experiment into it, and print the model.

    Raises:
        FileExistsError: it already holds runs, which are not to be resumed or overwritten.
        ValueError: the runs to resume were of another experiment.
    """
    config, folder = run.config, run.folder
    earlier = [path for path in (folder / RESULT, *folder.glob('seed_*')) if path.exists()]
    if (earlier or holds_run(folder)) and not (config.run.overwrite or config.run.resume):
        raise FileExistsError(
            f'expected a new folder, got {folder}, which holds a run; set run.dir, run.resume=auto to go on with it, '
            'or run.overwrite=true'
        )
    if config.run.resume is None:
        for path in earlier:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif earlier and (folder / CONFIG).exists():
        check_same(load_text_config(folder / CONFIG), config, folder / CONFIG)
    folder.mkdir(parents=True, exist_ok=True)
    save_config(dataclasses.asdict(config), folder / CONFIG)
    counts = ', '.join(f'{count} {name}' for name, count in run.counts().items())
    model = config.run.init_from or config.model.get('encoder_mixer') or 'fastformer'
    print(f'{config.task} by {model}: {counts}')


def check_files(config: TextConfig) -> None:
    """Raise a ValueError if the model that training starts from, or the file of vectors, is missing.

    A name that is no folder would be asked for on the hub, when earlier runs are already replaced.
    """
    source, glove = config.run.init_from, config.data.glove
    if source is not None and not (Path(source) / 'config.json').is_file():
        raise ValueError(f'expected a saved model in run.init_from, a folder with config.json, got {source}')
    if glove is not None and not Path(glove).is_file():
        raise ValueError(f'expected GloVe vectors in data.glove, got {glove}, which is no file')


def check_same(before: TextConfig, now: TextConfig, source: Path) -> None:
    """Raise a ValueError unless two experiments give the same runs, except for paths."""
    if before.task != now.task:
        raise ValueError(f'expected the task {before.task} as in {source}, which is to be resumed, got {now.task}')
    old, new = dataclasses.asdict(before), dataclasses.asdict(now)
    for section in [name for name in old if name != 'task']:
        keys = RUN_KEYS if section == 'run' else sorted(old[section].keys() | new[section].keys())
        for key in [key for key in keys if section != 'data' or key not in FREE_DATA_KEYS]:
            was, given = old[section].get(key), new[section].get(key)
            if differ(key, was, given):
                raise ValueError(
                    f'expected {section}.{key} = {was!r} as in {source}, which is to be resumed, got {given!r}; set '
                    'another run.dir, or run.overwrite=true'
                )


def check_same_split(before: TextConfig, now: TextConfig, source: Path) -> None:
    """Raise a ValueError if the data are split differently than in training, which could evaluate training texts."""
    for key in SPLIT_KEYS:
        was, given = getattr(before.data, key, None), getattr(now.data, key, None)
        if differ(key, was, given):
            raise ValueError(
                f'expected data.{key} = {was!r} as in {source}, or texts of training may be evaluated, got {given!r}; '
                'run.init_from names a model to evaluate on any data'
            )


def differ(key: str, was: Any, now: Any) -> bool:
    """Return True if two values of a key mean different experiments: files may have moved."""
    if key.endswith('path') or key in ('glove', 'bodies'):
        return (was is None) != (now is None)
    return was != now


def evaluate(run: TextRun) -> dict[str, dict[str, float]]:
    """Evaluate `run.init_from`, or every seed's best model, on `data.eval_split`.

    Raises:
        ValueError: there is no such model, it is not one for this experiment, or it was trained with other splits.
    """
    config = run.config
    if config.run.init_from is not None:
        sources = [Path(config.run.init_from)]
    else:
        if (run.folder / CONFIG).exists():
            check_same_split(load_text_config(run.folder / CONFIG), config, run.folder / CONFIG)
        sources = [run.seed_dir(seed) / 'best' for seed in config.run.seeds]
    for source in sources:
        if not (source / 'config.json').is_file():
            raise ValueError(f'expected a saved model in {source}, got none; train first, or set run.init_from')
    return run.evaluate_all(sources, config.data.eval_split)


def finish(run: TextRun, summary: dict[str, Any]) -> None:
    """Write and print the summary of the seeds, and list the files."""
    model = run.config.model if run.config.run.init_from is None else {'init_from': run.config.run.init_from}
    write_json(run.folder / RESULT, {**summary, 'model': model})
    for metric in (name for name in run.metrics if f'test_{name}' in summary):
        mean, deviation = summary[f'test_{metric}']['mean'], summary[f'test_{metric}']['std']
        seeds = ', '.join(map(str, summary['seeds']))
        print(f'test {metric} {describe_value(metric, mean, deviation)}  (seeds {seeds})')
    print(
        f'{summary["seconds_per_epoch"]["mean"]:.1f} s/epoch, {summary["memory_mb"]["mean"]:.0f} MiB; in {run.folder}:'
    )
    print('  result.json  mean, deviation and every seed    config.yaml  repeats the runs')
    print('  seed_N/best  the model and its tokenizer       seed_N/checkpoint-N  to resume from')


if __name__ == '__main__':
    run_command(main)
