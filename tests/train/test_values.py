from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from train.config import load_config, save_config
from train.config_layers import command_line_text
from train.convert_schema import ConvertConfig
from train.fastformer.tasks import load_text_config
from train.schema import Config
from train.sequence_schema import CharConfig, PixelConfig

SMOKE = Path(__file__).parents[2] / 'configs' / 'smoke'
# The schema of each trainer, none for those of texts, and keys of text.
TEXTS = {
    'clothing_demo': (Config, 'run.dir data.dir data.train_split run.init_from model.mixer'),
    'convert': (ConvertConfig, 'run.dir distill.teacher model.mixer'),
    'pixel': (PixelConfig, 'run.dir data.dir'),
    'char': (CharConfig, 'data.file model.mixer'),
    'fastformer': (None, 'run.dir data.path data.label_column'),
    'conversion': (None, 'run.dir data.path'),
    'recommendation': (None, 'data.path'),
    'summarization': (None, 'data.path data.summary_column'),
}
# Texts that YAML 1.1 or 1.2 takes for a number, a boolean, an anchor, a comment or a mapping.
LIKE_OTHERS = '20240501_1200 007 0123 12:30:00 1e3 1.10 no on true 1_000 0x1F .5 &a {b: .inf - 1__0'.split()
LIKE_OTHERS += ['a #b', 'a: b', ' a', '[01]', "it's"]


def load(name: str, *overrides: str, path: Path | None = None) -> Any:
    schema = TEXTS[name][0]
    path = path or SMOKE / f'{name}.yaml'
    return load_text_config(path, overrides) if schema is None else load_config(path, overrides, schema)


def value_of(config: Any, key: str) -> Any:
    section, name = key.split('.')
    found = getattr(config, section)
    return found[name] if isinstance(found, dict) else getattr(found, name)


@pytest.mark.parametrize('name', TEXTS)
def test_a_text_on_the_command_line_keeps_its_characters(tmp_path, name):
    keys = TEXTS[name][1].split()
    # All of them once, each for another key; the keys of other trainers are told from numbers in the same way.
    for first in range(0, len(LIKE_OTHERS), len(keys)) if name == 'clothing_demo' else [0]:
        wanted = dict(zip(keys, LIKE_OTHERS[first:], strict=False))
        config = load(name, *(f'{key}={text}' for key, text in wanted.items()))
        assert {key: value_of(config, key) for key in wanted} == wanted
        save_config(asdict(config), tmp_path / 'config.yaml')
        assert load(name, path=tmp_path / 'config.yaml') == config


@pytest.mark.parametrize('text', ['20240501_1200', '007', '12:30:00', '1e3', '1.10', 'no', '1_000', '0o17'])
def test_an_unquoted_text_in_a_file_keeps_its_characters(tmp_path, text):
    base, file = tmp_path / text, tmp_path / 'file.yaml'
    base.write_text(f'data: {{dir: {text}, train_split: "{text}"}}\n')
    file.write_text(f'base: {text}\nmodel: {{name: aft_conv_tiny, mixer: {text}}}\nrun: {{dir: {text}}}\n')
    config = load_config(file)
    assert (config.data.dir, config.data.train_split, config.run.dir, config.model['mixer']) == (text,) * 4


@pytest.mark.parametrize('home', ['~', '$HOME', '${HOME}'])
def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch, home):
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'base.yaml').write_text(f'data: {{dir: "{home}/pets"}}\nmodel: {{name: aft_conv_tiny}}\n')
    (tmp_path / 'file.yaml').write_text(f'base: {home}/base.yaml\nrun:\n  dir: {home}/runs/mine\n')
    overlay = f'model.pretrained_cfg_overlay={{file: "{home}/x.pth"}}'
    config = load_config(
        tmp_path / 'file.yaml', [f'run.init_from={home}', f'distill.teacher=local-dir:{home}/t', overlay]
    )
    assert (config.data.dir, config.run.dir) == (f'{tmp_path}/pets', f'{tmp_path}/runs/mine')
    assert (config.run.init_from, config.distill.teacher) == (
        None if home == '~' else str(tmp_path),
        f'local-dir:{tmp_path}/t',
    )
    assert config.model['pretrained_cfg_overlay'] == {'file': f'{tmp_path}/x.pth'}
    assert command_line_text([f'run.init_from={home}/x'], 'run.init_from') == f'{tmp_path}/x'


