"""The page that classifies photographs in a browser: the pixels of timm, the probabilities of tools.predict."""

import base64
import contextlib
import functools
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import timm
import torch
from browser import CHROMIUM, Browser
from helpers import photographs, save_model
from PIL import ExifTags, Image
from timm.data import create_transform

from aft_vision.export import choose_shape, web
from tools import export, predict

PAGE = Path(web.__file__).with_name('page')
# npm install --no-save onnxruntime-web@1.30.0
RUNTIME = Path(__file__).parents[2] / web.RUNTIME_FOLDER
NODE = shutil.which('node')
KWARGS = dict(depth=1, embed_dim=16, num_heads=4, kernel_size=3, num_classes=7)
SQUARE = {'input_size': [3, 96, 96], 'crop_pct': 0.9, 'crop_mode': 'center', 'interpolation': 'bicubic'}
CROP = """
import fs from 'node:fs';
const { crop } = await import(process.argv[2]);
const { model, images } = JSON.parse(fs.readFileSync(0));
for (const { pixels, ...image } of images) {
  const found = crop({ data: Buffer.from(pixels, 'base64'), ...image }, model);
  console.log(Buffer.from(found).toString('base64'));
}
"""
DROP = """
document.querySelector('#status').textContent = 'Looking';
const dropped = new DataTransfer();
dropped.items.add(new File(['no image'], 'note.txt'));
dispatchEvent(new DragEvent('drop', { dataTransfer: dropped }));
"""


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = timm.create_model('aft_conv_tiny', **KWARGS)
    torch.nn.init.normal_(model.head.weight)
    more = dict(class_names=[f'kind {i}' for i in range(7)], data_config={'input_size': (3, 48, 48), 'crop_pct': 0.9})
    return save_model(tmp_path_factory.mktemp('run') / 'best.pth', 'aft_conv_tiny', model, KWARGS, **more)


