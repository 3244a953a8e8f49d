import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
from helpers import save_model

from aft_vision.export import export_model
from aft_vision.models.checkpoint import load_model
from train.build import resolve_images
from train.config import load_config, save_config
from train.convert_schema import ConvertConfig
from train.fastformer.schema import TextConfig
from train.fastformer.tasks import TASKS
from train.model_section import check_decoder, check_model
from train.schema import Config
from train.sequence_schema import CharConfig, PixelConfig, RecallConfig

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


def test_a_name_is_a_config_of_the_package_unless_a_file_has_it(tmp_path, monkeypatch):
    assert load_config('finetune').model['name'] == 'aft_pyramid_pico'
    assert load_config('imagenet/aft_conv_small_k11_h384').schedule.epochs == 300
    (tmp_path / 'own.yaml').write_text('base: finetune\nschedule: {epochs: 7}\n')
    found = load_config(tmp_path / 'own.yaml')
    assert (found.schedule.epochs, found.optim.layer_decay) == (7, 0.75)
    monkeypatch.chdir(tmp_path)
    # A folder of photographs.
    (tmp_path / 'finetune').mkdir()
    assert load_config('finetune').schedule.epochs == 10
    (tmp_path / 'finetune').rmdir()
    (tmp_path / 'finetune').write_text('model: {name: aft_conv_tiny}\n')
    assert load_config('finetune').model['name'] == 'aft_conv_tiny'


@pytest.mark.parametrize(
    ('given', 'meant'),
    [
        ('finetun', 'finetune'),
        ('configs/imagenet/deit_300e.yaml', 'imagenet/deit_300e'),
        ('deit_300', 'imagenet/deit_300e'),
        ('aft_conv_small_k11_h384.yml', 'imagenet/aft_conv_small_k11_h384'),
    ],
)
def test_a_config_that_is_none_is_an_error_with_the_nearest_of_the_package(given, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match='expected a YAML file, or the name of a config of the package') as raised:
        load_config(given)
    assert str(raised.value).endswith(f'; did you mean {meant}?')


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


def test_blocks_of_attention_are_a_list(tmp_path):
    (tmp_path / 'file.yaml').write_text('model: {name: aft_axial_tiny, window_size: [3, 5]}\n')
    config = load_config(tmp_path / 'file.yaml', ['model.attention_blocks=[10,11]', 'model.local_conv=true'])
    expected = {'name': 'aft_axial_tiny', 'window_size': [3, 5], 'attention_blocks': [10, 11], 'local_conv': True}
    assert config.model == expected


def test_null_is_the_default_of_an_argument_that_the_model_cannot_have_as_none():
    assert check_model({'name': 'aft_pyramid_nano', 'depths': None}) == {'name': 'aft_pyramid_nano'}
    # A mixer without a window takes null, which is not the default.
    decoder = {'name': 'aft_local_pixel', 'mixer': 'full', 'window': None}
    assert check_decoder(decoder | {'depth': None, 'dropout': None}) == decoder
    text = {'hidden_size': None, 'causal': None, 'initializer_range': None}
    assert TextConfig(model=text).check_model() == {'initializer_range': None}


def test_the_resolved_file_gives_the_same_experiment(tmp_path, vit_file):
    config = load_config(vit_file, ['augment.scale=[0.5,1]', 'model.depth=2', 'augment.auto_augment=null'])
    save_config(dataclasses.asdict(config), tmp_path / 'resolved.yaml')
    assert load_config(tmp_path / 'resolved.yaml') == config


def test_the_resolved_file_neither_overwrites_nor_continues_a_run(tmp_path, vit_file):
    run = ['run.overwrite=true', 'run.resume=auto']
    save_config(dataclasses.asdict(load_config(vit_file, run)), tmp_path / 'resolved.yaml')
    assert load_config(tmp_path / 'resolved.yaml') == load_config(vit_file, ['run.overwrite=false', 'run.resume=null'])
    # The start of a run from another one is part of it; that from its own folder is not.
    other = tmp_path / 'first'
    other.mkdir()
    own = (str(tmp_path), str(tmp_path / 'last.pth'))
    for where, kept in ((str(other), str(other)), *((place, None) for place in own)):
        save_config(dataclasses.asdict(load_config(vit_file, [f'run.resume={where}'])), tmp_path / 'resolved.yaml')
        assert load_config(tmp_path / 'resolved.yaml').run.resume == kept


