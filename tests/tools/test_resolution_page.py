"""Tables of published runs at several image sizes."""

import json
from pathlib import Path

import pytest

from tools import resolution_page

ORIGIN = '--images a --commit b --processor c'.split()
PAGE = '# Sizes\n\n<!-- sizes: written by make results -->\n<!-- end -->\n\nwords\n'


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / 'docs' / 'results'
    folder.mkdir(parents=True)
    (folder.parent / 'images').mkdir()
    (folder / resolution_page.PAGE).write_text(PAGE)
    return folder


def write_grid(path: Path, runs: dict[str, dict[int, float]], width: int = 0, train_size: int = 96) -> str:
    tables = [
        {
            'name': name,
            'checkpoint': f'/somewhere/{name}',
            'train_size': [train_size] * 2,
            'sizes': [
                {'height': side, 'width': width or side, 'top1': top1, 'samples': 2500} for side, top1 in sizes.items()
            ],
        }
        for name, sizes in runs.items()
    ]
    path.write_text(json.dumps({'checkpoints': tables}))
    return str(path)


def test_the_tables_have_a_line_a_row_and_a_column_a_size(docs: Path, tmp_path: Path):
    runs = {'conv_seed0': {96: 50.0, 128: 60.0}, 'conv_seed1': {96: 52.0, 128: 62.0}, 'deit_seed0': {96: 50.0}}
    where = ['--docs', str(docs), '--commit', 'abc', '--processor', 'This']
    resolution_page.main([write_grid(tmp_path / 'grid.json', runs), '--images', 'squares_160', *where])
    text = (docs / resolution_page.PAGE).read_text()
    assert '| model | runs | 96 px | 128 px |\n' in text
    assert '| AFT-conv | 2 | 51.00 +- 1.41 | 61.00 +- 1.41 |\n| DeiT | 1 | 50.00 | - |\n' in text
    # The square root of 50 * 50 / 2500 is 1, that of 62 * 38 / 2500 is 0.97.
    for words in ('of 2,500 validation images (squares 160)', 'is 1.0 points', 'This, commit abc.'):
        assert words in ' '.join(text.split())
    assert '(../images/imagenette_sizes.png)\n\nBars: the standard error of one run' in text
    assert text.endswith('words\n')
    assert (docs.parent / 'images' / resolution_page.PICTURE).stat().st_size > 10_000
    assert 'somewhere' not in (docs / 'data' / 'imagenette_sizes' / 'squares_160.json').read_text()
    # Without a file, the page is the same; with another one, both tables are on it.
    resolution_page.main(['--docs', str(docs)])
    assert (docs / resolution_page.PAGE).read_text() == text
    other = write_grid(tmp_path / 'other.json', {'deit_seed0': {224: 40.0}})
    resolution_page.main([other, '--images', 'larger', *where])
    assert '| DeiT | 1 | 40.00 |' in (docs / resolution_page.PAGE).read_text()


NATIVE = {'max_tokens': 96, 'top1': 70.0, 'samples': 2500}
MEAN = {'height': 128, 'width': 128, 'scales': [[96, 96], [128, 128]], 'top1': 70.0, 'samples': 2500}


@pytest.mark.parametrize(
    ('runs', 'width', 'more', 'message'),
    [
        ({}, 0, {}, 'expected eval_resolution_grid.json'),
        ({'best.pth': {96: 50.0}}, 0, {}, 'expected runs named ROW_seedN, got best.pth'),
        ({'conv_seed0': {96: 50.0}}, 128, {}, 'expected squares, got 96x128'),
        ({'conv_seed0': {96: 50.0}}, 0, NATIVE, 'expected squares, got native 96; evaluate them apart'),
        ({'conv_seed0': {96: 50.0}}, 0, MEAN, r'expected squares, got 96\+128; evaluate them apart'),
        ({'conv_seed0': {96: 50.0}}, 0, {'flip': True}, 'got --flip'),
        ({'conv_seed0': {96: 50.0}}, 0, {'pad': True}, 'got --pad'),
    ],
)
def test_other_evaluations_are_refused(docs: Path, tmp_path: Path, runs, width: int, more, message: str):
    grid = Path(write_grid(tmp_path / 'grid.json', runs, width))
    content = json.loads(grid.read_text())
    if 'top1' in more:
        content['checkpoints'][0]['sizes'].append(more)
    else:
        content |= more
    grid.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        resolution_page.main([str(grid), '--docs', str(docs), *ORIGIN])
    assert (docs / resolution_page.PAGE).read_text() == PAGE
    assert not (docs / 'data').exists()


@pytest.mark.parametrize(
    ('content', 'message'),
    [('{', r'a JSON file, got .*grid\.json'), ('[]', r'a JSON object in .*grid\.json, got a list')],
)
def test_a_damaged_file_is_named(docs: Path, tmp_path: Path, content: str, message: str):
    path = tmp_path / 'grid.json'
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        resolution_page.main([str(path), '--docs', str(docs), *ORIGIN])


def test_without_data_no_picture_is_shown(docs: Path):
    assert resolution_page.main(['--docs', str(docs)]) == []
    text = (docs / resolution_page.PAGE).read_text()
    assert 'Nothing has been evaluated yet.' in text
    assert resolution_page.PICTURE not in text
    assert not (docs.parent / 'images' / resolution_page.PICTURE).exists()


def test_runs_of_other_sizes_or_images_are_not_in_one_table(docs: Path, tmp_path: Path):
    path, arguments = tmp_path / 'grid.json', ['--docs', str(docs), *ORIGIN]
    tables = [
        *json.loads(Path(write_grid(path, {'conv_seed0': {96: 50.0}})).read_text())['checkpoints'],
        *json.loads(Path(write_grid(path, {'deit_seed0': {96: 50.0}}, train_size=128)).read_text())['checkpoints'],
    ]
    path.write_text(json.dumps({'checkpoints': tables}))
    with pytest.raises(ValueError, match='expected one size of training, got 128 and 96; evaluate them apart'):
        resolution_page.main([str(path), *arguments])
    tables[1]['train_size'] = [96, 96]
    tables[1]['sizes'][0]['samples'] = 800
    path.write_text(json.dumps({'checkpoints': tables}))
    with pytest.raises(ValueError, match='expected one number of images, got 2,500 and 800'):
        resolution_page.main([str(path), *arguments])
    assert not (docs / 'data').exists()


def test_a_file_needs_its_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        resolution_page.main([str(tmp_path / 'grid.json'), '--images', 'a', '--commit', 'b'])
    message = 'FILE needs --images, --commit and --processor, got none for --processor'
    assert message in capsys.readouterr().err
