import dataclasses
from pathlib import Path

import pytest

from train.config import load_config, save_config
from train.model_section import check_model
from train.schema import Config

AFT = {'name': 'aft_conv_tiny'}
VIT = 'model: {name: vit_tiny_patch16_224}\n'


@pytest.fixture
def vit_file(tmp_path: Path) -> Path:
    path = tmp_path / 'vit.yaml'
    path.write_text(VIT)
    return path


def test_overrides_win_over_the_file_and_the_file_over_its_base(tmp_path):
    (tmp_path / 'deep.yaml').write_text('optim: {lr: 1.0, weight_decay: 1.0, accumulate: 2}\n')
    (tmp_path / 'base.yaml').write_text('base: deep.yaml\noptim: {lr: 2.0, weight_decay: 2.0}\n')
    (tmp_path / 'file.yaml').write_text(VIT + 'base: base.yaml\noptim: {lr: 3.0}\n')
    optim = load_config(tmp_path / 'file.yaml', ['optim.clip_grad=4']).optim
    assert (optim.accumulate, optim.weight_decay, optim.lr, optim.clip_grad) == (2, 2.0, 3.0, 4.0)


def test_a_base_in_another_folder_is_relative_to_the_file(tmp_path):
    (tmp_path / 'deep').mkdir()
    (tmp_path / 'base.yaml').write_text('run: {seed: 7}\n')
    (tmp_path / 'deep' / 'file.yaml').write_text(VIT + 'base: ../base.yaml\n')
    assert load_config(tmp_path / 'deep' / 'file.yaml').run.seed == 7


def test_model_arguments_of_base_and_file_are_joined(tmp_path):
    (tmp_path / 'base.yaml').write_text('model: {name: vit_tiny_patch16_224, depth: 3}\n')
    (tmp_path / 'file.yaml').write_text('base: base.yaml\nmodel: {embed_dim: 48}\n')
    expected = {'name': 'vit_tiny_patch16_224', 'depth': 3, 'embed_dim': 48}
    assert load_config(tmp_path / 'file.yaml').model == expected


def test_the_resolved_file_gives_the_same_experiment(tmp_path, vit_file):
    config = load_config(vit_file, ['augment.scale=[0.5,1]', 'model.depth=2', 'augment.auto_augment=null'])
    save_config(config, tmp_path / 'resolved.yaml')
    assert load_config(tmp_path / 'resolved.yaml') == config