def test_null_keeps_the_size_and_the_crop_of_the_model_unless_a_later_layer_sets_them(tmp_path):
    (tmp_path / 'own.yaml').write_text('model: {name: aft_conv_nano}\ndata: {img_size: null, crop_pct: null}\n')

    def read(*overrides: str) -> tuple[tuple[int, int], float]:
        data = load_config(tmp_path / 'own.yaml', overrides).data
        return data.img_size, data.crop_pct

    assert read() == ((96, 96), 1.0)
    assert read('model.name=vit_base_patch16_siglip_384') == ((384, 384), 0.9)
    assert read('model.pretrained_cfg_overlay.input_size=[3,64,80]') == ((64, 80), 1.0)
    assert read('data.img_size=64', 'data.crop_pct=0.5') == ((64, 64), 0.5)
    assert read('data.img_size=64', 'data.img_size=null') == ((96, 96), 1.0)


@pytest.mark.parametrize('source', ['checkpoint', 'export', 'name'])
def test_null_keeps_the_size_and_the_crop_of_the_initial_weights_without_building_their_model(
    tmp_path, monkeypatch, source
):
    model, preprocessing = timm.create_model('aft_conv_nano', depth=1), {'input_size': (3, 48, 64), 'crop_pct': 0.75}
    start: Path | str = save_model(
        tmp_path / 'start.pth', 'aft_conv_nano', model, {'depth': 1}, data_config=preprocessing
    )
    if source == 'export':
        start = tmp_path / 'export'
        export_model(load_model(tmp_path / 'start.pth'), start, [str(label) for label in range(10)])
    if source == 'name':
        start, preprocessing = 'vit_base_patch16_siglip_384', {'input_size': (3, 384, 384), 'crop_pct': 0.9}
    (tmp_path / 'own.yaml').write_text('model: {name: aft_conv_tiny}\ndata: {img_size: null, crop_pct: null}\n')
    monkeypatch.setattr(timm, 'create_model', None)
    data = load_config(tmp_path / 'own.yaml', [f'run.init_from={start}']).data
    assert (data.img_size, data.crop_pct) == (preprocessing['input_size'][1:], preprocessing['crop_pct'])
    with pytest.raises(ValueError, match=r'absent\.pth, which does not exist'):
        load_config(tmp_path / 'own.yaml', ['run.init_from=absent.pth'])


def test_a_loaded_experiment_cannot_be_changed(vit_file):
    config = load_config(vit_file)
    assert isinstance(config, Config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optim.lr = 1.0


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('optim.lrr=3', r"optim\.lrr = 3: Key 'lrr' not in 'OptimConfig'\. Did you mean: 'lr'"),
        ('shedule.epochs=3', r"^command line: shedule\.epochs = 3: Key .* Did you mean: 'schedule'"),
        ('data.img_size=[1,2,3]', r'data\.img_size = \[1, 2, 3\]: .*length 3'),
        ('data.dir=null', r"data\.dir = None: Incompatible value 'None'"),
        ('model=3', r'^command line: model = 3: '),
        ('model.name=null', r'expected model\.name, .* got None'),
        ('model.name=vit_tny_patch16_224', r'did you mean vit_tiny_patch16_224'),
        ('schedule.warmup_epochs=300', r'schedule\.warmup_epochs to be below schedule\.epochs, which is 300, got 300'),
        ('optim.name=adamww', r"optim\.name = 'adamww' is not an optimizer; did you mean adamw"),
        ('optim.accumulate=3', r'an even multiple of optim\.accumulate \(3\) times .* \(1\), got 64; set .*=66'),
        ('augment.auto_augment=foo', r"auto_augment must be a policy of timm, .* got 'foo'"),
        ('schedule.min_lr=1', r'schedule\.min_lr to be at most the peak rate 6\.25e-05, .*, got 1'),
        ('run.reset_head=true', r'run\.reset_head to be false without run\.init_from or model\.pretrained, got True'),
        ('data.max_tokens=63', r'data\.max_tokens to be at least one for each of the 64 images of a batch, got 63'),
        ('model.name=aft_pyramid_nano model.embed_dim=64', r"model\.embed_dim = 64: Key 'embed_dim' not in 'Model'"),
        ('optim.lr', r"expected an override like section\.key=value, got 'optim\.lr'"),
        ('optim.lr.x=1', r"command line: optim\.lr = \{'x': 1\}: "),
        ('foo={}', r"foo = \{\}: Key 'foo' not in 'Config'"),
        ('optim.lr="', r'expected a YAML value after ='),
    ],
)
def test_a_wrong_override_is_rejected_with_key_and_value(vit_file, override, message):
    with pytest.raises(ValueError, match=message):
        load_config(vit_file, override.split())


