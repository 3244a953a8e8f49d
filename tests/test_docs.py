"""The examples of README.md and docs/: Python is run, command lines are parsed, and keys are looked for.

The blocks of Python of a document run one after another, as a reader types them, in a folder that has small models and
data where the document says that they are. What runs smaller is in SMALLER.
"""

import importlib.util
import inspect
import io
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import dropwhile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
import timm
import torch
from helpers import link_photographs, load_script
from PIL import Image
from text_files import write_amazon, write_glove, write_mind, write_mind_behaviors
from torch import nn
from torch.distributed.run import get_args_parser
from torch.nn import functional as F

from aft_vision.export.hub import export_model
from aft_vision.fastformer import (
    ENCODERS,
    FastformerConfig,
    FastformerForConditionalGeneration,
    FastformerForSequenceClassification,
)
from aft_vision.fastformer.tokenize import train_tokenizer
from aft_vision.models.checkpoint import load_model
from tools.console import find_commands
from train.char import CharConfig
from train.command_line import parse_args
from train.config import load_config
from train.convert_schema import ConvertConfig
from train.fastformer.tasks import TASKS, load_text_config
from train.pixel import PixelConfig
from train.recall import RecallConfig
from train.schema import Config

ROOT = Path(__file__).parents[1]
# By their names below docs/.
DOCUMENTS = {
    path.relative_to(ROOT).as_posix().removeprefix('docs/'): path
    for path in (
        *map(ROOT.joinpath, ('README.md', 'CONTRIBUTING.md', 'CHANGELOG.md')),
        *sorted((ROOT / 'docs').rglob('*.md')),
    )
}
BLOCK = re.compile(r'^```(\w*)\n(.*?)^```', re.DOTALL | re.MULTILINE)
# What a block with the word onnx needs.
HAS_ONNX = all(importlib.util.find_spec(name) is not None for name in ('onnxruntime', 'onnxscript'))
# By document: what stands there, and what runs in its place, offline and within seconds.
SMALLER = {
    'README.md': {"create_model('aft_conv_tiny')": "create_model('aft_conv_tiny', depth=1)"},
    'guide/detectors.md': {
        "create_model('aft_conv_tiny', ": "create_model('aft_conv_tiny', depth=2, ",
        "create_model('aft_pyramid_nano', ": "create_model('aft_pyramid_nano', depths=(1, 1, 1, 1), ",
    },
    'guide/export.md': {
        "create_model('aft_conv_tiny').eval()": "create_model('aft_conv_tiny', depth=1).eval()",
        "create_model('aft_conv_tiny', exportable=True)": "create_model('aft_conv_tiny', exportable=True, depth=1)",
    },
    'reference/models.md': {"create_model('aft_conv_tiny')": "create_model('aft_conv_tiny', depth=1)"},
    'guide/pixels_and_text.md': {
        "create_decoder('aft_local_pixel')": "create_decoder('aft_local_pixel', depth=1, dim=8, img_size=(8, 8))",
        'length=500': 'length=50',
    },
    'guide/transfer.md': {'pretrained=True': 'pretrained=False'},
    'results/native_shapes.md': {'(64, 100, 144, 196), 7, 12': '(4, 9), 2, 1'},
}
# Commands that are not of this repository; the first word of a line, behind variables that it sets.
OTHERS = {'pip', 'npm', 'make', 'hf', 'apt-get', 'export', 'scontrol', 'uvicorn', 'curl', 'exit', '[', '...'}
# What the reader puts a file of their own in the place of, or what a run leaves, and what has the keys of such a file.
PLACEHOLDERS = ('CONFIG', 'FILE', 'runs/reviews/config.yaml')
STAND_INS = {
    'train.imagenet': 'configs/smoke/one_epoch.yaml',
    'train.throughput': 'configs/smoke/one_epoch.yaml',
    'train.store_teacher': 'configs/smoke/one_epoch.yaml',
    'train.convert': 'configs/smoke/convert.yaml',
    'train.pixel': 'configs/smoke/pixel.yaml',
    'train.char': 'configs/smoke/char.yaml',
    'train.recall': 'configs/small/recall.yaml',
    'train.fastformer': 'configs/fastformer/small_ag_news.yaml',
}
# What looks like a key and is the name of a file.
NO_KEYS = ('data.json',)
# The experiments that a document is about, where these are not all.
TEXTS = {name: task.schema for name, task in TASKS.items()}
SCHEMAS: dict[str, tuple[Any, ...]] = {
    'README.md': (Config, TEXTS['classification']),
    'guide/pixels_and_text.md': (PixelConfig, CharConfig, RecallConfig),
    'guide/fastformer.md': (TEXTS['classification'],),
    'guide/fastformer_conversion.md': (TEXTS['conversion'],),
    'guide/fastformer_data.md': (TEXTS['classification'],),
    'guide/fastformer_recommendation.md': (TEXTS['recommendation'],),
    'guide/fastformer_summarization.md': (TEXTS['summarization'],),
    'guide/resolution.md': (Config,),
    **dict.fromkeys(('guide/data_sets.md', 'guide/imagenet.md', 'guide/train.md'), (Config,)),
}
EVERY_SCHEMA = (Config, PixelConfig, CharConfig, RecallConfig, *TEXTS.values())
OTHER_SCHEMAS: dict[str, Any] = {
    'train.convert': ConvertConfig,
    'train.pixel': PixelConfig,
    'train.char': CharConfig,
    'train.recall': RecallConfig,
}