def test_a_loaded_experiment_cannot_be_changed(vit_file):
    config = load_config(vit_file)
    assert isinstance(config, Config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optim.lr = 1.0


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('optim.lrr=3', r'optim\.lrr = 3 is not a key; the nearest is optim\.lr$'),
        ('shedule.epochs=3', r'command line: shedule\.epochs = 3 is not a key; the nearest is schedule\.epochs$'),
        ('optim.lr=fast', r"optim\.lr = 'fast': .*could not be converted to Float"),
        ('data.batch_size=1.5', r'data\.batch_size = 1\.5: '),
        ('data.img_size=[1,2,3]', r'data\.img_size = \[1, 2, 3\]: .*length 3'),
        ('data.dir=null', r"data\.dir = None: Incompatible value 'None'"),
        ('run.amp=float8', r"run\.amp = 'float8': .*expected one of \['none', 'bfloat16', 'float16'\]"),
        ('data=3', r'expected data to be a section of keys, got 3'),
        ('model=3', r'expected model to be a section of keys, got 3'),
        ('model.name=null', r'expected model\.name, .* got None'),
        ('model.name=vit_tny_patch16_224', r'the nearest is vit_tiny_patch16_224'),
        ('optim.lr=-1', r'expected optim\.lr to be in \(0, 1e4\], got -1'),
        ('optim.clip_grad=0', r'expected optim\.clip_grad to be above 0, or null, got 0'),
        ('optim.label_smoothing=1', r'expected optim\.label_smoothing to be in \[0, 1\), got 1'),
        ('schedule.epochs=0', r'expected schedule\.epochs to be at least 1, got 0'),
        ('schedule.warmup_epochs=300', r'schedule\.warmup_epochs to be below schedule\.epochs, which is 300, got 300'),
        ('augment.scale=[2,3]', r'expected augment\.scale to be in \(0, 1\], got \(2\.0, 3\.0\)'),
        ('run.eval_every=0', r'expected run\.eval_every to be at least 1, got 0'),
        ('run.cpu_threads=0', r'expected run\.cpu_threads to be in \[1, 4096\], or null, got 0'),
        ('optim.weight_decay=-1', r'expected optim\.weight_decay to be in \[0, 1e4\], got -1'),
        ('optim.layer_decay=0', r'expected optim\.layer_decay to be in \(0, 1\], or null, got 0'),
        ('optim.name=adamww', r"optim\.name = 'adamww' is not an optimizer; the nearest is adamw"),
        ('optim.accumulate=0', r'expected optim\.accumulate to be at least 1, got 0'),
        ('optim.accumulate=3', r'data\.batch_size to be a multiple of optim\.accumulate \(3\) times .* \(1\), got 64'),
        ('data.batch_size=0', r'expected data\.batch_size to be at least 1, got 0'),
        ('data.batch_size=63', r'to be an even multiple of .*mixup and augment\.cutmix .*, got 63'),
        ('data.on_corrupt_image=ignore', r"on_corrupt_image = 'ignore': .*expected one of \['raise', 'skip'\]"),
        ('ema.decay=1', r'expected ema\.decay to be in \(0, 1\), or null, got 1'),
        ('schedule.step=batch', r"schedule\.step = 'batch': .*expected one of \['epoch', 'update', 'deit'\]"),
        ('schedule.min_lr=-1', r'expected schedule\.min_lr to be in \[0, 1e4\], got -1'),
        ('schedule.warmup_lr=-1', r'expected schedule\.warmup_lr to be in \[0, 1e4\], got -1'),
        ('augment.mixupp=1', r'augment\.mixupp = 1 is not a key; the nearest is augment\.mixup$'),
        ('run.keep=0', r'expected run\.keep to be in \[1, 100\], got 0'),
        ('run.save_minutes=0', r'expected run\.save_minutes to be above 0, or null, got 0'),
        ('run.seed=-1', r'expected run\.seed to be in \[0, 4294967296\), got -1'),
        ('data.eval_batch_size=0', r'expected data\.eval_batch_size to be at least 1, .*, got 0'),
        ('data.img_size=[-32,32]', r'expected data\.img_size to be in \[1, 65536\], got \(-32, 32\)'),
        ('data.num_workers=-1', r'expected data\.num_workers to be in \[0, 1024\], got -1'),
        ('data.crop_pct=1.5', r'expected data\.crop_pct to be in \(0, 1\], got 1\.5'),
        ('augment.auto_augment=foo', r"auto_augment must be a policy of timm, .* got 'foo'"),
        ('schedule.min_lr=1', r'schedule\.min_lr to be at most the peak rate 6\.25e-05, .*, got 1'),
        ('regularize.kernel_entropy=-1', r'expected regularize\.kernel_entropy to be at least 0, got -1'),
        ('regularize.kernel_entropy=inf', r'expected regularize\.kernel_entropy to be at least 0 and finite, got inf'),
        ('regularize.tau_end=0', r'expected regularize\.tau_end to be above 0, or null, got 0'),
        ('regularize.entropy=1', r'regularize\.entropy = 1 is not a key; the nearest is regularize\.kernel_entropy'),
        ('ema.warmup=true', r'expected ema\.warmup to be false without ema\.decay, got True'),
        ('model.kernel_sise=3', r'model\.kernel_sise = 3 is not a key; the nearest is model\.'),
        ('model.num_classes=5', r'model\.num_classes = 5 is not for an experiment: the data set decides'),
        ('model.in_chans=1', r'model\.in_chans = 1 is not for an experiment: images have three channels'),
        ('run.reset_head=true', r'expected run\.reset_head to be false without run\.init_from, got True'),
        ('optim.lr', r"expected an override like section\.key=value, got 'optim\.lr'"),
        ('optim.lr="', r'expected a YAML value after ='),
    ],
)
def test_a_wrong_override_is_rejected_with_key_and_value(vit_file, override, message):
    with pytest.raises(ValueError, match=message):
        load_config(vit_file, [override])