def test_a_compiled_run_has_at_most_eight_training_sizes(tmp_path):
    path, sizes = tmp_path / 'conv.yaml', [16 * side for side in range(2, 11)]
    path.write_text('model: {name: aft_conv_tiny}\n')
    load_config(path, [f'data.train_sizes={sizes[1:]}', 'run.compile=true'])
    with pytest.raises(ValueError, match=r'data\.train_sizes to be at most 8 sizes with run\.compile=true'):
        load_config(path, [f'data.train_sizes={sizes}', 'run.compile=true'])


@pytest.mark.parametrize(
    ('overrides', 'message'),
    [
        (['data.train_sizes=[32,64]'], r'data\.train_sizes to be null with data\.max_tokens, .*, got \[32, 64\]'),
        (['distill.teacher=resnet18'], r"distill\.teacher to be null with data\.max_tokens, got 'resnet18'"),
        (['model.name=aft_full_tiny'], r'data\.max_tokens: .* create it with dynamic_img_size=True'),
        (['model.name=aft_pyramid_nano'], r'data\.max_tokens: .*, got AFTPyramid, which takes sizes in pixels'),
        (
            ['model.name=test_vit'],
            r'data\.max_tokens: expected .* aft_\* .* or a naflexvit_\*.*, got VisionTransformer,',
        ),
    ],
)
def test_what_images_of_native_shapes_cannot_have_is_rejected(tmp_path, overrides, message):
    path = tmp_path / 'conv.yaml'
    path.write_text('model: {name: aft_conv_tiny}\ndata: {max_tokens: 12544}\n')
    with pytest.raises(ValueError, match=message):
        resolve_images(load_config(path, overrides))


@pytest.mark.parametrize(
    'model', ['{name: aft_full_tiny, dynamic_img_size: true}', '{name: naflexvit_base_patch16_gap, depth: 1}']
)
def test_models_of_native_shapes_are_accepted(tmp_path, model):
    (tmp_path / 'native.yaml').write_text(f'model: {model}\ndata: {{max_tokens: 12600}}\n')
    config = load_config(tmp_path / 'native.yaml')
    assert resolve_images(config).training.max_tokens == 196


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ('a: [', 'expected valid YAML'),
        ('3', 'expected valid YAML'),
        ('run: {dir: "${nothing}"}\n', r"file\.yaml: run\.dir: Interpolation key 'nothing' not found"),
        ('base: 3\n', 'expected base in .* to be the name of a file, got 3'),
        ('- 1\n', 'got a list'),
        ('# model: {name: aft_conv_tiny}\n', r'in .*file\.yaml, with sections of keys, got an empty file'),
        ('base: file.yaml\n', 'which builds on itself'),
        ('base: none.yaml\n', r'none\.yaml, which does not exist'),
        ('optim: {momentun: 0.9}\n', r'file\.yaml: optim\.momentun = 0\.9: Key .*; --keys lists the keys'),
        ('base: base.yaml\n', r'base\.yaml: expected schedule\.epochs to be at least 1, got 0'),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path, content, message):
    (tmp_path / 'base.yaml').write_text('schedule: {epochs: 0}\n')
    (tmp_path / 'file.yaml').write_text(content)
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path / 'file.yaml')


@pytest.mark.parametrize('key', ['kernel_size', 'query_gate', 'depth', 'drop_path_rate', 'patch_size', 'img_size'])
def test_arguments_of_the_class_and_of_timms_vision_transformer_are_known(key):
    value = {'query_gate': False, 'drop_path_rate': 0.1, 'img_size': [32, 64]}.get(key, 3)
    assert check_model({**AFT, key: value}) == {**AFT, key: value}