def test_a_text_that_only_looks_like_the_home_folder_keeps_its_characters():
    texts = ('~draft.jpg', 'a~/b', '$HOMES/a', 'a/$HOME', './~/a')
    assert [load('clothing_demo', f'data.dir={text}').data.dir for text in texts] == [*texts]


def test_each_text_of_a_list_keeps_its_characters():
    config = load('fastformer', 'data.text_columns=[01, no, "2", 1.10]')
    assert config.data.text_columns == ['01', 'no', '2', '1.10']


def test_quotes_around_a_text_are_no_part_of_it_and_null_without_them_is_none():
    config = load('clothing_demo', 'run.dir="0123"', "run.init_from='null'", 'data.dir=', 'data.eval_split=null')
    assert (config.run.dir, config.run.init_from, config.data.dir, config.data.eval_split) == ('0123', 'null', '', None)


def test_numbers_and_booleans_are_read_for_the_type_of_their_key():
    section = load(
        *('clothing_demo', 'optim.lr=1e-3', 'data.batch_size=030', 'optim.weight_decay=.5', 'run.compile=yes'),
        *('data.img_size=[064, 96]', 'model.depth="2"'),
    )
    assert (section.optim.lr, section.optim.weight_decay) == (1e-3, 0.5)
    assert (section.data.batch_size, section.data.img_size) == (30, (64, 96))
    assert (section.run.compile, section.model['depth']) == (True, 2)
    # Arguments of any type.
    config = load('clothing_demo', 'optim.args={eps: 5e-4, a: "1_000", b: "no", c: no, d: ["010", 1.0]}')
    assert config.optim.args == {'eps': 5e-4, 'a': '1_000', 'b': 'no', 'c': False, 'd': ['010', 1.0]}


@pytest.mark.parametrize(
    'key', ['model.pretrained_cfg_overlay.file', 'distill.teacher_args.pretrained_cfg_overlay.file']
)
def test_the_file_of_weights_keeps_its_name(key):
    for name in ('1.10', '20240501_1200', 'no'):
        value: Any = load('clothing_demo', 'distill.teacher=resnet18', f'{key}={name}')
        for part in key.split('.'):
            value = value[part] if isinstance(value, Mapping) else getattr(value, part)
        assert value == name


@pytest.mark.parametrize(
    ('override', 'said'),
    [
        ('schedule.epochs=1:30', r"schedule\.epochs = '1:30': .*Integer"),
        ('data.img_size=[0b1,64]', r'data\.img_size = \[0b1, 64\]: .*Integer'),
        ('optim.lr=fast', r"optim\.lr = 'fast': .*Float"),
        ('run.compile=maybe', r"run\.compile = 'maybe': .*bool"),
        ('run.amp=bf16', r"run\.amp = 'bf16': .*expected one of \['none', 'auto', 'bfloat16', 'float16'\]"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_key(tmp_path, override, said):
    with pytest.raises(ValueError, match=f'^command line: {said}'):
        load('clothing_demo', override)
    key, _, value = override.partition('=')
    section, key = key.split('.')
    file = tmp_path / 'file.yaml'
    file.write_text(f'base: {SMOKE / "clothing_demo.yaml"}\n{section}: {{{key}: {value}}}\n')
    with pytest.raises(ValueError, match=rf'file\.yaml: {said}'):
        load_config(file)


def test_a_key_given_twice_is_refused():
    with pytest.raises(ValueError, match='found duplicate key eps'):
        load('clothing_demo', 'optim.args={eps: 1, eps: 2}')