def blocks(name: str, *languages: str) -> list[str]:
    """The blocks of a document in these languages, the empty one where none is named."""
    return [content for language, content in BLOCK.findall(DOCUMENTS[name].read_text()) if language in languages]


def write_image_models() -> None:
    """Checkpoints and exported folders of an untrained AFT-conv."""
    paths = ('best.pth', 'runs/demo/best.pth', 'runs/first/best.pth')
    for path, more in [*((path, {}) for path in paths), ('runs/gumbel/best.pth', {'gumbel': True})]:
        kwargs = dict(depth=1, embed_dim=16, num_heads=4, kernel_size=3, patch_size=8, num_classes=3, **more)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        model = timm.create_model('aft_conv_tiny', **kwargs)
        torch.save({'model_name': 'aft_conv_tiny', 'model_kwargs': kwargs, 'state_dict': model.state_dict()}, path)
    for folder in ('hub', 'runs/demo/export', 'runs/demo/pruned', 'runs/onehot'):
        export_model(load_model('best.pth'), folder, ['coat', 'dress', 'hat'])
    Path('tests').symlink_to(ROOT / 'tests')


def write_programs() -> None:
    """Programs, and a folder whose config.json has the number of classes twice."""
    write_image_models()
    Path('saved').mkdir()
    Path('saved/config.json').write_text(json.dumps({'num_classes': 3, 'model_args': {'num_classes': 3}}))
    # With the input of those that `tools.export` writes, in no time.
    sizes = {'input': dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)}
    program = torch.export.export(nn.AdaptiveAvgPool2d(1), (torch.zeros(2, 3, 64, 96),), dynamic_shapes=sizes)
    torch.export.save(program, 'model.pt2')
    Image.new('RGB', (120, 100), 'red').save('PHOTO.jpg')
    if HAS_ONNX:
        write_onnx('model.onnx')


def write_onnx(path: str) -> None:
    """An ONNX file of the same."""
    import onnx

    nodes = [onnx.helper.make_node('GlobalAveragePool', ['images'], ['logits'])]
    ends = [onnx.helper.make_tensor_value_info(name, 1, ('b', 3, 'h', 'w')) for name in ('images', 'logits')]
    graph = onnx.helper.make_graph(nodes, 'pool', ends[:1], ends[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid('', 18)], ir_version=10)
    about = {'input_size': [3, 96, 96], 'mean': [0.5] * 3, 'std': [0.5] * 3, 'label_names': [*'abc']}
    about |= {'interpolation': 'bicubic', 'crop_pct': 0.9}
    onnx.helper.set_model_props(model, {name: json.dumps(value) for name, value in about.items()})
    onnx.save(model, path)