@pytest.mark.parametrize(
    ('key', 'value', 'message'),
    [
        ('kernel_sise', 11, r"^model\.kernel_sise = 11: Key .* Did you mean: 'kernel_size'"),
        ('depth', 'deep', r"^model\.depth = 'deep': .*could not be converted to Integer"),
        ('pretrained_cfg_overlay', 3, r'^expected model\.pretrained_cfg_overlay to be keys such as .*, got 3'),
        *((key, 3, f'{key} = 3 is not for an experiment') for key in ('num_classes', 'in_chans', 'device', 'dtype')),
    ],
)
def test_a_wrong_model_argument_is_rejected(key, value, message):
    with pytest.raises(ValueError, match=message):
        check_model({**AFT, key: value})


def test_parts_of_a_batch_must_be_even_to_be_mixed(vit_file):
    parts = ['data.batch_size=60', 'optim.accumulate=4']
    with pytest.raises(ValueError, match=r'an even multiple of optim\.accumulate \(4\) times'):
        load_config(vit_file, parts)
    config = load_config(vit_file, [*parts, 'augment.mixup=0', 'augment.cutmix=0'])
    assert config.check_batch_size(world_size=1) == 15
    assert config.check_batch_size(world_size=3) == 5
    with pytest.raises(ValueError, match=r'\(4\) times the number of processes \(2\), got 60'):
        config.check_batch_size(world_size=2)


def test_arguments_of_the_optimizer_may_be_given_one_by_one(vit_file):
    config = load_config(vit_file, ['optim.args.eps=1e-6', 'optim.args.betas=[0.9,0.95]'])
    assert config.optim.args == {'eps': 1e-6, 'betas': [0.9, 0.95]}


def test_where_the_first_weights_come_from_is_no_mistake():
    model = {**AFT, 'pretrained': True, 'pretrained_cfg_overlay': {'file': 'deit.pth'}}
    assert check_model(model) == model


@pytest.mark.parametrize(
    ('override', 'source'),
    [
        ('model.kernel_size=-1', 'command line: expected model.kernel_size'),
        ('model.name=aft_conv_tinyy', "command line: model.name = 'aft_conv_tinyy'"),
        ('augment.hflip=2', 'command line: expected augment.hflip'),
        ('optim.accumulate=3', 'command line: expected data.batch_size'),
        ('run.seed=3', 'FILE: expected optim.weight_decay'),
    ],
)
def test_an_error_names_what_gave_the_value(tmp_path, override, source):
    (tmp_path / 'base.yaml').write_text('model: {name: aft_conv_tiny, kernel_size: 3}\ndata: {batch_size: 64}\n')
    file = tmp_path / 'file.yaml'
    file.write_text('base: base.yaml\n' + ('optim: {weight_decay: -1}\n' if override == 'run.seed=3' else ''))
    with pytest.raises(ValueError, match='^' + re.escape(source.replace('FILE', str(file)))):
        load_config(file, [override])


def test_a_warm_up_is_shortened_for_a_run_of_few_epochs_and_it_is_said(vit_file, capsys):
    assert [load_config(vit_file, [f'schedule.epochs={n}']).schedule.warmup_epochs for n in (1, 5, 6)] == [0, 1, 5]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == 'note: schedule.warmup_epochs = 0 in place of 5, to be below schedule.epochs = 1'
    assert len(said) == 2
    with pytest.raises(ValueError, match=r'^command line: expected schedule\.warmup_epochs to be below'):
        load_config(vit_file, ['schedule.epochs=3', 'schedule.warmup_epochs=3'])


def test_least_rates_keep_their_proportion_to_a_lower_peak(tmp_path, capsys):
    file = tmp_path / 'file.yaml'
    file.write_text(
        VIT + 'data: {batch_size: 512}\noptim: {lr: 1.0e-3}\nschedule: {min_lr: 1.0e-3, warmup_lr: 1.0e-4}\n'
    )
    config = load_config(file, ['optim.lr=1e-5'])
    # A constant rate stays one.
    assert (config.schedule.min_lr, config.schedule.warmup_lr) == pytest.approx((1e-5, 1e-6))
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert load_config(file, ['data.batch_size=2']).schedule.min_lr == pytest.approx(1e-3 * 2 / 512, rel=1e-2)
    with pytest.raises(ValueError, match=r'^command line: expected schedule\.min_lr to be at most'):
        load_config(file, ['optim.lr=1e-5', 'schedule.min_lr=1'])


