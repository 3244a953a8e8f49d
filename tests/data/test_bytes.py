import bz2
import gzip
import lzma
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from aft_vision.data import bytes as texts
from aft_vision.data import read_text

CONTENT = bytes(range(256)) * 2


def write(folder: Path, kind: str, content: bytes = CONTENT, name: str = 'text') -> Path:
    path = folder / (name + kind)
    if kind == '.zip':
        with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
            archive.writestr('folder/', '')
            archive.writestr(name, content)
    else:
        path.write_bytes(lzma.compress(content) if kind == '.xz' else content)
    return path


@pytest.mark.parametrize('kind', ['', '.txt', '.zip', '.xz'])
def test_a_shorter_file_is_divided_in_proportion_and_that_is_said(kind, tmp_path):
    text = read_text(write(tmp_path, kind))
    assert [len(part) for part in text[:3]] == [460, 26, 26]
    np.testing.assert_array_equal(np.concatenate(text[:3]), np.frombuffer(CONTENT, np.uint8))
    assert text.note.startswith('512 characters, not 100,000,000: the first 90 % (460) train')


def test_the_parts_of_a_whole_file_are_those_of_the_benchmark(tmp_path, monkeypatch):
    assert texts.PARTS == (90_000_000, 5_000_000, 5_000_000)
    monkeypatch.setattr(texts, 'PARTS', (300, 150, 62))
    text = read_text(write(tmp_path, ''))
    assert [len(part) for part in text[:3]] == [300, 150, 62]
    assert text.note == ''
    longer = read_text(write(tmp_path, '', CONTENT + b'more'))
    assert [len(part) for part in longer[:3]] == [300, 150, 62]
    assert longer.note == '516 characters, of which the first 512 are used'


@pytest.mark.skipif('AFT_DATA' not in os.environ, reason='needs AFT_DATA with enwik8_first4154368.xz')
def test_the_beginning_of_enwik8_at_hand_is_read():
    text = read_text(Path(os.environ['AFT_DATA']) / 'enwik8_first4154368.xz')
    assert len(text.train) == 4_154_368 * 90 // 100
    assert text.train[:10].tobytes() == b'<mediawiki'


def test_text8_has_27_symbols(tmp_path):
    content = b' abcdefghijklmnopqrstuvwxyz'
    text = read_text(write(tmp_path, '', content), 'text8')
    np.testing.assert_array_equal(np.concatenate(text[:3]), np.arange(27))
    assert texts.decode(np.concatenate(text[:3]), 'text8') == content
    assert texts.decode(texts.encode(CONTENT, 'bytes'), 'bytes') == CONTENT


def test_a_byte_outside_the_vocabulary_is_named_with_its_place(tmp_path):
    path = write(tmp_path, '', b'twenty letters and a B then c')
    with pytest.raises(ValueError, match=r"27 symbols of text8 .* in .*text, got 66 \('B'\) at byte 21"):
        read_text(path, 'text8')


@pytest.mark.parametrize('kind', ['.zip', '.xz'])
def test_a_damaged_file_is_named(kind, tmp_path):
    path = write(tmp_path, kind)
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b'other', content[:200] + b'\xff\x00\xff' + content[203:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf'expected a whole file, got .*text\{kind}: '):
            read_text(path)


def test_an_archive_of_several_files_must_have_one_of_its_own_name(tmp_path):
    path = write(tmp_path, '.zip')
    with zipfile.ZipFile(path, 'a') as archive:
        archive.writestr('other', b'x')
    assert len(read_text(path).train) == 460
    path.rename(tmp_path / 'renamed.zip')
    with pytest.raises(ValueError, match=r'expected 1 file, or one called renamed, in .*, got 2'):
        read_text(tmp_path / 'renamed.zip')


def test_what_is_no_text_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=r'a file of text, got .*nothing, which is none'):
        read_text(tmp_path / 'nothing')
    with pytest.raises(ValueError, match=r'at least 20 bytes in .*, got 3'):
        read_text(write(tmp_path, '', b'abc'))
    with pytest.raises(ValueError, match="bytes or text8, got 'words'"):
        read_text(write(tmp_path, ''), 'words')
    for kind, packed in (('.gz', gzip.compress(bytes(100))), ('', bz2.compress(bytes(100)))):
        with pytest.raises(ValueError, match=r'expected a text, plain, .* which is packed: unpack it'):
            read_text(write(tmp_path, kind, packed))
