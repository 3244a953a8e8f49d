"""The notebook of the guide runs on some photographs of the tests, at two image sizes."""

from pathlib import Path

import nbformat
import pytest
from helpers import CLOTHING
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / 'docs' / 'guide' / 'train_on_your_photographs.ipynb'


def link_photographs(folder: Path, counts: dict[str, int]) -> Path:
    """Make a folder with the first photographs of each class of some splits."""
    for split, count in counts.items():
        for source in sorted((CLOTHING / split).iterdir()):
            target = folder / split / source.name
            target.mkdir(parents=True)
            for file in sorted(source.iterdir())[:count]:
                (target / file.name).symlink_to(file)
    return folder


def set_values(notebook: nbformat.NotebookNode, values: dict[str, str]) -> None:
    """Replace assignments of the settings, each of which must be there once."""
    settings = next(cell for cell in notebook.cells if cell.id == 'settings')
    lines = settings.source.splitlines()
    for name, value in values.items():
        (place,) = (i for i, line in enumerate(lines) if line.startswith(f'{name} = '))
        lines[place] = f'{name} = {value}'
    settings.source = '\n'.join(lines)


@pytest.mark.slow
@pytest.mark.parametrize('size', [128, 256])
def test_the_notebook_trains_a_model_and_writes_its_report(size, tmp_path):
    images = link_photographs(tmp_path / 'images', {'train': 4, 'validation': 1})
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    paths = {'IMAGES': repr(str(images)), 'RUN': repr(str(tmp_path / 'run'))}
    set_values(notebook, {'SIZE': str(size), 'EPOCHS': '2', **paths})
    NotebookClient(notebook, timeout=600, resources={'metadata': {'path': str(NOTEBOOK.parent)}}).execute()
    report = (tmp_path / 'run' / 'report.html').read_text()
    assert all(f'<h2>{title}</h2>' in report for title in ('Model', 'Training', 'Position biases'))
    assert f'{size} \u00d7 {size} pixels, {size // 16} \u00d7 {size // 16} tokens' in report
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == 'code'}
    table = ''.join(output.get('text', '') for output in outputs['sizes'])
    assert '128x128' in table
    assert '256x256' in table
    assert any('image/png' in output.get('data', {}) for output in outputs['curves'])


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == 'code')
