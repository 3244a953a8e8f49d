"""The run of any trainer, from its loaders and initial state to its checkpoints."""

from collections.abc import Sequence
from pathlib import Path

from aft_vision.data import Loaders
from aft_vision.visualize import new_figure
from train.checkpoint import BEST, Saver, holds_run, remove_run, resume
from train.config import continues, save_config
from train.config_layers import command_line_text
from train.convert_schema import STAGES
from train.engine import fit, is_complete
from train.schema import Experiment
from train.state import TrainState
from train.throughput import measure_throughput, warm_up_ddp


def find_run_dir(stated: str | None, file: Path, root: Path = Path('runs')) -> Path:
    """Return the folder of a run: the one that `run.dir` states, or one of `root` named after the config file.

    For the `config.yaml` of a run, that is the name of its folder.
    """
    if stated is not None:
        return Path(stated)
    return root / (file.resolve().parent.name if file.name == 'config.yaml' else file.stem)


def check_run_dir(run_dir: Path, resume: str | None, overwrite: bool) -> None:
    """Raise a FileExistsError for a folder with a conversion, or with a run that is neither resumed nor overwritten."""
    if holds_run(run_dir) and not (overwrite or continues(run_dir, resume)):
        other = '' if resume is None else f', not that of run.resume={resume}'
        raise FileExistsError(
            f'expected a new folder, got {run_dir}, which holds a run{other}; set run.dir, run.resume=auto to go on '
            'with it, or run.overwrite=true'
        )
    if any(holds_run(run_dir / stage) for stage in STAGES):
        raise FileExistsError(f'expected a new folder, got {run_dir}, which holds a conversion; set run.dir')


def evaluated_checkpoint(config: Experiment, run_dir: Path, overrides: Sequence[str]) -> str | Path | None:
    """Return the checkpoint for `--eval`; None for the weights of model.pretrained.

    It is `run.init_from` of the command line, else `best.pth` of the run, else `run.init_from` of a file.

    Raises:
        ValueError: no weights are given.
    """
    best, start = run_dir / BEST, config.run.init_from
    if best.exists() and not (start and command_line_text(overrides, 'run.init_from')):
        return best
    if not (start or config.model.get('pretrained')):
        raise ValueError(f'expected weights to evaluate: {best}, or those of run.init_from, got none')
    return start


def train_run(
    state: TrainState,
    loaders: Loaders,
    saver: Saver,
    resumed: str | None,
    overwrite: bool,
    throughput_batches: int,
    progress: bool = True,
) -> None:
    """Resume if requested, write the experiment, print what limits the run, and train.

    Args:
        resumed, overwrite, throughput_batches: `run.resume` and others of an experiment.

    Raises:
        ValueError: the checkpoint to resume from is not valid, or not the same in all processes.
        SystemExit: a signal stopped the run; its state is saved.
    """
    run_dir, world = saver.folder, state.world
    if resumed is not None:
        resume(state, run_dir, resumed, loaders.class_names, saver.description['data'])
        reached = state.progress
        if continues(run_dir, resumed):
            saver.saved_updates = reached.updates
        if not (world.have_same(reached.updates) and world.have_same(reached.epoch)):
            raise ValueError(
                f'expected all processes to resume from the same checkpoint, but process {world.rank} has epoch '
                f'{reached.epoch}, update {reached.updates}; run.resume={resumed} must be the same on all nodes'
            )
        if not continues(run_dir, resumed) and is_complete(state):
            raise ValueError(
                f'expected a run that is not complete, got run.resume={resumed}, which is, after update '
                f'{reached.updates}; a longer schedule or run.max_seconds goes on with it, run.init_from starts from '
                'its weights'
            )
    # Again: a run that another process began and ended since the first check is not to be removed.
    check_run_dir(run_dir, resumed, overwrite)
    world.wait()
    # The config of a complete run says how it was trained. Every process asks, since they agree on the time.
    goes_on = continues(run_dir, resumed)
    keeps_config = goes_on and is_complete(state)
    if world.is_primary:
        _begin(run_dir, state, goes_on, keeps_config)
    warm_up_ddp(state)
    measured = throughput_batches > 0 and not state.budget_exhausted()
    if measured and not loaders.is_stream:
        throughput = measure_throughput(state, loaders, throughput_batches)
        if world.is_primary:
            print(throughput)
    fit(state, loaders, saver, progress)


def _begin(run_dir: Path, state: TrainState, keeps_run: bool, keeps_config: bool) -> None:
    """Create the folder of the run, write the experiment into it unless it stays, and print the model."""
    # The curves are drawn at the end; report a missing package now.
    new_figure(1, 1)
    run_dir.mkdir(parents=True, exist_ok=True)
    if not keeps_run:
        remove_run(run_dir)
    if not keeps_config:
        save_config(state.record, run_dir / 'config.yaml')
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    world = state.world
    processes = f'{world.size} processes, the first ' if world.size > 1 else ''
    print(f'{state.record["model"]["name"]}: {parameters / 1e6:.2f} M parameters; {processes}on {world.device}')
