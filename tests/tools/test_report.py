import base64
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from datetime import UTC, datetime
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import timm
import torch
from helpers import make_folder, photographs, save_model
from matplotlib.axes import Axes
from PIL import Image, ImageChops

from aft_vision import __version__
from aft_vision.data import CorruptImageError, Decoding
from aft_vision.data.datasets import Source, open_eval_split, with_evaluation_images
from aft_vision.models.checkpoint import load_model
from aft_vision.visualize import Report, predict_labelled, report_sections
from tools.report import find_validation_images, main, read_config, recorded_facts

pytestmark = pytest.mark.usefixtures('coarse_pictures')
CHROMIUM = next(
    filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable'))), None
)
CONV = dict(depth=1, embed_dim=8, patch_size=8, num_heads=4, kernel_size=3, num_classes=3)
VIT = dict(depth=1, embed_dim=8, patch_size=8, num_heads=2, num_classes=3, img_size=32)
VOID = {'meta', 'img', 'link', 'br'}
SPEEDS = ('images_per_second', 'peak_memory_mb')


class Page(HTMLParser):
    """The elements of a page, each closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def save(path: Path, name: str, kwargs: dict[str, object], **extra: object) -> Path:
    torch.manual_seed(0)
    model = timm.create_model(name, **kwargs)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return save_model(path, name, model, kwargs, **extra)


@pytest.fixture(scope='module')
def report(coarse_pictures: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('run')
    config = {'data_config': {'input_size': (3, 32, 32), 'crop_pct': 1.0}, 'class_names': ['<hat>', 'shoe', 'shirt']}
    after = save(folder / 'best.pth', 'aft_conv_tiny', CONV, best_top1=41.25, epoch=7, **config)
    before = save(folder / 'before.pth', 'aft_conv_tiny', CONV)
    vit = save(folder / 'vit.pth', 'vit_tiny_patch16_224', VIT)
    (folder / 'summary.csv').write_text('epoch,train_loss,eval_top1\n0,2.0,30.0\n1,1.5,41.25\n')
    (folder / 'config.yaml').write_text('optim: {label_smoothing: 0.1}\naugment: {mixup: 0.0, cutmix: 0.0}\n')
    rows = [
        {'height': side, 'width': side, 'top1': 40.0, 'top5': 80.0, 'samples': 10} | dict.fromkeys(SPEEDS, 1.0)
        for side in (32, 64)
    ]
    table = {'checkpoint': 'runs/<other>/best.pth', 'data': 'birds', 'train_size': [32, 32], 'sizes': rows}
    (folder / 'eval_resolution.json').write_text(json.dumps(table))
    for name, image in zip(('shoe', 'shirt', 'shirt'), photographs(3, (48, 40)), strict=True):
        (folder / 'images' / name).mkdir(exist_ok=True, parents=True)
        image.save(folder / 'images' / name / f'{len(list((folder / "images" / name).iterdir()))} & co.png')
    arguments = {'checkpoint': after, 'before': before, 'vit': vit, 'images': folder / 'images', 'max-images': 1}
    arguments |= {'out': folder / 'page' / 'report.html', 'query': 3}
    return main([str(x) for name, value in arguments.items() for x in (f'--{name}', value)] + ['4'])


def test_the_page_is_well_formed_and_has_every_section(report):
    text = report.read_text()
    page = Page(text)
    assert not page.open
    # The data of the reader first, the pictures of kernels last.
    titles = ['Accuracy', 'Confusions', 'Worst photographs', 'Training', 'Image sizes', 'Model']
    titles += ['shirt/0 &amp; co.png', 'Position biases', 'Average relative attention']
    assert re.findall('<h2>(.*)</h2>', text) == titles
    assert len(page.all('h1')) == 1
    identifiers = {f'#{section["id"]}' for section in page.all('section')}
    assert {link['href'] for link in page.all('a')} == identifiers


def test_the_accuracy_by_image_size_names_its_checkpoint_and_data(report):
    assert 'runs/&lt;other&gt;/best.pth on birds' in report.read_text()


@pytest.mark.parametrize('older', [False, True])
def test_a_table_of_image_sizes_from_before_the_checkpoint_is_left_out(report, tmp_path, monkeypatch, capsys, older):
    monkeypatch.setattr('tools.report.report_sections', lambda _: ())
    for name in ('best.pth', 'eval_resolution.json'):
        shutil.copy(report.parents[1] / name, tmp_path / name)
    written = (tmp_path / 'best.pth').stat().st_mtime
    os.utime(tmp_path / 'eval_resolution.json', (written, written + (-1 if older else 1)))
    page = main(['--checkpoint', str(tmp_path), '--images', str(report.parents[1] / 'images')]).read_text()
    assert ('<h2>Image sizes</h2>' in page) is not older
    assert ('eval_resolution.json is older' in capsys.readouterr().out) is older


def test_the_page_asks_for_nothing_and_runs_nothing(report):
    page = Page(report.read_text())
    sources = [
        value for _, attributes in page.elements for name, value in attributes.items() if name in ('src', 'href')
    ]
    assert all(source.startswith(('data:image/png;base64,', '#')) for source in sources)
    assert not {'script', 'link', 'iframe', 'object'} & {tag for tag, _ in page.elements}
    assert not re.search(r'https?:|@import|url\(', re.sub(r'base64,[^"]*', '', report.read_text()))


def test_every_picture_decodes_and_says_what_it_shows(report):
    pictures = Page(report.read_text()).all('img')
    # Examples, confusions, worst photographs, curves, sizes, keys and implicit attention of a photograph,
    # biases, relative attention.
    assert len(pictures) == 9
    for picture in pictures:
        image = Image.open(io.BytesIO(base64.b64decode(picture['src'].partition('base64,')[2])))
        image.load()
        assert len(picture['alt']) > 20
        assert abs(image.width / image.height - int(picture['width']) / int(picture['height'])) < 0.02


def test_the_page_says_what_the_checkpoint_knows(report):
    text = report.read_text()
    assert 'aft_conv_tiny' in text
    assert '41.25%, the best of the run, after 7 epochs' in text
    assert '32 × 32 pixels, 4 × 4 tokens' in text
    assert '3 × 3 tokens' in text
    assert '&lt;hat&gt;' in text
    assert '<hat>' not in text
    assert 'row 3, column 4 of 4 × 4' in text
    assert 'before: entropy' in text
    assert re.search(r'Top-1 \d+\.\d% \(\d+\.\d to \d+\.\d%\), the mean over classes \d+\.\d%, on 3 images', text)
    assert 'at 32 × 32 pixels.' in text
    assert '1 of 3 classes have no image here: &lt;hat&gt;.' in text
    assert 'The centre of a picture is the token itself' in text
    assert 'Prediction, truth: shirt' in text


def test_the_page_says_how_it_was_made(report):
    text = unescape(report.read_text())
    assert f'aft-vision report --checkpoint {report.parents[1] / "best.pth"} ' in text
    assert f'aft_vision {__version__}, timm {timm.__version__}, torch {torch.__version__}' in text
    assert f'{datetime.now(UTC):%Y-}' in text


def test_another_model_of_the_same_name_is_told_apart(tmp_path):
    checkpoint = save(tmp_path / 'best.pth', 'aft_conv_tiny', CONV)
    make_folder(tmp_path, {'images': ['a']}, images=1)
    arguments = ['--checkpoint', str(checkpoint), '--images', str(tmp_path / 'images'), '--size', '32']
    text = main([*arguments, '--vit', str(checkpoint)]).read_text()
    assert 'of aft_conv_tiny and aft_conv_tiny (this one)' in text


def test_images_that_cannot_be_decoded_are_named_once_counted_and_left_out(tmp_path, capsys, caplog):
    checkpoint = save(tmp_path / 'best.pth', 'aft_conv_tiny', CONV, class_names=['a', 'b', 'c'])
    images = make_folder(tmp_path, {'images': ['a', 'b']}, images=2) / 'images'
    for name in ('a/0.png', 'b/1.png'):
        (images / name).write_bytes(b'damaged')
    path = main(['--checkpoint', str(checkpoint), '--images', str(images), '--size', '32', '--max-images', '1'])
    text = path.read_text()
    assert 'on 2 images whose' in text
    assert 'Mean over 2 images' in text
    assert '<h2>a/1.png</h2>' in text
    assert '2 images that cannot be decoded are left out' in text
    assert '2 images that cannot be decoded are left out' in capsys.readouterr().out
    assert [caplog.text.count(name) for name in ('a/0.png', 'b/1.png')] == [1, 1]


def test_photographs_deeper_than_their_class_folder_have_its_class(tmp_path):
    checkpoint = save(tmp_path / 'best.pth', 'aft_conv_tiny', CONV, class_names=['a', 'b', 'c'])
    images = make_folder(tmp_path, {'images/a': ['images'], 'images/b': ['images']}, images=2) / 'images'
    text = main(['--checkpoint', str(checkpoint), '--images', str(images), '--size', '32']).read_text()
    assert 'on 4 images whose' in text
    assert text.count('<h2>a/') == text.count('<h2>b/') == 2


@pytest.mark.parametrize('only', [[], ['--only', 'keys'], ['--only', 'attention']])
def test_options_of_reading_reach_the_photographs(tmp_path, caplog, only):
    checkpoint = save(tmp_path / 'best.pth', 'aft_conv_tiny', CONV, class_names=['a', 'b', 'c'])
    images = make_folder(tmp_path, {'images': ['a']}, images=1) / 'images'
    where = images / 'a' / '0.png' if only else images
    with pytest.raises(CorruptImageError) as error:
        main(['--checkpoint', str(checkpoint), '--images', str(where), '--max-pixels', '5', *only])
    assert 'at most 5 pixels' in f'{error.value}{caplog.text}'


def test_the_examples_have_the_size_that_the_model_sees(tmp_path, monkeypatch):
    checkpoint = save(tmp_path / 'best.pth', 'aft_conv_tiny', CONV, class_names=['a', 'b', 'c'])
    make_folder(tmp_path, {'images': ['a']}, images=1)
    shown = []
    monkeypatch.setattr(Axes, 'imshow', lambda self, image, *args, **kwargs: shown.append(image.shape))
    monkeypatch.setattr(
        'tools.report.report_sections',
        lambda report: [each for each in report_sections(report) if each.title == 'Accuracy'],
    )
    main(['--checkpoint', str(checkpoint), '--images', str(tmp_path / 'images'), '--size', '48x32'])
    [(height, width, _)] = shown
    assert height * 32 == width * 48


@pytest.mark.parametrize('name', ['aft_simple_tiny', 'aft_full_tiny'])
def test_models_without_heads_have_a_report_too(tmp_path, name, capsys):
    kwargs = dict(depth=1, embed_dim=8, patch_size=8, num_classes=3, img_size=32)
    checkpoint = save(tmp_path / 'best.pth', name, kwargs)
    make_folder(tmp_path, {'images': ['a']}, images=1)
    path = main(['--checkpoint', str(checkpoint), '--images', str(tmp_path / 'images'), '--size', '48x32'])
    assert path == tmp_path / 'report.html'
    assert str(path) in capsys.readouterr().out
    text = path.read_text()
    assert ('Position biases</h2>' in text) == (name == 'aft_full_tiny')
    assert '48 × 32 pixels, 6 × 4 tokens' in text
    assert 'AFT-conv' not in text
    assert 'The centre of a picture' not in text


def test_the_worst_photographs_are_those_whose_class_is_least_probable(tmp_path):
    checkpoint = save(tmp_path / 'best.pth', 'aft_conv_tiny', CONV, class_names=['a', 'b', 'c'])
    images = make_folder(tmp_path, {'images': ['a', 'b', 'c']}, images=5) / 'images'
    page = main(['--checkpoint', str(checkpoint), '--images', str(images), '--size', '32']).read_text()
    truths = {path: 'abc'.index(path.parent.name) for path in sorted(images.rglob('*.png'))}
    answers = predict_labelled(load_model(checkpoint), truths, (32, 32))
    worst = sorted(answers, key=lambda each: each.truth_probability)[:12]
    listed = re.findall(r'<th scope="row">(\w/\d\.png)</th><td>\w \(([\d.]+)%\)</td>', page)
    assert listed == [
        (each.path.relative_to(images).as_posix(), f'{100 * each.truth_probability:.1f}') for each in worst
    ]


@pytest.mark.parametrize(
    ('name', 'kwargs'),
    [
        ('vit_tiny_patch16_224', VIT),
        # Without one grid of tokens.
        ('aft_pyramid_nano', dict(stem_dim=4, dims=(4, 8, 8, 8), depths=(1,) * 4, num_heads=2, num_classes=3)),
        ('resnet10t', dict(num_classes=3)),
    ],
)
def test_any_classifier_has_a_report_without_pictures_of_kernels(tmp_path, name, kwargs):
    checkpoint = save(tmp_path / 'best.pth', name, kwargs, class_names=['a', 'b', 'c'])
    images = make_folder(tmp_path, {'images': ['a']}, images=2) / 'images'
    text = main(['--checkpoint', str(checkpoint), '--images', str(images), '--size', '32', '--max-images', '1'])
    titles = ['Accuracy', 'Confusions', 'Worst photographs', 'Model', 'a/0.png']
    assert re.findall('<h2>(.*)</h2>', text.read_text()) == titles
    assert 'Prediction, truth: a' in text.read_text()


def test_a_folder_in_place_of_the_page_is_named_before_anything_is_drawn(tmp_path):
    with pytest.raises(ValueError, match=r'a file, got the folder .*: try --out .*report\.html'):
        main(['--checkpoint', 'missing', '--images', 'missing', '--out', str(tmp_path)])


def test_an_exported_folder_records_only_its_name(tmp_path):
    (tmp_path / 'run' / 'export').mkdir(parents=True)
    assert recorded_facts(tmp_path / 'run' / 'export') == {'Checkpoint': 'run/export'}


@pytest.mark.parametrize('layout', ['splits', 'classes'])
def test_the_images_of_a_run_are_those_that_it_was_not_trained_on(tmp_path, layout):
    (tmp_path / 'run').mkdir()
    checkpoint = save(tmp_path / 'run' / 'best.pth', 'aft_conv_tiny', CONV, class_names=['a', 'b', 'c'])
    splits = {'': ['a', 'b', 'c']} if layout == 'classes' else {'train': ['a', 'b', 'c'], 'val': ['a', 'b', 'c']}
    images = make_folder(tmp_path / 'images', splits, images=5)
    (checkpoint.parent / 'summary.csv').write_text('epoch,train_loss,eval_top1\n1,2.0,30.0\n')
    data = {'dir': str(images), 'val_share_without_split': 0.2, 'batch_size': 8}
    (checkpoint.parent / 'config.yaml').write_text(json.dumps({'data': data}))
    options = ['--checkpoint', str(checkpoint), '--size', '32', '--max-images', '1']
    text = main(options).read_text()
    kept = open_eval_split(with_evaluation_images(Source(dir=str(images), val_share_without_split=0.2))).dataset
    names = {Path(kept.name_of(index)).relative_to(images).as_posix() for index in range(len(kept))}
    assert len(names) == (3 if layout == 'classes' else 15)
    listed = set(re.findall(r'<th scope="row">([\w/]+\.png)</th>', text))
    assert listed == names if layout == 'classes' else listed < names
    assert f'on {len(names)} images whose' in text
    shutil.rmtree(images)
    with pytest.raises(ValueError, match=r'validation images of the run, or --images FOLDER: expected .*images'):
        main(options)


def test_without_images_and_without_a_run_they_are_asked_for(tmp_path):
    checkpoint = save(tmp_path / 'best.pth', 'aft_conv_tiny', CONV)
    with pytest.raises(ValueError, match=r'its config\.yaml, or --images FOLDER, got neither'):
        main(['--checkpoint', str(checkpoint)])


def test_images_of_a_run_that_are_not_in_files_are_asked_for(tmp_path):
    with tarfile.open(tmp_path / 'all.tar', 'w') as file:
        file.add(make_folder(tmp_path / 'images', {'': ['a', 'b']}, images=3), arcname='.')
    with pytest.raises(ValueError, match=r'--images FOLDER, as the images of the run are not files but in .*all\.tar'):
        find_validation_images({'data': {'dir': str(tmp_path / 'all.tar'), 'val_share': 0.5}})


@pytest.mark.parametrize('options', [[], ['--bits', '9', '--max-pixels', '70000']])
def test_the_images_of_a_run_are_read_as_the_run_read_them(tmp_path, monkeypatch, options):
    found = []
    monkeypatch.setattr('tools.report.report_sections', lambda report: found.append(report) or ())
    checkpoint = save(tmp_path / 'best.pth', 'aft_conv_tiny', CONV, class_names=['a', 'b', 'c'])
    images = make_folder(tmp_path / 'images', {'train': ['a', 'b', 'c'], 'val': ['a', 'b', 'c']}, images=1)
    data = {'dir': str(images), 'bits': 12, 'max_image_pixels': 100_000}
    # Without summary.csv.
    (tmp_path / 'config.yaml').write_text(json.dumps({'data': data}))
    main(['--checkpoint', str(checkpoint), '--size', '32', *options])
    main(['--checkpoint', str(checkpoint), '--size', '32', '--images', str(images), *options])
    own, given = (report.decoding for report in found)
    assert own == (Decoding(70_000, 9) if options else Decoding(100_000, 12))
    assert given == (Decoding(70_000, 9) if options else Decoding())


def test_a_photograph_has_the_class_that_it_has_among_all(tmp_path):
    model = timm.create_model('aft_conv_tiny', **CONV).eval()
    model.pretrained_cfg['label_names'] = ['crane', 'bus', 'dog']
    # Two synsets of these words, so that neither is the class.
    paths = [tmp_path / name / '0.png' for name in ('bus', 'n02012849', 'n03126707')]
    report = Report(model, photographs=paths[:2], labelled=[paths[0], paths[2]], folder=tmp_path)
    titles = [section.title for section in report_sections(report)]
    assert {'bus/0.png', 'n02012849/0.png'} <= {*titles}
    assert report.truths[paths[1]] is None


@pytest.mark.skipif(CHROMIUM is None, reason='needs chromium on PATH')
@pytest.mark.parametrize(('width', 'dark'), [(1200, False), (400, True)])
def test_a_browser_shows_the_page(report, tmp_path, width, dark):
    picture = tmp_path / 'page.png'
    options = f'--headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir={tmp_path}/profile'.split()
    options += ['--blink-settings=preferredColorScheme=0'] if dark else []
    command = [CHROMIUM, *options, f'--window-size={width},2400', f'--screenshot={picture}', report.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    image = Image.open(picture).convert('RGB')
    assert image.size == (width, 2400)
    background = (20, 23, 28) if dark else (255, 255, 255)
    assert image.getpixel((2, 2)) == background
    ink = ImageChops.difference(image, Image.new('RGB', image.size, background))
    # The sections below the first screen are drawn, and none is cut at the right edge.
    assert ink.crop((0, 1000, width, 2400)).getbbox() is not None
    assert ink.crop((width - 4, 0, width, 2400)).getbbox() is None


@pytest.mark.parametrize('content', ['', 'a: [', 'data: 4'])
def test_a_damaged_config_is_named(tmp_path, content):
    (tmp_path / 'config.yaml').write_text(content)
    with pytest.raises(ValueError, match=r'a run of train\.imagenet, got no sections in .*config\.yaml'):
        read_config(tmp_path / 'config.yaml')


@pytest.fixture
def picture(tmp_path: Path) -> list[str]:
    save(tmp_path / 'best.pth', 'aft_conv_tiny', CONV | {'depth': 2})
    photographs(1, (48, 64))[0].save(tmp_path / 'image.png')
    return ['--checkpoint', str(tmp_path / 'best.pth'), '--images', str(tmp_path / 'image.png'), '--size', '32']


def test_each_picture_goes_next_to_the_checkpoint_or_where_it_is_wanted(picture, tmp_path, capsys):
    biases = main([*picture[:2], *picture[4:], '--only', 'biases'])
    drawn = [Image.open(main([*picture, '--only', name])).convert('RGB') for name in ('keys', 'attention')]
    drawn.insert(0, Image.open(biases).convert('RGB'))
    assert all(len(image.getcolors(1 << 24)) > 100 for image in drawn)
    assert f'the picture is in {tmp_path / "biases.png"}' in capsys.readouterr().out
    path = tmp_path / 'new' / 'keys.png'
    main([*picture, '--only', 'keys', '--heads', '1', '3', '--layers', '2', '--out', str(path)])
    assert Image.open(path).size[1] < drawn[1].size[1]


def test_the_options_of_biases_change_their_picture(picture, tmp_path):
    pictures = [
        main([*picture[:2], '--only', 'biases', *options.split(), '--out', str(tmp_path / f'{index}.png')]).read_bytes()
        for index, options in enumerate(
            ('', f'--before {picture[1]}', '--max-heads 3', '--heads 1 3', '--layers 2', '--exponentiated')
        )
    ]
    assert len(set(pictures)) == 6


def test_a_query_other_than_the_centre_is_another_picture(picture, tmp_path):
    centre, same, corner = (
        main([*picture, '--only', 'attention', *query, '--out', str(tmp_path / f'{name}.png')]).read_bytes()
        for name, query in (('a', []), ('b', ['--query', '3', '3']), ('c', ['--query', '1', '1']))
    )
    assert centre == same != corner
