"""Continuing text from the command line."""

import json
from pathlib import Path

import pytest
from small_decoders import randomize

from aft_vision.models import create_decoder, save_decoder
from tools import continue_text


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp('char') / 'model.pt'
    save_decoder(randomize(create_decoder('aft_local_char', context=32, depth=1, dim=8, window=5)), path)
    return path


def test_texts_begin_with_the_prompt(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = ['--checkpoint', str(checkpoint), '--length', '20', '--num-samples', '3', '--top-k', '50']
    texts = continue_text.main([*command, '--prompt', 'Où est ', '--out', str(tmp_path / 'out.json')])
    prompt = 'Où est '.encode()
    assert len(set(texts)) == 3
    assert all(len(text) == 20 and text.startswith(prompt) for text in texts)
    written = json.loads((tmp_path / 'out.json').read_text())
    assert written['prompt'] == 'Où est '
    assert [bytes.fromhex(row['hex']) for row in written['texts']] == texts
    assert capsys.readouterr().out.count('Où est ') == 3
    (tmp_path / 'start.txt').write_bytes(prompt)
    assert continue_text.main([*command, '--prompt-file', str(tmp_path / 'start.txt')]) == texts
    assert continue_text.main([*command, '--prompt', 'Où est ', '--seed', '7']) != texts


def test_a_text_without_a_prompt_has_the_length_of_the_context(checkpoint: Path):
    assert [len(text) for text in continue_text.main(['--checkpoint', str(checkpoint)])] == [32]


def test_a_model_of_other_tokens_is_named(tmp_path: Path):
    save_decoder(create_decoder('aft_simple_char', context=8, depth=1, dim=4, vocab_size=30), tmp_path / 'char.pt')
    with pytest.raises(ValueError, match=r'expected a model of 256 \(bytes\) or 27 \(text8\) tokens, got one of 30'):
        continue_text.main(['--checkpoint', str(tmp_path / 'char.pt')])


def test_a_model_of_text8_has_its_letters(tmp_path: Path):
    save_decoder(create_decoder('aft_simple_char', context=9, depth=1, dim=4, vocab_size=27), tmp_path / 'char.pt')
    (text,) = continue_text.main(['--checkpoint', str(tmp_path / 'char.pt'), '--prompt', 'a zebra'])
    assert text.startswith(b'a zebra')
    assert len(text) == 9
    assert set(text) <= set(b' abcdefghijklmnopqrstuvwxyz')
    with pytest.raises(ValueError, match='the prompt'):
        continue_text.main(['--checkpoint', str(tmp_path / 'char.pt'), '--prompt', 'A'])
