"""Convert a pretrained ViT to an AFT model, block by block.

python -m train.convert --config FILE [section.key=value ...]

FILE is a YAML experiment such as configs/small/imagenette_convert.yaml: one of train.imagenet with the section
`convert`. `distill.teacher` is the ViT; `model` is the AFT model, of its width and at most its depth.

copy      the weights that have the same role in both, as by tools.transfer_deit
blocks    each block learns the output of the teacher's block from the teacher's input, all side by side, without labels
features  the whole model learns the teacher's last features, without labels
labels    the model is fine-tuned, as by train.imagenet

Each stage writes a folder of that name into the folder of the conversion; the last three are runs of train.imagenet.
`convert.keep=2` leaves softmax attention in the last two blocks. run.resume=auto continues an interrupted conversion or
starts a new one; a stage to resume that began with other weights than it would now is an error.
"""

import hashlib
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from train.arguments import parse_args

EXAMPLE = 'configs/smoke/convert.yaml'

# Before the slow imports, so that --help and errors of the command line are immediate.
if __name__ == '__main__':
    parse_args(__doc__, EXAMPLE, evaluates=False)

from typing import Any

from timm.utils import random_seed

from aft_vision.commandline import run_command
from aft_vision.export import export_model
from aft_vision.files import LAST
from aft_vision.models.block_alignment import pair_models, select_blocks
from aft_vision.models.deit_transfer import deit_to_aft
from aft_vision.models.transfer_report import describe_transfer
from train.build import build_loaders, build_model, model_arguments, training_sizes
from train.checkpoint import holds_run, lock_run
from train.config import load_config, save_config
from train.convert_schema import STAGES, ConvertConfig
from train.distill import load_teacher
from train.distributed import World, join_world
from train.imagenet import train_classifier
from train.keys import format_keys, list_keys
from train.model_section import model_schema
from train.run import check_run_dir, find_run_dir
from train.state import TrainState

COPY = 'copy'
# The file of a stage with the digest of the weights that it began with.
START = 'start.sha256'


def main(argv: Sequence[str] | None = None) -> TrainState | None:
    """Convert.

    Returns:
        The final state of the last stage.

    Raises:
        ValueError: the experiment or the data set is not valid, the teacher does not fit the model, or a stage to
            resume began with other weights.
        FileExistsError: the folder already has a conversion or a run of another trainer, or another process trains in
            it.
        SystemExit: a signal stopped a stage; its state is saved.
    """
    args = parse_args(__doc__, EXAMPLE, argv, evaluates=False)
    if args.keys:
        print(format_keys(list_keys(ConvertConfig, model_schema())))
        return None
    config = load_config(args.config, args.overrides, ConvertConfig)
    folder = find_run_dir(config, args.config)
    config = replace(config, model=keep_attention(config), run=replace(config.run, dir=str(folder)))
    refuse_other_runs(folder)
    for name in STAGES:
        check_run_dir(folder / name, config)
    experiment, start, state = folder / 'config.yaml', folder / COPY, None
    with join_world(config) as world, lock_run(folder) if world.is_primary else nullcontext():
        if world.is_primary:
            copy_teacher(config, world, start)
            save_config(config, experiment)
            if config.run.resume is None:
                remove_stages(folder)
        for name, stage in config.stages().items():
            # The first process may still be writing the weights.
            world.wait()
            check_start(folder / name, start, world)
            if world.is_primary:
                print(f'stage {name}')
            run = replace(stage.run, dir=str(folder / name), init_from=str(start))
            state = train_classifier(replace(stage, run=run), folder / name, world, not args.quiet, experiment)
            start = folder / name / LAST
    return state


def keep_attention(config: ConvertConfig) -> dict[str, Any]:
    """Return the model section with the last `convert.keep` blocks among its `attention_blocks`.

    Raises:
        ValueError: the model has no such option, or fewer blocks.
    """
    model, keep = config.model, config.convert.keep
    if not keep:
        return model
    name, kwargs = model_arguments(config, num_classes=0)
    depth = len(getattr(build_model(name, {**kwargs, 'device': 'meta', 'pretrained': False}), 'blocks', ()))
    if keep > depth:
        raise ValueError(f'expected convert.keep to be at most the {depth} blocks of {name}, got {keep}')
    kept = {*(model.get('attention_blocks') or ()), *range(depth - keep, depth)}
    return {**model, 'attention_blocks': sorted(kept)}


def refuse_other_runs(folder: Path) -> None:
    """Raise a FileExistsError for a folder with a run of another trainer, whose config.yaml a conversion replaces."""
    if holds_run(folder):
        raise FileExistsError(
            f'expected a new folder or that of a conversion, got {folder}, which holds a run of another trainer; set '
            'run.dir'
        )


def remove_stages(folder: Path) -> None:
    """Remove the stages of an earlier conversion, which run.resume=auto would take for those of the new one."""
    for stage in (folder / name for name in STAGES):
        if holds_run(stage):
            shutil.rmtree(stage)


def check_start(stage: Path, start: Path, world: World) -> None:
    """Record the weights with which a stage begins, or compare them with the record of a stage to resume.

    Args:
        stage: Folder of the stage.
        start: Exported folder or checkpoint that it begins with.

    Raises:
        ValueError: the stage began with other weights, because an earlier stage has changed.
    """
    with (start / 'model.safetensors' if start.is_dir() else start).open('rb') as file:
        digest = hashlib.file_digest(file, 'sha256').hexdigest()
    record = stage / START
    if not holds_run(stage):
        if world.is_primary:
            stage.mkdir(parents=True, exist_ok=True)
            record.write_text(f'{digest}\n')
    elif not record.exists() or record.read_text().strip() != digest:
        raise ValueError(
            f'expected {start} to have the weights with which {stage} began, got others, because an earlier stage has '
            'changed; set run.resume=null run.overwrite=true to convert again, or another run.dir'
        )


def copy_teacher(config: ConvertConfig, world: World, folder: Path) -> None:
    """Write the model with the teacher's weights that have the same role in both, as an exported folder.

    Raises:
        ValueError: the teacher does not exist, is not a ViT, or has another width or fewer blocks.
    """
    class_names = build_loaders(config, world).class_names
    name, kwargs = model_arguments(config, num_classes=len(class_names))
    sizes = training_sizes(config)
    teacher: Any = load_teacher(replace(config.distill, kind='blocks'), class_names, sizes)
    random_seed(config.run.seed)
    model: Any = build_model(name, kwargs)
    source = select_blocks(teacher.state_dict(), pair_models(model, teacher))
    state_dict, report = deit_to_aft(source, model, grid=teacher.patch_embed.grid_size)
    model.load_state_dict(state_dict)
    print(f'{config.distill.teacher}: {describe_transfer(report, model)}')
    export_model(model, folder, class_names, {'input_size': (3, *sizes[0])})


if __name__ == '__main__':
    run_command(main)
