import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import NO_AUGMENTATION, digest, link_photographs, losses, save_model, stop_in
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from aft_vision.data import Augmentation
from aft_vision.models.checkpoint import load_model
from train.build import create_state
from train.config import load_config
from train.distill import load_teacher
from train.distributed import World
from train.engine import train_step
from train.imagenet import main
from train.schema import Config, DataConfig, DistillConfig, EmaConfig, OptimConfig, RunConfig, ScheduleConfig
from train.state import TrainState

ROOT = Path(__file__).parents[2]
KINDS = ['hard', 'soft', 'feature', 'soft_feature', 'token_hard', 'token_soft']
HERE = World(torch.device('cpu'))
AFT = dict(patch_size=2, num_heads=4, kernel_size=3, num_classes=3)
MIXED = Augmentation(repeats=1, random_erasing=0.0)
CLOTHING = ROOT / 'tests' / 'assets' / 'clothing'
# Everything random at once: each image three times an epoch, erasing, mixup and cutmix, drop path, moving average; two
# epochs of three updates.
RECIPE = f"""
base: {ROOT / 'configs' / 'imagenet' / 'deit_300e.yaml'}
data: {{img_size: [32, 32], batch_size: 20, num_workers: 0}}
optim: {{lr: 5.0e-2, accumulate: 2, clip_grad: 1.0}}
ema: {{decay: 0.9, warmup: true}}
schedule: {{epochs: 2, warmup_epochs: 0, step: update}}
run: {{amp: none, compile: false, tensorboard: false}}
"""
MODEL = ['model.name=aft_conv_tiny', 'model.depth=1', 'model.num_heads=8', 'model.kernel_size=3', 'model.patch_size=8']
DEIT = ['model.name=deit_tiny_distilled_patch16_224', 'model.depth=1', 'model.num_heads=4', 'model.patch_size=8']
PLAIN = ['augment.mixup=0', 'augment.cutmix=0', 'augment.random_erasing=0', 'augment.auto_augment=null']
PLAIN += ['augment.repeats=1', 'model.drop_path_rate=0', 'schedule.epochs=12', 'optim.lr=0.2', 'run.eval_every=12']


