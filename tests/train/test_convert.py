"""A small ViT is converted in stages, each an ordinary run, and an interruption changes nothing."""

import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import timm
import torch
from helpers import digest, link_photographs, losses, stop_in

from aft_vision.export import export_model
from aft_vision.layers import AFTBlock
from aft_vision.models.attention_block import AttentionBlock
from aft_vision.models.checkpoint import load_model
from train import engine, imagenet
from train.config import load_config
from train.convert import main
from train.convert_schema import STAGES, ConvertConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Those of a conversion of a ViT of four blocks to an AFT-axial of two, with two updates an epoch."""
    folder = link_photographs(tmp_path_factory.mktemp('convert'), 4, 1)
    torch.manual_seed(0)
    sizes = dict(img_size=32, patch_size=8, embed_dim=64, depth=4, num_heads=2, num_classes=10)
    vit = timm.create_model('vit_tiny_patch16_224', **sizes)
    with torch.no_grad():
        for block in vit.blocks:
            # What a trained block adds is not small.
            block.attn.proj.weight.mul_(10)
            block.mlp.fc2.weight.mul_(10)
    export_model(vit, folder / 'vit', sorted(path.name for path in (folder / 'train').iterdir()))
    model = 'model.name=aft_axial_tiny model.embed_dim=64 model.num_heads=4 model.depth=2 model.patch_size=8'.split()
    return [
        *('--quiet', '--config', str(ROOT / 'configs' / 'smoke' / 'convert.yaml'), *model),
        *(f'distill.teacher={folder / "vit"}', f'data.dir={folder}', 'data.batch_size=20', 'run.tensorboard=false'),
        *('ema.decay=0.9', 'convert.keep=1', 'convert.blocks_epochs=4', 'convert.blocks_lr=0.1'),
    ]


@pytest.fixture(scope='module')
def whole(arguments, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion with one block of attention."""
    folder = tmp_path_factory.mktemp('whole')
    main([*arguments, f'run.dir={folder}'])
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Those at the end of a stage."""
    return load_model(folder if folder.name == 'copy' else folder / 'last.pth').state_dict()


def changes(before: Path, after: Path) -> dict[str, float]:
    """The largest change from one stage to another in each part of the model that changed."""
    found: dict[str, float] = {}
    for (name, x), y in zip(weights(before).items(), weights(after).values(), strict=True):
        part = name.partition('.')[0]
        found[part] = max(found.get(part, 0.0), (x - y).abs().max().item())
    return {part: change for part, change in found.items() if change}


def test_the_error_of_the_blocks_falls(whole):
    errors = [float(row['train_loss']) for row in losses(whole / 'blocks')]
    assert errors[-1] < 0.7 * errors[0]


def test_every_stage_goes_on_from_the_weights_of_the_one_before(whole):
    aligned, *later = (changes(whole / before, whole / after) for before, after in pairwise(('copy', *STAGES)))
    assert aligned.keys() == {'blocks'}
    # The classifier has no part in the features; only the decay of the weights changes it.
    assert later[0]['head'] < 0.01 * later[0]['blocks']
    # Their learning rates are low: from another start the change would be that of the blocks.
    assert all(max(each.values()) < 0.1 * aligned['blocks'] for each in later)


def test_the_last_block_keeps_attention(whole):
    aligned = load_model(whole / 'blocks' / 'last.pth')
    assert [type(block) for block in aligned.blocks] == [AFTBlock, AttentionBlock]


def test_the_copy_has_the_weights_of_the_last_block_of_each_pair(arguments, whole):
    vit = load_model(next(a for a in arguments if a.startswith('distill.teacher=')).partition('=')[2])
    copied = load_model(whole / 'copy')
    for block, source in zip(copied.blocks, vit.blocks[1::2], strict=True):
        assert torch.equal(block.mlp.fc1.weight, source.mlp.fc1.weight)
    assert torch.equal(copied.blocks[1].attn.qkv.weight, vit.blocks[3].attn.qkv.weight)
    assert torch.equal(copied.head.weight, vit.head.weight)


def test_a_conversion_over_another_one_stopped_by_a_signal_ends_as_one_in_a_new_folder(
    arguments, whole, tmp_path, monkeypatch, capsys
):
    for name in STAGES:
        # Complete runs of other weights.
        shutil.copytree(whole / 'blocks', tmp_path / name)
    (tmp_path / 'notes.txt').touch()
    again = [*arguments, f'run.dir={tmp_path}', 'run.overwrite=true', 'convert.fine_tune=none']
    stop_in(monkeypatch, 1, main, again)
    assert torch.load(tmp_path / 'blocks' / 'last.pth', weights_only=True)['updates'] == 1
    command = capsys.readouterr().out.rpartition(' --config ')[2].split()
    assert command[0] == str(tmp_path / 'config.yaml')
    main(['--quiet', '--config', *command])
    files = ['blocks', 'config.yaml', 'copy', 'features', 'notes.txt']
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    for name in STAGES[:2]:
        assert digest(tmp_path / name / 'last.pth') == digest(whole / name / 'last.pth')
        assert losses(tmp_path / name) == losses(whole / name)


def test_a_conversion_over_one_that_goes_on_is_an_error_and_removes_nothing(arguments, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / 'run')
    lock = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); print(); sys.stdin.read()"
    )
    command = [sys.executable, '-c', lock, str(folder / '.lock')]
    # It ends when its input does.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        with pytest.raises(FileExistsError, match='no other run is going on'):
            main([*arguments, f'run.dir={folder}', 'run.overwrite=true'])
    for name in STAGES:
        assert digest(folder / name / 'last.pth') == digest(whole / name / 'last.pth')


def test_a_stage_that_goes_on_lets_those_after_it_begin_again(arguments, whole, tmp_path, capsys):
    main([*arguments, f'run.dir={tmp_path}', 'run.max_seconds=0.001'])
    assert [torch.load(tmp_path / name / 'last.pth', weights_only=True)['updates'] for name in STAGES] == [1, 1, 1]
    capsys.readouterr()
    main([*arguments, f'run.dir={tmp_path}', 'run.resume=auto', 'run.max_seconds=1000'])
    printed = capsys.readouterr().out
    assert [name for name in STAGES if f'removing {tmp_path / name}:' in printed] == list(STAGES[1:])
    for name in STAGES:
        assert digest(tmp_path / name / 'last.pth') == digest(whole / name / 'last.pth')
        assert losses(tmp_path / name) == losses(whole / name)
    assert load_config(tmp_path / 'config.yaml', (), ConvertConfig).run.max_seconds == 1000


def test_a_stage_that_was_removed_lets_those_after_it_begin_again(arguments, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / 'run')
    shutil.rmtree(folder / 'features')
    main([*arguments, f'run.dir={folder}', 'run.resume=auto', 'run.seed=1'])
    same = [digest(folder / name / 'last.pth') == digest(whole / name / 'last.pth') for name in STAGES]
    assert same == [True, False, False]
    # What says how it was made stays when it is resumed complete.
    before = (folder / 'config.yaml').read_bytes()
    main([*arguments, f'run.dir={folder}', 'run.resume=auto', 'run.seed=2'])
    assert (folder / 'config.yaml').read_bytes() == before
    assert load_config(folder / 'config.yaml', (), ConvertConfig).run.seed == 1


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('convert.features_epochs=0', r"expected the convert .*, with which .* began, got .*'features_epochs': 0,"),
        ('distill.teacher=deit_small_patch16_224', r"expected the distill .*, got .*'deit_small_patch16_224'.*; set"),
        ('data.batch_size=16', r'a run with batch_size = 16, .* got .*last\.pth with 20'),
    ],
)
def test_another_conversion_is_not_resumed(arguments, whole, tmp_path, override, message):
    folder = shutil.copytree(whole, tmp_path / 'run')
    with pytest.raises(ValueError, match=message):
        main([*arguments, f'run.dir={folder}', 'run.resume=auto', override])
    assert contents(folder) == contents(whole)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (['optim.args={foo: 1}'], r'expected optim\.args of the optimizer'),
        (['regularize.kernel_entropy=0.001'], r'regularize\.kernel_entropy to be 0'),
        (['convert.fine_tune=distill', 'distill.kind=token_hard'], 'set_distilled_training'),
    ],
)
def test_a_stage_that_cannot_be_built_is_an_error_before_any_trains_and_removes_nothing(
    change, message, arguments, whole, tmp_path
):
    folder = shutil.copytree(whole, tmp_path / 'run')
    with pytest.raises(ValueError, match=message):
        main([*arguments, f'run.dir={folder}', 'run.overwrite=true', *change])
    assert contents(folder) == contents(whole)
    with pytest.raises(ValueError, match=message):
        main([*arguments, f'run.dir={tmp_path / "new"}', *change])
    assert not (tmp_path / 'new').exists()


def test_the_last_stage_learns_from_a_softened_teacher_and_the_saved_config_keeps_what_was_given(arguments, tmp_path):
    alone = ['convert.blocks_epochs=0', 'convert.features_epochs=0', 'convert.fine_tune=distill', 'distill.kind=soft']
    main([*arguments, *alone, 'distill.temperature=3', 'distill.task_loss_weight=0.5', f'run.dir={tmp_path / "a"}'])
    before = load_config(tmp_path / 'a' / 'labels' / 'config.yaml')
    assert (before.distill.kind, before.distill.temperature, before.model['attention_blocks']) == ('soft', 3, [1])
    main(['--quiet', '--config', str(tmp_path / 'a' / 'config.yaml'), f'run.dir={tmp_path / "b"}', 'convert.keep=0'])
    assert [type(block) for block in load_model(tmp_path / 'b' / 'labels').blocks] == [AFTBlock, AFTBlock]


def test_a_copy_has_the_preprocessing_of_the_stages_and_no_classifier_of_classes_in_another_order(
    arguments, tmp_path, capsys
):
    teacher = next(a for a in arguments if a.startswith('distill.teacher=')).partition('=')[2]
    vit = load_model(teacher)
    export_model(vit, tmp_path / 'vit', vit.pretrained_cfg['label_names'][::-1])
    only = ['convert.blocks_epochs=0', 'convert.features_epochs=0', 'data.crop_pct=0.5', f'run.dir={tmp_path / "run"}']
    main([*arguments, f'distill.teacher={tmp_path / "vit"}', *only])
    copied, trained = (load_model(tmp_path / 'run' / name) for name in ('copy', 'labels'))
    assert copied.pretrained_cfg['crop_pct'] == trained.pretrained_cfg['crop_pct'] == 0.5
    assert copied.pretrained_cfg['interpolation'] == trained.pretrained_cfg['interpolation']
    assert torch.equal(copied.norm.weight, vit.norm.weight)
    assert not torch.equal(copied.head.weight, vit.head.weight)
    assert 'vit is not copied: expected the classes of the model' in capsys.readouterr().out


def test_rates_of_a_stage_below_those_of_the_schedule_are_its_own(arguments, tmp_path):
    lower = ['convert.features_epochs=0', 'convert.fine_tune=none', 'convert.blocks_lr=1e-6', 'schedule.min_lr=1e-5']
    main([*arguments, *lower, f'run.dir={tmp_path}', 'run.max_seconds=0.001'])
    assert load_config(tmp_path / 'blocks' / 'config.yaml').schedule.min_lr == pytest.approx(1e-6 * 20 / 512)


def test_a_stage_left_out_is_not_overwritten_without_a_word(arguments, whole, tmp_path):
    shutil.copytree(whole / 'blocks', tmp_path / 'blocks')
    with pytest.raises(FileExistsError, match=r'blocks, which holds a run; .*run\.overwrite=true'):
        main([*arguments, f'run.dir={tmp_path}', 'convert.blocks_epochs=0'])


@pytest.mark.parametrize('more', [[], ['run.resume=auto'], ['run.overwrite=true']])
def test_a_conversion_keeps_its_config_beside_other_trainers(more, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / 'run')
    before = (folder / 'config.yaml').read_bytes()
    with pytest.raises(FileExistsError, match=r'run, which holds a conversion; set run\.dir'):
        imagenet.main(['--config', str(ROOT / 'configs' / 'small' / 'imagenette.yaml'), f'run.dir={folder}', *more])
    assert (folder / 'config.yaml').read_bytes() == before


@pytest.mark.parametrize('override', ['run.resume=auto', 'run.overwrite=true'])
def test_a_run_of_another_trainer_keeps_its_config(override, arguments, whole, tmp_path):
    run = shutil.copytree(whole / 'blocks', tmp_path / 'run')
    before = (run / 'config.yaml').read_text()
    with pytest.raises(FileExistsError, match=r'run, which holds a run of another trainer; set run\.dir'):
        main([*arguments, f'run.dir={run}', override])
    assert (run / 'config.yaml').read_text() == before


def test_the_stages_without_labels_ignore_them(arguments, whole, tmp_path, monkeypatch):
    original = engine.train_step
    monkeypatch.setattr(engine, 'train_step', lambda state, parts: original(state, [(x, y.flip(0)) for x, y in parts]))
    main([*arguments, f'run.dir={tmp_path}', 'convert.fine_tune=none'])
    for name in STAGES[:2]:
        assert digest(tmp_path / name / 'last.pth') == digest(whole / name / 'last.pth')


@pytest.mark.parametrize(
    ('overrides', 'message'),
    [
        (['convert.keep=3'], r'convert\.keep to be at most the 2 blocks of aft_axial_tiny, got 3'),
        (['distill.teacher=null'], r'distill\.teacher to be the ViT to convert, got None'),
        (['run.init_from=x.pth'], r'run\.init_from to be null'),
        (['run.resume=x.pth'], r'run\.resume to be auto or null'),
        (['convert.blocks_epochs=0', 'convert.features_epochs=0', 'convert.fine_tune=none'], r'convert\.fine_tune'),
        (['model.depth=5'], r'a teacher of at least the 5 blocks of the model, got 4'),
        (['distill.kind=soft'], r"distill\.kind to be hard without convert\.fine_tune=distill, got 'soft'"),
        (['convert.fine_tune=distill', 'distill.kind=blocks'], r"distill\.kind to be another one, .*, got 'blocks'"),
    ],
)
def test_a_conversion_that_cannot_be_is_an_error(overrides, message, arguments, tmp_path):
    with pytest.raises(ValueError, match=message):
        main([*arguments, f'run.dir={tmp_path / "run"}', *overrides])


def test_a_pyramid_has_not_the_blocks_of_a_vit(arguments, tmp_path):
    plain = [argument for argument in arguments if not argument.startswith('model.')]
    with pytest.raises(ValueError, match='expected a vision transformer as the model, got a AFTPyramid'):
        main([*plain, 'model.name=aft_pyramid_nano', 'convert.keep=0', f'run.dir={tmp_path}'])
