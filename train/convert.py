"""Convert a pretrained ViT to an AFT model, block by block.

python -m train.convert --config FILE [section.key=value ...]

FILE is a YAML experiment, or the name of one of the package such as small/imagenette_convert: one of train.imagenet
with the section `convert`. `distill.teacher` is the ViT; `model` is the AFT model, of its width and at most its depth.

copy      the weights that have the same role in both, as by tools.transfer_deit
blocks    each block learns the output of the teacher's block, on the teacher's input to that block, without labels
features  the whole model learns the teacher's last features, without labels
labels    the model is fine-tuned, as by train.imagenet

Each stage writes a folder of that name into the folder of the conversion; the last three are runs of train.imagenet.
`convert.keep=2` leaves softmax attention in the last two blocks. run.resume=auto continues an interrupted conversion
with the same experiment, or starts a new one: complete stages stay, and those after one that goes on begin again.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path

from train.command_line import parse_args, run_command

EXAMPLE = 'smoke/convert'

if __name__ == '__main__':
    parse_args(__doc__, EXAMPLE, evaluates=False)

from typing import Any

from timm.utils import random_seed
from torch import nn

from aft_vision.data import Loaders
from aft_vision.evaluate import check_classes
from aft_vision.export import export_model
from aft_vision.files import LAST
from aft_vision.models.block_alignment import pair_models, select_blocks
from aft_vision.models.deit_transfer import deit_to_aft
from aft_vision.models.transfer_report import describe_transfer
from aft_vision.models.transfer_source import build_model, set_license
from train.build import Images, build_loaders, build_state, model_arguments, resolve_images
from train.checkpoint import holds_run, lock_run, remove_run, restore
from train.config import load_config, save_config
from train.convert_schema import STAGES, ConvertConfig
from train.distill import load_teacher
from train.distributed import World, join_world
from train.engine import is_complete
from train.imagenet import train_classifier
from train.key_list import format_keys, list_keys
from train.model_section import build_on_meta, model_schema
from train.run import check_run_dir, find_run_dir
from train.schema import Config
from train.state import TrainState

COPY = 'copy'


def main(argv: Sequence[str] | None = None) -> TrainState | None:
    """Convert.

    Returns:
        The final state of the last stage.

    Raises:
        ValueError: the experiment or the data set is not valid, the teacher does not fit the model, or a conversion to
            resume is another one.
        FileExistsError: the folder already has a conversion or a run of another trainer, or another process trains in
            it.
        SystemExit: a signal stopped a stage; its state is saved.
    """
    args = parse_args(__doc__, EXAMPLE, argv, evaluates=False)
    if args.keys:
        print(format_keys(list_keys(ConvertConfig, model_schema())))
        return None
    config = load_config(args.config, args.overrides, ConvertConfig)
    folder = find_run_dir(config.run.dir, args.config)
    config = replace(config, run=replace(config.run, dir=str(folder)))
    experiment, state = folder / 'config.yaml', None
    check_folder(config, folder)
    stages = chain_stages(replace(config, model=keep_attention(config)), folder)
    with (
        join_world(config.run.device, config.run.cpu_threads, config.run.timeout_minutes) as world,
        lock_run(folder) if world.is_primary else nullcontext(),
    ):
        images = resolve_images(config)
        loaders = build_loaders(config, images, world)
        complete = count_complete(stages, images, loaders, world)
        # The first process changes what all have read.
        world.wait()
        if world.is_primary:
            if config.run.resume is None or not holds_run(folder_of(stages[0])):
                model = copy_teacher(replace(stages[0], distill=config.distill), loaders.class_names)
                remove_runs(folder / name for name in STAGES)
                export_model(model, folder / COPY, loaders.class_names, images.described)
            # Before the first one trains: if it is killed, run.resume=auto takes no old one for complete.
            remove_runs(map(folder_of, stages[complete + 1 :]))
            # The folder of a complete conversion says how it was made.
            if complete < len(stages):
                save_config(asdict(config), experiment)
        for stage in stages:
            # The first process may still be writing the weights.
            world.wait()
            if world.is_primary:
                print(f'stage {folder_of(stage).name}')
            state = train_classifier(stage, folder_of(stage), world, not args.quiet, experiment)
    return state


def keep_attention(config: ConvertConfig) -> dict[str, Any]:
    """Return the model section with the last `convert.keep` blocks among its `attention_blocks`.

    Raises:
        ValueError: the model has no such option, or fewer blocks.
    """
    model, keep = config.model, config.convert.keep
    if not keep:
        return model
    depth = len(getattr(build_on_meta(model), 'blocks', ()))
    if keep > depth:
        raise ValueError(f'expected convert.keep to be at most the {depth} blocks of {model["name"]}, got {keep}')
    kept = {*(model.get('attention_blocks') or ()), *range(depth - keep, depth)}
    return {**model, 'attention_blocks': sorted(kept)}


def check_folder(config: ConvertConfig, folder: Path) -> None:
    """Check that a conversion may be written into a folder.

    Raises:
        FileExistsError: it has a run of another trainer, whose config.yaml a conversion replaces, or a conversion that
            is neither resumed nor overwritten.
        ValueError: the conversion to resume has another experiment, apart from its data and its section `run`.
    """
    if holds_run(folder):
        raise FileExistsError(
            f'expected a new folder or that of a conversion, got {folder}, which holds a run of another trainer; set '
            'run.dir'
        )
    for name in STAGES:
        check_run_dir(folder / name, config.run.resume, config.run.overwrite)
    if config.run.resume is None or not any(holds_run(folder / name) for name in STAGES):
        return
    begun, now = (asdict(each) for each in (load_config(folder / 'config.yaml', (), ConvertConfig), config))
    changed = [name for name in begun if name not in ('data', 'run') and begun[name] != now[name]]
    if changed:
        raise ValueError(
            f'expected the {changed[0]} {begun[changed[0]]}, with which the conversion in {folder} began, got '
            f'{now[changed[0]]}; set run.resume=null run.overwrite=true to convert again, or run.dir'
        )


def chain_stages(config: ConvertConfig, folder: Path) -> list[Config]:
    """Return the experiments of the stages, each with its folder and with the weights of the one before."""
    placed, start = [], folder / COPY
    for name, stage in config.stages().items():
        run = replace(stage.run, dir=str(folder / name), init_from=str(start))
        placed.append(replace(stage, run=run))
        start = folder / name / LAST
    return placed


def folder_of(stage: Config) -> Path:
    """Return the folder of a stage."""
    return Path(str(stage.run.dir))


def count_complete(stages: Sequence[Config], images: Images, loaders: Loaders, world: World) -> int:
    """Build every stage before the first one trains, and count those at the start that are complete already.

    Raises:
        ValueError: an experiment is not valid, or a run does not go on with it.
    """
    complete = 0
    for index, stage in enumerate(stages):
        # The weights that it begins with may not be there yet.
        alone = replace(stage, run=replace(stage.run, init_from=None))
        state, description = build_state(alone, images, loaders, world)
        if stage.run.resume is not None and complete == index:
            restore(state, folder_of(stage), stage.run.resume, loaders.class_names, description['data'])
            complete += is_complete(state)
    return complete


def remove_runs(folders: Iterable[Path]) -> None:
    """Remove the runs of stages, which run.resume=auto would take for stages of this conversion; other files stay."""
    for folder in folders:
        if holds_run(folder):
            print(f'removing {folder}: the stage before it starts again or goes on')
            remove_run(folder)
            for name in ('config.yaml', 'summary.csv'):
                (folder / name).unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()


def copy_teacher(config: Config, class_names: Sequence[str]) -> nn.Module:
    """Build the model with the teacher's weights that have the same role in both, from which the first stage starts.

    A classifier of other classes than the data set's is left out.

    Raises:
        ValueError: the teacher does not exist, is not a ViT, or has another width or fewer blocks.
    """
    name, kwargs = model_arguments(config, num_classes=len(class_names))
    source = str(config.distill.teacher)
    teacher: Any = load_teacher(source, config.distill.teacher_args, None, config.data.training_sizes)
    random_seed(config.run.seed)
    model: Any = build_model(name, **kwargs)
    weights = select_blocks(teacher.state_dict(), pair_models(model, teacher))
    if teacher.num_classes == len(class_names):
        try:
            check_classes(teacher, class_names, 'the data set', config.data.classes_by_place)
        except ValueError as error:
            print(f'the classifier of {source} is not copied: {error}')
            weights = {key: value for key, value in weights.items() if not key.startswith('head')}
    state_dict, report = deit_to_aft(weights, model, grid=teacher.patch_embed.grid_size)
    model.load_state_dict(state_dict)
    set_license(model, teacher.pretrained_cfg.get('license'))
    print(f'{source}: {describe_transfer(report, model)}')
    return model


if __name__ == '__main__':
    run_command(main)