def randomize(model: nn.Module, seed: int) -> nn.Module:
    """Weights as after a training, in which no head is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def make_student(kind: str = 'hard', seed: int = 1) -> nn.Module:
    if kind.startswith('token'):
        sizes = dict(patch_size=2, img_size=4, depth=1, embed_dim=16, num_heads=1, num_classes=3)
        return randomize(timm.create_model('deit_tiny_distilled_patch16_224', **sizes), seed)
    return randomize(timm.create_model('aft_conv_tiny', depth=1, embed_dim=16, **AFT), seed)


def make_teacher(embed_dim: int = 24) -> nn.Module:
    """A wider AFT-conv that was trained on images normalised in another way."""
    teacher = randomize(timm.create_model('aft_conv_tiny', depth=1, embed_dim=embed_dim, **AFT), 2)
    teacher.pretrained_cfg.update(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    return teacher


def make_state(
    kind: str, student: nn.Module | None = None, teacher: nn.Module | None = None, **sections: Any
) -> TrainState:
    distill: dict[str, Any] = {'teacher': 'given', 'kind': kind, **sections.pop('distill', {})}
    defaults = dict(
        data=DataConfig(batch_size=8),
        augment=NO_AUGMENTATION,
        optim=OptimConfig(lr=0.064, label_smoothing=0.0),
        schedule=ScheduleConfig(epochs=4, warmup_epochs=0, warmup_lr=0.0, step='update'),
        run=RunConfig(tensorboard=False),
    )
    config = Config(**{**defaults, **sections}, distill=DistillConfig(**distill))
    model = make_student(kind) if student is None else student
    taught_by = make_teacher() if teacher is None else teacher
    return create_state(model, config, updates_per_epoch=6, num_classes=3, world=HERE, teacher=taught_by)


def make_images(size: int = 8) -> torch.Tensor:
    return torch.randn(size, 3, 4, 4, generator=torch.Generator().manual_seed(3))


def make_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    targets = torch.arange(8) % 3
    return [(make_images(), targets) for _ in range(count)]


def step(state: TrainState, count: int = 1) -> list[float | None]:
    return [train_step(state, [batch]) for batch in make_batches(count)]


def teacher_loss(
    kind: str,
    state: TrainState,
    teacher: nn.Module,
    images: torch.Tensor,
    temperature: float,
    feature_loss_weight: float = 1.0,
):
    """The teacher's part of the loss, written out in float64."""
    student, teacher, images = copy.deepcopy(state.model).double(), teacher.double().eval(), images.double()
    mean, std = (torch.tensor(student.pretrained_cfg[name])[:, None, None].double() for name in ('mean', 'std'))
    seen = (images * std + mean - 0.5) / 0.5
    error = 0.0
    if 'feature' in kind:
        project = copy.deepcopy(state.task.trainable_module.projection).double()
        features = [x.forward_features(y).mean(1) for x, y in ((student, images), (teacher, seen))]
        normed = [x.fc_norm(y) for x, y in zip((student, teacher), features, strict=True)]
        if kind == 'soft_feature':
            normed[1] = (normed[1] - normed[1].mean(-1, keepdim=True)) / (
                normed[1].var(-1, correction=0, keepdim=True) + 1e-5
            ).sqrt()
        error = ((normed[0] @ project.weight.T + project.bias - normed[1]) ** 2).mean()
    if kind == 'feature':
        return error
    logits = student(images)[1] if kind.startswith('token') else student(images)
    if kind.endswith('hard'):
        choice = teacher(seen).argmax(-1)
        return -logits.log_softmax(-1)[torch.arange(len(choice)), choice].mean()
    p, q = ((x / temperature).softmax(-1) for x in (teacher(seen), logits))
    return temperature**2 * (p * (p / q).log()).sum(-1).mean() + feature_loss_weight * error