def test_least_rates_keep_their_proportion_to_values_in_quotes_and_of_other_keys(tmp_path):
    file = tmp_path / 'file.yaml'
    data = 'data: {batch_size: "${optim.accumulate}"}\n'
    data += 'augment: {mix_prob: 0}\n'
    file.write_text(VIT + data + 'optim: {lr: "1.0e-3", accumulate: 512}\nschedule: {min_lr: 1.0e-3}\n')
    assert load_config(file, ['optim.lr=1e-5']).schedule.min_lr == pytest.approx(1e-5)


def test_one_number_is_both_sides_of_an_image(vit_file):
    data = load_config(vit_file, ['data.img_size=32', 'data.eval_img_size=64']).data
    assert (data.img_size, data.eval_img_size) == ((32, 32), (64, 64))


def test_another_image_size_takes_the_place_of_several(tmp_path, capsys):
    file = tmp_path / 'file.yaml'
    file.write_text(VIT + 'data: {train_sizes: [32, 48], train_size_schedule: progressive}\n')
    assert load_config(file).data.train_sizes == [32, 48]
    data = load_config(file, ['data.img_size=64']).data
    assert (data.train_sizes, data.train_size_schedule, data.img_size) == (None, 'constant', (64, 64))
    assert 'note: data.train_sizes = null in place of [32, 48]' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['resnet10t', 'deit_tiny_patch16_224', 'aft_conv_small'])
def test_another_name_on_the_command_line_is_the_model_of_that_name(tmp_path, capsys, name):
    (tmp_path / 'base.yaml').write_text('model: {name: aft_conv_tiny, drop_path_rate: 0.1, embed_dim: 64}\n')
    file = tmp_path / 'file.yaml'
    file.write_text('base: base.yaml\nmodel: {kernel_size: 3}\n')
    assert load_config(file, [f'model.name={name}']).model == {'name': name, 'drop_path_rate': 0.1}
    (note,) = capsys.readouterr().err.splitlines()
    assert f'model.embed_dim of {tmp_path / "base.yaml"} and model.kernel_size of {file} left out: {name} is' in note
    typed = load_config(file, ['model.embed_dim=64', f'model.name={name}']) if name != 'resnet10t' else None
    assert typed is None or typed.model == {'name': name, 'drop_path_rate': 0.1, 'embed_dim': 64}
    with pytest.raises(ValueError, match=r'^command line: model: .*resnet10t with .*num_heads=3: '):
        load_config(file, ['model.name=resnet10t', 'model.num_heads=3'])


def test_a_file_without_a_name_is_about_the_default_model(tmp_path, capsys):
    file = tmp_path / 'file.yaml'
    file.write_text('model: {depth: 4}\n')
    assert load_config(file, ['model.name=aft_conv_tiny']).model == {'name': 'aft_conv_tiny', 'depth': 4}
    assert load_config(file, ['model.name=aft_conv_small']).model == {'name': 'aft_conv_small'}
    assert f'model.depth of {file} left out: aft_conv_small is another model' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['aft_conv_tiny', 'aft_conv_nano.imagenette'])
def test_the_same_name_on_the_command_line_keeps_the_arguments_of_the_file(tmp_path, capsys, name):
    file = tmp_path / 'file.yaml'
    file.write_text(f'model: {{name: {name.partition(".")[0]}, depth: 2, embed_dim: 64}}\n')
    assert load_config(file, [f'model.name={name}']).model == {'name': name, 'depth': 2, 'embed_dim': 64}
    assert not capsys.readouterr().err


def test_a_file_with_another_name_than_its_base_is_about_the_model_of_that_name(tmp_path, capsys):
    (tmp_path / 'base.yaml').write_text('model: {name: aft_conv_tiny, depth: 2, kernel_size: 3, drop_path_rate: 0.1}\n')
    file = tmp_path / 'file.yaml'
    file.write_text('base: base.yaml\nmodel: {name: deit_tiny_patch16_224, embed_dim: 96}\n')
    expected = {'name': 'deit_tiny_patch16_224', 'embed_dim': 96, 'drop_path_rate': 0.1}
    assert load_config(file).model == expected
    note = (
        f'model.depth, model.kernel_size of {tmp_path / "base.yaml"} left out: deit_tiny_patch16_224 is another model'
    )
    assert note in capsys.readouterr().err