@pytest.fixture(scope='module')
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the page, without the runtime."""
    for package in ('onnx', 'onnxruntime', 'onnxscript'):
        pytest.importorskip(package)
    out = tmp_path_factory.mktemp('web') / 'page'
    return export.main(['--checkpoint', str(checkpoint), '--format', 'web', '--out', str(out)])


def crop_by_node(images: list[Image.Image], model: dict[str, Any]) -> list[np.ndarray]:
    given = []
    for image in images:
        pixels = base64.b64encode(image.convert('RGBA').tobytes()).decode()
        given.append({'width': image.width, 'height': image.height, 'pixels': pixels})
    command = [NODE, '--input-type=module', '-e', CROP, '-', (PAGE / 'pixels.js').as_uri()]
    content = json.dumps({'model': model, 'images': given}).encode()
    found = subprocess.run(command, input=content, capture_output=True, check=True).stdout.split()
    channels, *sides = model['input_size']
    return [np.frombuffer(base64.b64decode(line), np.uint8).reshape(*sides, channels) for line in found]


@pytest.mark.skipif(NODE is None, reason='needs node on PATH')
@pytest.mark.parametrize(
    'change',
    [
        {},
        {'crop_pct': 1.0, 'interpolation': 'bilinear'},
        {'input_size': [3, 64, 96]},
        {'input_size': [1, 97, 97]},
        {'crop_mode': 'squash', 'input_size': [3, 64, 96]},
        {'crop_mode': 'border'},
        {'crop_mode': 'border', 'input_size': [3, 64, 97], 'crop_pct': 1.0},
    ],
    ids=str,
)
def test_the_pixels_of_the_page_are_those_of_timm(change):
    channels = change.get('input_size', [3])[0]
    model = {**SQUARE, 'mean': [0.5, 0.4, 0.3][:channels], 'std': [0.5] * channels, **change}
    sizes = [(128, 96), (96, 128), (97, 96), (37, 53), (700, 501), (300, 4), (1, 1)]
    # Older versions of Pillow resize the width of a tall image first.
    if int(PIL.__version__.partition('.')[0]) >= 13:
        sizes += [(44, 157), (4, 300), (100, 211)]
    images = [photographs(1, size)[0] for size in sizes]
    transform = create_transform(**model, use_prefetcher=True)
    for image, found in zip(images, crop_by_node(images, model), strict=True):
        expected = transform(image.convert('L') if channels == 1 else image)
        np.testing.assert_array_equal(found, expected.permute(1, 2, 0).numpy(), err_msg=str(image.size))


def test_the_folder_has_the_page_and_says_how_images_are_prepared(folder):
    assert {path.name for path in folder.iterdir()} == {'model.onnx', 'model.json', *(x.name for x in PAGE.iterdir())}
    model = json.loads((folder / 'model.json').read_text())
    assert model['input_size'] == [3, 48, 48]
    assert (model['crop_pct'], model['crop_mode'], model['interpolation']) == (0.9, 'center', 'bicubic')
    assert model['label_names'][6] == 'kind 6'


def test_the_runtime_is_copied_from_its_package(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(web, 'export_onnx', lambda model, path, *args, **kwargs: path.write_bytes(b'onnx') and [])
    (tmp_path / 'package' / 'dist').mkdir(parents=True)
    out = tmp_path / 'my page'
    out.mkdir()
    options = ['--checkpoint', str(checkpoint), '--format', 'web', '--out', str(out)]
    export.main(options)
    printed = capsys.readouterr().out
    assert f"npm install --prefix '{out}' {web.RUNTIME}\n" in printed
    assert f"python -m http.server --directory '{out}'\n" in printed
    with pytest.raises(FileNotFoundError, match=r'package/dist/ort'):
        export.main([*options, '--runtime', str(tmp_path / 'package')])
    for name in (*web.RUNTIME_FILES, 'others'):
        (tmp_path / 'package' / 'dist' / name).write_text(name)
    export.main([*options, '--runtime', str(tmp_path / 'package')])
    assert 'npm install' not in capsys.readouterr().out
    copied = (out / web.RUNTIME_FOLDER / 'dist').iterdir()
    assert {path.name: path.read_text() for path in copied} == {name: name for name in web.RUNTIME_FILES}


def test_a_second_export_takes_the_runtime_of_its_own_page_and_replaces_the_model_last(tmp_path, monkeypatch):
    model, written = timm.create_model('aft_conv_tiny', **KWARGS), ['first']
    monkeypatch.setattr(web, 'export_onnx', lambda model, path, *args, **kwargs: path.write_text(written[-1]) and [])
    dist = tmp_path / 'page' / web.RUNTIME_FOLDER / 'dist'
    dist.mkdir(parents=True)
    for name in web.RUNTIME_FILES:
        (dist / name).write_text(name)
    for text in ('first', 'second'):
        written.append(text)
        web.export_web(model, tmp_path / 'page', runtime=dist.parent)
        assert (tmp_path / 'page' / 'model.onnx').read_text() == text
    assert {path.name: path.read_text() for path in dist.iterdir()} == {name: name for name in web.RUNTIME_FILES}
    (dist.parents[1] / 'other' / 'dist').mkdir(parents=True)
    for name in web.RUNTIME_FILES:
        (dist.parents[1] / 'other' / 'dist' / name).write_text(name)
    # A page that cannot be written keeps its model.
    (dist / web.RUNTIME_FILES[0]).unlink()
    (dist / web.RUNTIME_FILES[0]).mkdir()
    written.append('third')
    with pytest.raises(IsADirectoryError):
        web.export_web(model, tmp_path / 'page', runtime=dist.parents[1] / 'other')
    assert (tmp_path / 'page' / 'model.onnx').read_text() == 'second'


def test_a_page_of_batches_is_rejected_as_it_shows_one_photograph(tmp_path):
    model = timm.create_model('aft_conv_tiny', **KWARGS)
    with pytest.raises(ValueError, match='a batch of 1 or of any size for a web page, got 4'):
        web.export_web(model, tmp_path / 'page', choose_shape(model, (48, 48), batch=4))
    assert not (tmp_path / 'page').exists()


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'num_classes': 0}, 'expected a model with a classifier'),
        ({'in_chans': 4}, 'images of 1 or 3 channels, got one of 4'),
        ({'pretrained_cfg_overlay': {'interpolation': 'lanczos'}}, 'bicubic or bilinear interpolation .*, got lanczos'),
    ],
)
def test_a_model_that_the_page_cannot_feed_is_rejected(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        web.export_web(timm.create_model('aft_conv_tiny', **KWARGS | change), tmp_path / 'page')
    assert not (tmp_path / 'page').exists()


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Show a folder by Python's own server of files, and give its address."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f'http://127.0.0.1:{server.server_port}/'
    finally:
        server.shutdown()
        server.server_close()


def status(browser: Browser, before: str) -> str:
    """Wait until the page says something that does not begin as before."""
    text = "document.querySelector('#status')?.textContent"
    return browser.wait_for(f'!({text} ?? {before!r}).startsWith({before!r}) && {text}', 120)


def choose(browser: Browser, path: Path) -> tuple[str, dict[str, float]]:
    """Choose a file; return what the page says, and the probabilities that it shows."""
    browser.evaluate("document.querySelector('#status').textContent = 'Looking'")
    root = browser.call('DOM.getDocument')['root']['nodeId']
    node = browser.call('DOM.querySelector', nodeId=root, selector='input')['nodeId']
    browser.call('DOM.setFileInputFiles', nodeId=node, files=[str(path)])
    said = status(browser, 'Looking')
    rows = "[...document.querySelectorAll('#result:not([hidden]) meter')].map(x => [x.ariaLabel, x.value])"
    return said, dict(browser.evaluate(rows))


def write_photographs(folder: Path) -> list[Path]:
    """Write a photograph in the forms that a reader may get wrong."""
    upright = photographs(1, (130, 90))[0]
    paths = [folder / name for name in ('plain.jpg', 'rotated.jpg', 'mirrored.jpg', 'transparent.png', 'grey.png')]
    upright.save(paths[0])
    for path, orientation in zip(paths[1:3], (6, 5), strict=True):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        upright.save(path, exif=exif)
    alpha = np.arange(130 * 90).reshape(90, 130) % 256
    Image.fromarray(np.dstack([np.asarray(upright), alpha.astype(np.uint8)])).save(paths[3])
    upright.convert('L').save(paths[4])
    return paths


@pytest.mark.skipif(CHROMIUM is None, reason='needs chromium on PATH')
def test_the_page_says_what_it_lacks(folder, tmp_path):
    with serve(folder) as address, Browser(tmp_path) as browser:
        browser.call('Page.navigate', url=address)
        assert f'run "npm install {web.RUNTIME}"' in status(browser, 'Loading')
        browser.call('Page.navigate', url=(folder / 'index.html').as_uri())
        browser.wait_for("location.protocol == 'file:' && document.readyState == 'complete'", 30)
        # Nothing replaces it: a page of the file system may not load its script.
        time.sleep(0.5)
        assert 'python -m http.server' in browser.evaluate("document.querySelector('#status').textContent")


@pytest.mark.skipif(CHROMIUM is None, reason='needs chromium on PATH')
@pytest.mark.skipif(not RUNTIME.is_dir(), reason=f'needs npm install --no-save {web.RUNTIME} in the checkout')
def test_a_browser_finds_the_probabilities_of_the_command(checkpoint, folder, tmp_path):
    page = shutil.copytree(folder, tmp_path / 'page')
    (page / web.RUNTIME_FOLDER / 'dist').mkdir(parents=True)
    for name in web.RUNTIME_FILES:
        (page / web.RUNTIME_FOLDER / 'dist' / name).symlink_to(RUNTIME / 'dist' / name)
    paths = write_photographs(tmp_path)
    expected = predict.main([*map(str, paths), '--checkpoint', str(checkpoint)])
    with serve(page) as address, Browser(tmp_path) as browser:
        browser.call('Emulation.setDeviceMetricsOverride', width=320, height=800, deviceScaleFactor=1, mobile=True)
        browser.call('Page.navigate', url=address)
        assert status(browser, 'Loading') == 'Ready.'
        for path, row in zip(paths, expected, strict=True):
            said, found = choose(browser, path)
            assert said.startswith(f'{path.name}: {row["classes"][0]["class"]}, ')
            likely = {each['class']: each['probability'] for each in row['classes']}
            assert list(found) == list(likely)
            assert list(found.values()) == pytest.approx(list(likely.values()), abs=1e-5), path.name
        assert browser.evaluate('document.documentElement.scrollWidth') == 320
        browser.evaluate(DROP)
        assert status(browser, 'Looking') == 'note.txt is no image that this browser can decode.'
        assert browser.evaluate("document.querySelector('#result').hidden")