@pytest.mark.parametrize('kind', KINDS)
def test_the_loss_is_the_formula_on_mixed_images(kind):
    temperature = 3.0 if 'soft' in kind else 1.0
    weight = 0.5 if kind == 'soft_feature' else 1.0
    teacher, images = make_teacher(), make_images()
    settings = dict(task_loss_weight=0.3, temperature=temperature, feature_loss_weight=weight)
    state = make_state(kind, teacher=copy.deepcopy(teacher), augment=MIXED, distill=settings)
    mixed = torch.rand(8, 3, generator=torch.Generator().manual_seed(4)).softmax(-1)
    state.model.train()
    result = state.task(images, mixed)
    expected = teacher_loss(kind, state, teacher, images, temperature, weight)
    logits = copy.deepcopy(state.model).double()(images.double())
    logits = logits[0] if kind.startswith('token') else logits
    labels = -(mixed.double() * logits.log_softmax(-1)).sum(-1).mean()
    assert expected > 0.01
    torch.testing.assert_close(result['loss'].double(), 0.3 * labels + 0.7 * expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('kind', KINDS)
def test_the_teacher_stays_what_it_was_and_the_student_trains(kind):
    # Batch normalisation and dropout would behave otherwise in training.
    teacher = timm.create_model('test_efficientnet', num_classes=3, drop_rate=0.5)
    before, state = copy.deepcopy(teacher.state_dict()), make_state(kind, teacher=teacher)
    weights = copy.deepcopy(state.model.state_dict())
    state.task.train()
    step(state, 3)
    torch.testing.assert_close(teacher.state_dict(), before, rtol=0, atol=0)
    assert not any(module.training for module in teacher.modules())
    assert all(module.training for module in state.model.modules())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(not torch.equal(x, weights[name]) for name, x in state.model.state_dict().items())


def test_the_projection_of_the_features_is_optimized_clipped_and_averaged(monkeypatch):
    clipped = []

    def record(parameters, norm):
        clipped.extend(parameters)
        return torch.ones(())

    monkeypatch.setattr(nn.utils, 'clip_grad_norm_', record)
    state = make_state('feature', ema=EmaConfig(decay=0.5))
    trained = state.task.get_trainable_module()
    before = copy.deepcopy(trained.projection)
    step(state)
    everything = {id(parameter) for parameter in trained.parameters()}
    assert {id(parameter) for parameter in clipped} == everything
    assert {id(p) for group in state.optimizer.param_groups for p in group['params']} == everything
    assert trained.projection.weight.shape == (24, 16)
    average = state.task.get_trainable_module(ema=True).module.projection
    torch.testing.assert_close(average.weight, (before.weight + trained.projection.weight) / 2)
    assert state.model is trained.student
    names = make_student().state_dict().keys()
    assert state.averaged_model.state_dict().keys() == state.model.state_dict().keys() == names


@pytest.mark.parametrize('layer_decay', [None, 0.5])
def test_the_student_has_the_decays_that_it_has_without_a_teacher(layer_decay):
    settings = []
    for teacher in (None, 'given'):
        config = Config(
            distill=DistillConfig(teacher, kind='feature' if teacher else 'hard'),
            optim=OptimConfig(lr=0.64, layer_decay=layer_decay),
        )
        student = make_student()
        state = create_state(student, config, 6, 3, HERE, teacher and make_teacher())
        names = {id(parameter): name for name, parameter in student.named_parameters()}
        groups = [(p, group) for group in state.optimizer.param_groups for p in group['params'] if id(p) in names]
        settings.append({names[id(p)]: (g['weight_decay'], g.get('lr_scale')) for p, g in groups})
    assert settings[0] == settings[1]
    assert len(set(settings[0].values())) > 1


def test_the_teacher_computes_in_the_precision_of_the_run():
    seen, teacher = [], make_teacher()
    teacher.head.register_forward_hook(lambda module, args, output: seen.append((output.dtype, output.requires_grad)))
    step(make_state('soft', teacher=teacher, run=RunConfig(amp='bfloat16')))
    assert seen == [(torch.bfloat16, False)]
    assert teacher.head.weight.dtype == torch.float32


def test_a_compiled_task_trains_as_an_eager_one(monkeypatch):
    # The graphs and their gradients; that their code can be generated is shown by a test of the model.
    graphs, compile_ = CompileCounterWithBackend('aot_eager'), torch.compile
    monkeypatch.setattr(torch, 'compile', lambda module, **kwargs: compile_(module, backend=graphs))
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        state = make_state('feature', run=RunConfig(compile=compiled), ema=EmaConfig(decay=0.5))
        state.model.train()
        found.append(step(state, 3))
        assert (graphs.frame_count > 0) == compiled
        names = make_student('feature').state_dict().keys()
        assert state.model.state_dict().keys() == state.averaged_model.state_dict().keys() == names
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope='module')
def recipe(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The recipe on eight photographs of each class, six of them for training."""
    folder = link_photographs(tmp_path_factory.mktemp('recipe'), 6, 2)
    (folder / 'recipe.yaml').write_text(RECIPE)
    return ['--quiet', '--config', str(folder / 'recipe.yaml'), f'data.dir={folder}']


@pytest.fixture(scope='module')
def teacher_dir(recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model is narrower than the students."""
    run_dir = tmp_path_factory.mktemp('teacher')
    main([*recipe, *MODEL, *PLAIN, 'model.embed_dim=16', 'schedule.epochs=2', f'run.dir={run_dir}'])
    return run_dir


def distilled(recipe: list[str], kind: str, teacher: Path, run_dir: Path) -> list[str]:
    model = DEIT if kind.startswith('token') else MODEL
    names = [f'distill.kind={kind}', f'distill.teacher={teacher}', f'run.dir={run_dir}']
    return [*recipe, *model, 'model.embed_dim=32', *names]


# The kinds differ in the loss, which keeps nothing, and in the projection of features.
def test_a_run_stopped_by_a_signal_ends_as_if_it_had_not_been(recipe, teacher_dir, tmp_path, monkeypatch):
    folders = tmp_path / 'whole', tmp_path / 'stopped'
    whole, stopped = (
        [*distilled(recipe, 'feature', teacher_dir / 'best.pth', folder), 'run.resume=auto'] for folder in folders
    )
    main(whole)
    stop_in(monkeypatch, 2, main, stopped)
    assert torch.load(folders[1] / 'last.pth', weights_only=True)['updates'] == 2
    state = main(stopped)
    assert state.progress.updates == 6
    assert digest(folders[0] / 'last.pth') == digest(folders[1] / 'last.pth')
    assert losses(folders[0]) == losses(folders[1])


@pytest.mark.parametrize(('kind', 'epochs'), [('feature', 12), ('token_hard', 1)])
def test_a_student_learns_photographs_from_its_teacher_and_is_exported_alone(
    kind, epochs, recipe, teacher_dir, tmp_path, capsys
):
    more = [*PLAIN, f'schedule.epochs={epochs}', 'distill.task_loss_weight=0']
    state = main([*distilled(recipe, kind, teacher_dir / 'export', tmp_path), *more])
    if kind == 'feature':
        # The last loss is 0.03 to 0.04 of the first over six starts; without images, 0.68 or more.
        trained = [row['train_loss'] for row in state.progress.history]
        assert trained[-1] < 0.1 * trained[0]
    assert f'distilled from {teacher_dir / "export"} ({kind})' in capsys.readouterr().out
    last, best = (torch.load(tmp_path / name, weights_only=True) for name in ('last.pth', 'best.pth'))
    assert list(last['task_state']) == (['projection'] if kind == 'feature' else [])
    assert 'task_state' not in best
    student, images = load_model(tmp_path / 'best.pth'), torch.randn(2, 3, 32, 32)
    assert best['state_dict'].keys() == last['state_dict'].keys() == student.state_dict().keys()
    exported = timm.create_model(f'local-dir:{tmp_path / "export"}', pretrained=True).eval()
    torch.testing.assert_close(exported(images), student(images))
    # The teacher is nowhere in what is saved.
    moments = len(last['optimizer']['state'])
    assert moments == len(list(student.parameters())) + 2 * (kind == 'feature')


def test_a_run_goes_on_with_another_teacher_but_not_with_another_projection(recipe, teacher_dir, tmp_path, capsys):
    first, teacher = tmp_path / 'first', teacher_dir / 'best.pth'
    main(distilled(recipe, 'hard', teacher, first))
    again = [*distilled(recipe, 'soft', teacher_dir / 'export', tmp_path / 'again'), f'run.resume={first / "last.pth"}']
    main([*again, 'schedule.epochs=3'])
    assert "now with distill.kind = 'soft', was 'hard'" in capsys.readouterr().out
    other = [*distilled(recipe, 'feature', teacher, tmp_path / 'other'), f'run.resume={first / "last.pth"}']
    with pytest.raises(ValueError, match=r"trains {'projection\.weight': \(16, 32\), .*last\.pth with nothing"):
        main(other)


def load(teacher: Path | str, kind: str = 'hard', names: list[str] | None = None, **arguments: Any) -> nn.Module:
    photographs = sorted(path.name for path in (CLOTHING / 'train').iterdir())
    names = None if kind == 'feature' else photographs if names is None else names
    return load_teacher(str(teacher), arguments.get('teacher_args', {}), names, arguments.get('sizes', [(32, 32)]))


def test_a_teacher_of_timm_has_the_weights_and_the_classes_that_are_there_for_it(teacher_dir):
    expected = load_model(teacher_dir / 'best.pth')
    sizes = dict(depth=1, embed_dim=16, num_heads=8, kernel_size=3, patch_size=8)
    weights = {'file': str(teacher_dir / 'export' / 'model.safetensors'), 'num_classes': 10}
    teacher = load('aft_conv_tiny', teacher_args={**sizes, 'pretrained_cfg_overlay': weights})
    torch.testing.assert_close(teacher.state_dict(), expected.state_dict())
    assert not teacher.training


def test_a_teacher_of_fixed_input_size_is_resized(tmp_path):
    sizes = dict(patch_size=8, img_size=64, depth=1, embed_dim=16, num_heads=1, num_classes=10)
    model = timm.create_model('vit_tiny_patch16_224', **sizes)
    save_model(tmp_path / 'best.pth', 'vit_tiny_patch16_224', model, sizes)
    assert load(tmp_path / 'best.pth', sizes=[(32, 48)]).patch_embed.grid_size == (4, 6)
    with pytest.raises(ValueError, match=r'RGB images of \[\(32, 48\), \(32, 32\)\] pixels, got .*best\.pth'):
        load(tmp_path / 'best.pth', sizes=[(32, 48), (32, 32)])


def test_a_teacher_of_features_may_have_other_classes(teacher_dir):
    assert load(teacher_dir / 'best.pth', kind='feature', names=['a', 'b']).num_classes == 10
    with pytest.raises(ValueError, match=r'best\.pth: expected the classes of the model in the data set, got a, b'):
        load(teacher_dir / 'best.pth', names=['a', 'b'])


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (
            dict(names=[f'b{i}' for i in range(10)]),
            r'classes of the model in the data set, got b0, b1, .*, where the model has dress',
        ),
        (dict(sizes=[(36, 36)]), r'of \[\(36, 36\)\] pixels, got .*best\.pth: .*multiples of the patch size'),
        (dict(teacher_args={'depth': 2}), r"to be empty for the checkpoint .*, got {'depth': 2}"),
    ],
)
def test_a_teacher_that_does_not_fit_is_rejected(teacher_dir, options, message):
    with pytest.raises(ValueError, match=message):
        load(teacher_dir / 'best.pth', **options)