def write_text_models() -> None:
    """An untrained classifier, and an untrained model that summarises."""
    tokenizer = train_tokenizer(['a text'], max_length=64)
    config = FastformerConfig(vocab_size=len(tokenizer), hidden_size=8, num_attention_heads=2)
    for folder, kind in (
        ('runs/reviews/seed_0/best', FastformerForSequenceClassification),
        ('runs/fastformer/small_bbc/seed_0/best', FastformerForConditionalGeneration),
    ):
        kind(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def write_texts() -> None:
    """Reviews, vectors of words, and news with impressions, in the published formats."""
    write_amazon('reviews_Electronics_5.json.gz')
    with ZipFile('glove.840B.300d.zip', 'w') as archive:
        archive.write(write_glove('glove.840B.300d.txt', ['good', 'bad'], 300))
    write_mind('MINDsmall_dev')
    write_mind_behaviors('MINDsmall_dev')


# What is there when a document's examples begin, by its name.
FURNITURE = {
    'README.md': write_image_models,
    'guide/export.md': write_programs,
    # Class folders without splits, as most readers have them.
    'guide/finetune.md': lambda: link_photographs(Path('.'), 8, 0, classes=2).joinpath('train').rename('IMAGES'),
    'guide/fastformer.md': write_text_models,
    'guide/fastformer_data.md': write_texts,
    'guide/fastformer_recommendation.md': write_texts,
    'guide/fastformer_summarization.md': write_text_models,
    'guide/onehot.md': write_image_models,
    'guide/pictures.md': write_image_models,
    'guide/predict.md': write_image_models,
    'guide/sparsity.md': write_image_models,
    'results/native_shapes.md': write_image_models,
}


def names_at_hand(name: str) -> dict[str, Any]:
    """Return what a document's examples take for granted."""
    if name == 'guide/pixels_and_text.md':
        tokens = torch.zeros(1, 192, dtype=torch.long)
        mask, given = torch.ones(8, 8, dtype=torch.bool), torch.ones(50, dtype=torch.bool)
        mask[-1, -1] = given[-1] = False
        return {
            'tokens': tokens,
            'prompt': tokens[:, :3].expand(4, 3),
            'token': tokens[0, :4],
            'mask': mask,
            'given': given,
        }
    if name == 'guide/sparsity.md':
        images, targets = torch.randn(2, 3, 224, 224), torch.tensor([0, 2])
        return {'model': load_model('best.pth'), 'images': images, 'targets': targets, 'criterion': F.cross_entropy}
    return {}


@pytest.fixture
def encoders():
    """Remove after an example what it has registered."""
    before = dict(ENCODERS)
    yield
    ENCODERS.clear()
    ENCODERS.update(before)


# tests/test_own_mixer.py runs the other page.
@pytest.mark.parametrize(
    'name', [name for name in DOCUMENTS if blocks(name, 'python') and name != 'guide/own_mixer.md']
)
@pytest.mark.filterwarnings('ignore:NLTK has no punkt_tab')
@pytest.mark.usefixtures('encoders')
def test_the_examples_in_python_run(name, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    FURNITURE.get(name, lambda: None)()
    if name == 'guide/export.md':
        shutil.copytree(request.getfixturevalue('hub')[1], 'hub', dirs_exist_ok=True)
    # A warning that is addressed to the reader, as of a deprecation, is an error as it is within the package.
    namespace = {'__name__': 'aft_vision.examples', **names_at_hand(name)}
    for block in blocks(name, 'python'):
        if ('onnx' in block and not HAS_ONNX) or 'fastapi' in block:
            continue
        for stands, runs in SMALLER.get(name, {}).items():
            block = block.replace(stands, runs)
        exec(compile(block, name, 'exec'), namespace)


def test_the_server_of_the_guide_answers_an_upload_as_the_command_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_image_models()
    # FastAPI calls the function with the upload; what else it does needs no test here.
    fastapi: Any = ModuleType('fastapi')
    fastapi.FastAPI = lambda: SimpleNamespace(post=lambda path: lambda function: function)
    fastapi.HTTPException, fastapi.UploadFile = RuntimeError, Any
    monkeypatch.setitem(sys.modules, 'fastapi', fastapi)
    (block,) = (block for block in blocks('guide/predict.md', 'python') if 'fastapi' in block)
    exec(compile(block, 'server.py', 'exec'), server := {})
    Image.new('RGB', (120, 100), 'red').save('PHOTO.jpg')
    (row,) = main_module('tools.predict').main(['PHOTO.jpg', '--checkpoint', 'runs/demo'])
    with open('PHOTO.jpg', 'rb') as file:
        found = server['predict'](SimpleNamespace(file=file))
    assert found == pytest.approx({each['class']: each['probability'] for each in row['classes']}, abs=1e-5)
    with pytest.raises(RuntimeError) as error:
        server['predict'](SimpleNamespace(file=io.BytesIO(b'no image')))
    assert error.value.args[0] == 400


def test_what_is_made_smaller_stands_in_the_documents():
    for name, replaced in SMALLER.items():
        for piece in replaced:
            assert any(piece in block for block in blocks(name, 'python'))


def commands(name: str) -> Iterator[list[str]]:
    """The words of each command of a document, without the variables that it sets."""
    lines = [line for block in blocks(name, 'sh') for line in block.replace('\\\n', ' ').splitlines()]
    # A block without a language may show what is printed.
    others = [line for block in blocks(name, '') for line in block.replace('\\\n', ' ').splitlines()]
    lines += [line for line in others if ' -m ' in line or 'aft-vision ' in line]
    # Those that are no more than a name, or that show what is optional, are looked at below.
    lines += [line for line in inline_commands(name) if ' --' in line and '[' not in line and '--help' not in line]
    for line in lines:
        for command in re.split(r'&&|\|\|', re.sub(r'\$\(.*?\)', 'X', line)):
            words = list(dropwhile(re.compile(r'\w+=').match, shlex.split(command, comments=True)))
            if words:
                yield as_module(words)


def as_module(words: list[str]) -> list[str]:
    """A command line of aft-vision as that of its module; any other as it is."""
    if 'aft-vision' not in words:
        return words
    start = words.index('aft-vision')
    return [*words[:start], '-m', find_commands()[words[start + 1]], *words[start + 2 :]]


def inline_commands(name: str) -> list[str]:
    return re.findall(r'`((?:python -m|aft-vision) [^-`][^`]*)`', BLOCK.sub('', DOCUMENTS[name].read_text()))


@pytest.mark.parametrize('name', [name for name in DOCUMENTS if name != 'guide/own_mixer.md'])
def test_the_command_lines_are_those_that_the_commands_take(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in commands(name):
        if '-m' in words:
            check_module(*words)
        elif '-c' in words:
            compile(words[words.index('-c') + 1], name, 'exec')
        elif words[0] == 'python':
            load_script(words[1]).parse_args(words[2:])
        else:
            assert words[0] in OTHERS, words


@pytest.mark.parametrize('name', ['char', 'fastformer', 'imagenet', 'pixel', 'recall'])
def test_the_example_of_the_help_of_a_trainer_is_one_it_takes(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    module = main_module(f'train.{name}')
    found = re.search(
        r'`section\.key=value`\s+changes one\s+value.*?for\s+example\s+`([^`]+)`', module.__doc__, re.DOTALL
    )
    check_module('-m', f'train.{name}', '--config', module.EXAMPLE, *found[1].split())


def check_module(*words: str) -> None:
    """Exit as the command does, or raise its error, if it would not take these words."""
    if words[0] == 'torchrun':
        get_args_parser().parse_args(words[1:])
    start = words.index('-m')
    name, arguments = words[start + 1], list(words[start + 2 :])
    if not name.startswith(('tools.', 'train.')):
        return
    module = main_module(name)
    if hasattr(module, 'EXAMPLE'):
        args = parse_args(module.__doc__, module.EXAMPLE, arguments)
    else:
        args = module.parse_args(arguments)
    if name.startswith('train.') and args.config is not None:
        path = STAND_INS[name] if str(args.config) in PLACEHOLDERS else args.config
        if name == 'train.fastformer':
            load_text_config(path, args.overrides)
        else:
            load_config(path, args.overrides, OTHER_SCHEMAS.get(name, Config))


def main_module(name: str) -> Any:
    """The module that `python -m` runs."""
    module = importlib.import_module(name)
    return importlib.import_module(f'{name}.__main__') if hasattr(module, '__path__') else module


@pytest.mark.parametrize('name', DOCUMENTS)
def test_the_commands_and_keys_that_the_text_names_exist(name):
    text = BLOCK.sub('', DOCUMENTS[name].read_text())
    table = re.search(r'\| `python -m tools\.` .*?\n\n', text, re.DOTALL)
    rows = [] if table is None else table[0].splitlines()[2:]
    tools = [tool for row in rows if row for tool in re.findall(r'`(\w+)`', row.split('|')[1])]
    named = [as_module(command.split()) for command in inline_commands(name)]
    modules = [f'tools.{tool}' for tool in tools] + [words[words.index('-m') + 1] for words in named]
    for module in modules:
        if re.match(r'(tools|train)\.\w', module):
            assert inspect.isfunction(main_module(module).main)
    known = keys_of_experiments(SCHEMAS.get(name, EVERY_SCHEMA))
    for section, key in re.findall(r'`(data|optim|schedule|run|generate|ema|augment|distill)\.(\w+)(?:=[^`]*)?`', text):
        assert f'{section}.{key}' in NO_KEYS or key in known.get(section, ()), f'{section}.{key}'


@pytest.mark.parametrize('name', DOCUMENTS)
def test_links_lead_to_files_and_headings_that_exist(name):
    path = DOCUMENTS[name]
    for link in re.findall(r'\]\(([^)\s]+)\)', BLOCK.sub('', path.read_text())):
        file, _, heading = link.partition('#')
        if '://' in link:
            continue
        target = (path.parent / file).resolve() if file else path
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        assert not heading or heading in headings(target), link


@pytest.mark.parametrize('name', DOCUMENTS)
def test_tables_have_a_head_and_items_of_lists_a_line(name):
    text = BLOCK.sub('', DOCUMENTS[name].read_text())
    for table in re.findall(r'(?:^\|.*\n)+', text, re.MULTILINE):
        assert re.match(r'\|.*\|\n\|(?:[ :]*-+[ :]*\|)+\n', table), table
    outside = re.sub(r'^\|.*$', '', text, flags=re.MULTILINE)
    assert not re.findall(r'[.;:] [-*] [A-Z`]', outside)


def make_site() -> Any:
    return load_script('docs/make_site.py')


def test_the_site_has_a_way_to_every_page():
    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for each in (entry.values() if isinstance(entry, dict) else entry) for page in pages(each)]

    project = tomllib.loads((ROOT / 'zensical.toml').read_text())['project']
    written = {name for name in make_site().site_paths().values() if name.endswith('.md')}
    assert set(pages(project['nav'])) == written | set(make_site().GENERATED)


def test_links_of_the_site_lead_to_its_pages_and_other_links_become_words():
    site = make_site()
    text = 'See [a](docs/guide/train.md#data-sets), [b](configs/smoke), ![c](docs/images/scaling.png) and [d](https://x.y).'
    expected = 'See [a](guide/train.md#data-sets), b, ![c](images/scaling.png) and [d](https://x.y).'
    assert site.rewrite_links(text, ROOT / 'README.md', site.site_paths()) == expected
    block = '```python\nx[0](train.md)\n```\n'
    assert site.rewrite_links(block, ROOT / 'docs' / 'log.md', site.site_paths()) == block
    back = site.rewrite_links('[r](../../README.md)', ROOT / 'docs' / 'guide' / 'train.md', site.site_paths())
    assert back == '[r](../index.md)'


def test_the_page_of_the_api_has_signatures_and_lists_of_arguments():
    from aft_vision import ops

    site = make_site()
    assert site.signature('aft_full', ops.aft_full).splitlines()[:3] == [
        'aft_full(',
        '    q: Tensor | None,',
        '    k: Tensor,',
    ]
    assert '### sliding_windows\n\n```python\nsliding_windows(' in site.api_page()
    text = site.format_docstring(ops.aft_full)
    assert '**Args**\n\n* `q' in text
    assert 'Args:' not in text


@cache
def headings(path: Path) -> set[str]:
    """The anchors that GitHub and the site give to the headings of a page."""
    titles = re.findall(r'^#+ (.*)', BLOCK.sub('', path.read_text()), re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-') for title in titles}


@cache
def keys_of_experiments(schemas: tuple[Any, ...]) -> dict[str, set[str]]:
    """The keys of each section of the experiments of these kinds."""
    found: dict[str, set[str]] = {}
    for schema in schemas:
        for section in fields(schema):
            value = getattr(schema(), section.name)
            if is_dataclass(value):
                found.setdefault(section.name, set()).update(key.name for key in fields(value))
    return found


def test_the_figures_of_characters_and_pixels_are_those_of_their_runs():
    rows = [
        line.split(' | ') for line in (ROOT / 'docs/results/sequences.md').read_text().splitlines() if ' | ' in line
    ]
    for path in (ROOT / 'docs/results/data').glob('*/*_seed0/result.json'):
        if path.parent.parent.name not in ('characters', 'pixels') or path.parent.name.startswith('context64'):
            continue  # those have three seeds: the page has their mean
        run = json.loads(path.read_text())
        wanted = f'{run["parameters"]:,}', f'{run["updates"]:,}', f'{run["test_bits"]:.3f}'
        assert any(all(cell in row for cell in wanted) for row in rows), path