def test_arguments_of_another_mixer_are_left_out(tmp_path):
    file = tmp_path / 'file.yaml'
    file.write_text('model: {name: aft_local_char, mixer: full, depth: 2, dim: 30, window: null, bias_dim: 8}\n')
    config = load_config(file, ['model.name=transformer_char'], CharConfig)
    # The name says no size.
    assert config.model == {'name': 'transformer_char', 'depth': 2, 'dim': 30}
    file.write_text('model: {name: aft_local_char, mixer_args: {window: 4, bias_dim: 4}}\n')
    (tmp_path / 'child.yaml').write_text('base: file.yaml\nmodel: {name: aft_simple_char}\n')
    assert load_config(tmp_path / 'child.yaml', [], CharConfig).model == {'name': 'aft_simple_char'}


def numeric_fields() -> Iterator[tuple[type, str, dataclasses.Field]]:
    """Every section of every experiment, its name and each of its fields that holds numbers."""
    for schema in (ConvertConfig, PixelConfig, CharConfig, RecallConfig, *(task.schema for task in TASKS.values())):
        for section in dataclasses.fields(schema):
            if dataclasses.is_dataclass(section.type):
                for each in dataclasses.fields(section.type):
                    hint = re.findall(r'\w+', str(getattr(each.type, '__name__', each.type)) + str(each.type))
                    if {'int', 'float'} & set(hint):
                        yield section.type, section.name, each


def test_every_number_of_an_experiment_has_a_range_without_nan_and_infinity():
    found = 0
    for _, section, each in numeric_fields():
        assert 'range' in each.metadata, f'{section}.{each.name}'
        for value in (math.nan, math.inf, -math.inf):
            assert value not in each.metadata['range'], f'{section}.{each.name}'
        found += 1
    assert found > 150


def distinct_numeric_fields() -> list[tuple[type, str, dataclasses.Field]]:
    return list({(cls, each.name): (cls, section, each) for cls, section, each in numeric_fields()}.values())


def is_several(field: dataclasses.Field) -> bool:
    return 'tuple' in str(field.type) or 'list' in str(field.type)


@pytest.mark.parametrize(
    ('cls', 'section', 'each'),
    [pytest.param(*found, id=f'{found[0].__name__}.{found[2].name}') for found in distinct_numeric_fields()],
)
def test_a_number_out_of_its_range_is_refused_with_its_range(cls, section, each):
    allowed = each.metadata['range']
    low, high = map(float, allowed.text[1:-1].split(','))
    outside = [end for end in (low - 1, low, high, high + 1) if math.isfinite(end) and end not in allowed]
    for value in outside or [math.inf]:
        given = (value, value) if is_several(each) else value
        with pytest.raises(ValueError, match=re.escape(f'expected {section}.{each.name} to be {allowed}')):
            cls(**{each.name: given})


@pytest.mark.parametrize(
    ('key', 'values'),
    {
        'drop_path_rate': [-1, math.nan, 1],
        'drop_rate': [math.inf],
        'embed_dim': [0, -8],
        'depth': [-1, 0],
        'patch_size': [0, [8, 0]],
        'num_heads': [0],
        'mlp_ratio': [-1, math.nan],
        'init_values': [math.nan],
        'tau': [0],
        'reg_tokens': [-1],
        'img_size': [[32, -32]],
        'kernel_size': [-3],
    }.items(),
)
def test_a_number_that_no_model_can_have_is_refused(key, values):
    for value in values:
        with pytest.raises(ValueError, match=rf'expected model\.{key} to be '):
            check_model({**AFT, key: value})


def test_a_number_that_no_model_can_have_is_refused_of_other_models_too():
    with pytest.raises(ValueError, match=r'expected model\.drop_path_rate to be'):
        check_model({'name': 'resnet10t', 'drop_path_rate': -1})
    with pytest.raises(ValueError, match=r'expected model\.dropout to be'):
        check_decoder({'name': 'aft_simple_char', 'dropout': math.nan})