def test_a_teacher_without_weights_is_rejected(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r'^distill\.teacher: .* aft_conv_tiny with .*: No pretrained weights'):
        load('aft_conv_tiny')
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    with pytest.raises(ValueError, match=r'distill\.teacher: expected the weights of resnet10t from'):
        load('resnet10t', teacher_args={'cache_dir': str(tmp_path)})


def test_a_teacher_that_does_not_exist_is_rejected_with_the_nearest_name_before_a_folder_is_made(recipe, tmp_path):
    with pytest.raises(ValueError, match=r"got 'regnety_16', which does not exist; did you mean regnety_160"):
        load('regnety_16')
    with pytest.raises(ValueError, match=r"got '.*/none\.pth', which does not exist"):
        main(distilled(recipe, 'hard', tmp_path / 'none.pth', tmp_path / 'run'))
    assert not (tmp_path / 'run').exists()
    (tmp_path / 'half.pth').write_bytes(b'half')
    with pytest.raises(ValueError, match=r'half\.pth, which is damaged'):
        load(tmp_path / 'half.pth')


@pytest.mark.parametrize(
    ('overrides', 'message'),
    [
        (['distill.teacher=x', 'distill.teacher_args.num_classes=10'], r"without num_classes, .*'num_classes': 10"),
        (['distill.kind=soft'], r"distill\.kind to be hard without distill\.teacher, got 'soft'"),
        (['distill.temperature=3'], r'distill\.temperature to be 1\.0 for the kind hard, which has none, got 3'),
        (['distill.teacher=x', 'distill.task_loss_weight=2'], r'task_loss_weight to be at most 1 without .*, got 2'),
    ],
)
def test_a_wrong_value_is_rejected_with_its_key(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config(ROOT / 'configs' / 'smoke' / 'deit_recipe.yaml', overrides)