def test_an_unknown_key_of_a_file_names_the_file(tmp_path):
    (tmp_path / 'file.yaml').write_text('optim: {momentun: 0.9}\n')
    with pytest.raises(ValueError, match=r'file\.yaml: optim\.momentun = 0\.9 is not a key; the nearest is optim\.'):
        load_config(tmp_path / 'file.yaml')


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ('a: [', 'expected valid YAML'),
        ('3', 'expected valid YAML'),
        ('run: {dir: "${nothing}"}\n', r"file\.yaml: run\.dir: Interpolation key 'nothing' not found"),
        ('base: 3\n', 'expected base in .* to be the name of a file, got 3'),
        ('- 1\n', 'got a list'),
        ('base: file.yaml\n', 'which builds on itself'),
        ('base: none.yaml\n', r'none\.yaml, which does not exist'),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, message):
    (tmp_path / 'file.yaml').write_text(content)
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path / 'file.yaml')


@pytest.mark.parametrize('key', ['kernel_size', 'query_gate', 'depth', 'drop_path_rate', 'patch_size', 'img_size'])
def test_arguments_of_the_class_and_of_timms_vision_transformer_are_known(key):
    value = {'query_gate': False, 'drop_path_rate': 0.1, 'img_size': [32, 64]}.get(key, 3)
    assert check_model({**AFT, key: value}) == {**AFT, key: value}


def test_a_misspelt_model_argument_names_the_nearest():
    with pytest.raises(ValueError, match=r'^model\.kernel_sise = 11 is not a key; the nearest is model\.kernel_size'):
        check_model({**AFT, 'kernel_sise': 11})


def test_a_model_argument_of_the_wrong_type_is_rejected():
    with pytest.raises(ValueError, match=r"^model\.depth = 'deep': .*could not be converted to Integer"):
        check_model({**AFT, 'depth': 'deep'})


@pytest.mark.parametrize('key', ['num_classes', 'in_chans', 'device', 'dtype'])
def test_a_model_argument_that_the_trainer_decides_is_rejected(key):
    with pytest.raises(ValueError, match=rf'model\.{key} = 3 is not for an experiment'):
        check_model({**AFT, key: 3})


def test_parts_of_a_batch_must_be_even_to_be_mixed(vit_file):
    parts = ['data.batch_size=60', 'optim.accumulate=4']
    with pytest.raises(ValueError, match=r'an even multiple of optim\.accumulate \(4\) times'):
        load_config(vit_file, parts)
    config = load_config(vit_file, [*parts, 'augment.mixup=0', 'augment.cutmix=0'])
    assert config.check_parts(world_size=1) == 15
    assert config.check_parts(world_size=3) == 5
    with pytest.raises(ValueError, match=r'\(4\) times the number of processes \(2\), got 60'):
        config.check_parts(world_size=2)


def test_arguments_of_the_optimizer_may_be_given_one_by_one(vit_file):
    config = load_config(vit_file, ['optim.args.eps=1e-6', 'optim.args.betas=[0.9,0.95]'])
    assert config.optim.args == {'eps': 1e-6, 'betas': [0.9, 0.95]}


def test_where_the_first_weights_come_from_is_no_mistake():
    model = {**AFT, 'pretrained': True, 'pretrained_cfg_overlay': {'file': 'deit.pth'}}
    assert check_model(model) == model


def test_a_binary_file_is_named(tmp_path):
    (tmp_path / 'file.yaml').write_bytes(bytes(range(128, 256)))
    with pytest.raises(ValueError, match=r'expected valid YAML in .*file\.yaml'):
        load_config(tmp_path / 'file.yaml')
