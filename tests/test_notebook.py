"""The notebook of the guide runs on some photographs of the tests."""

import io
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import nbformat
from helpers import draw_coarsely, link_photographs
from IPython.core.interactiveshell import InteractiveShell
from matplotlib import pyplot
from traitlets.config import Config

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / 'docs' / 'guide' / 'train_on_your_photographs.ipynb'
EXPERIMENT = 'configs/finetune.yaml'


def read_cells(experiment: Path, values: dict[str, str]) -> dict[str, str]:
    """The code by cell, with another experiment and other values of some settings, each of which must be there once."""
    cells = {cell.id: cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == 'code'}
    lines = cells['settings'].splitlines()
    for name, value in values.items():
        (place,) = (i for i, line in enumerate(lines) if line.startswith(f'{name} = '))
        lines[place] = f'{name} = {value}'
    before, after = cells['train'].split(EXPERIMENT)
    return {**cells, 'settings': '\n'.join(lines), 'train': f'{before}{experiment}{after}'}


def execute(cells: dict[str, str]) -> dict[str, tuple[str, dict[str, object]]]:
    """Run cells by IPython in this process, where everything is imported; return what each prints and shows."""
    # Not as __main__, which is pytest's.
    shell = InteractiveShell(config=Config(HistoryManager={'enabled': False}), user_module=ModuleType('notebook'))
    outputs = {}
    for name, source in cells.items():
        with redirect_stdout(io.StringIO()) as printed:
            result = shell.run_cell(source)
        result.raise_error()
        outputs[name] = printed.getvalue(), shell.display_formatter.format(result.result)[0]
    return outputs


def test_the_notebook_trains_a_model_and_writes_its_report(tmp_path, monkeypatch):
    # Another one than that of the notebook: every cell follows the setting.
    size = 128
    monkeypatch.chdir(NOTEBOOK.parent)
    draw_coarsely(monkeypatch)
    images, experiment = link_photographs(tmp_path / 'images', 6, 2, classes=3), tmp_path / 'small.yaml'
    # A small model, because the report has a picture for each layer and head. The weights are for another one.
    small = 'model: {name: aft_conv_nano, depth: 1, embed_dim: 16, num_heads: 2, pretrained: false}'
    short = 'schedule: {min_updates: 0, warmup_epochs: 0}\nrun: {reset_head: false, throughput_batches: 0}'
    here = 'data: {num_workers: 0}'
    experiment.write_text(f'base: {ROOT / EXPERIMENT}\n{small}\n{short}\n{here}\n')
    paths = {'IMAGES': repr(str(images)), 'RUN': repr(str(tmp_path / 'run'))}
    outputs = execute(read_cells(experiment, {'SIZE': str(size), 'EPOCHS': '1', **paths}))
    pyplot.close('all')
    report = (tmp_path / 'run' / 'report.html').read_text()
    assert all(f'<h2>{title}</h2>' in report for title in ('Model', 'Training', 'Position biases'))
    assert f'{size} × {size} pixels, {size // 8} × {size // 8} tokens' in report
    printed, _ = outputs['sizes']
    assert '96x96' in printed
    assert '128x128' in printed
    assert 'image/png' in outputs['curves'][1]


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == 'code')
