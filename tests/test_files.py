"""Files are replaced whole or not at all."""

import json
import os
import stat
from pathlib import Path

import pytest

from aft_vision.files import keeping_rows, replacing, write_json


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / 'result.json'
    write_json(path, {'top1': 1})
    with pytest.raises(TypeError, match='not JSON serializable'):
        write_json(path, {'top1': 2, 'model': object()})
    with pytest.raises(UnicodeEncodeError), replacing(path) as file:
        file.write_text('{"top1": "\udc80"}', encoding='utf-8')
    assert json.loads(path.read_text()) == {'top1': 1}
    assert os.listdir(tmp_path) == ['result.json']


def test_links_and_permissions_stay(tmp_path: Path):
    kept, link = tmp_path / 'kept.json', tmp_path / 'link.json'
    kept.write_text('{}')
    kept.chmod(0o640)
    link.symlink_to(kept)
    write_json(link, [1])
    assert link.is_symlink()
    assert json.loads(kept.read_text()) == [1]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o640


def test_a_linked_file_of_which_several_are_kept_stays(tmp_path: Path):
    other, own = tmp_path / 'a' / 'last.pth', tmp_path / 'b' / 'last.pth'
    for folder in (other.parent, own.parent):
        folder.mkdir()
    other.write_text('of a')
    own.symlink_to(other)
    with replacing(own, keep=2) as file:
        file.write_text('of b')
    assert (own.read_text(), other.read_text()) == ('of b', 'of a')
    assert (own.parent / 'last-1.pth').read_text() == 'of a'


def test_a_pipe_is_written_to(tmp_path: Path):
    pipe = tmp_path / 'pipe'
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json(pipe, [2])
    assert json.loads(os.read(reader, 100)) == [2]
    os.close(reader)
    assert pipe.is_fifo()


def test_rows_are_kept_as_they_come_and_replace_an_earlier_result_when_all_are_there(tmp_path: Path):
    path = tmp_path / 'new' / 'rows.jsonl'
    for rows in (1, 2):
        with keeping_rows(path) as keep:
            for row in range(rows):
                keep({'row': row})
                assert (path.parent / 'rows.jsonl.part').read_text().count('\n') == row + 1
        assert [json.loads(line) for line in path.read_text().splitlines()] == [{'row': row} for row in range(rows)]
        assert os.listdir(path.parent) == ['rows.jsonl']


@pytest.mark.parametrize('done', [0, 1])
def test_an_error_between_rows_leaves_the_earlier_result_and_those_that_were_done(tmp_path: Path, done: int, caplog):
    path, part = tmp_path / 'rows.jsonl', tmp_path / 'rows.jsonl.part'
    path.write_text('earlier')

    def interrupted() -> None:
        with keeping_rows(path) as keep:
            for _ in range(done):
                keep('é')
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == 'earlier'
    assert part.exists() == (done > 0) == (f'{part}: 1' in caplog.text)
    assert not done or part.read_text() == '"é"\n'
    # An error before the first row of another try leaves them.
    done, before = 0, part.exists()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert part.exists() is before


def test_a_name_that_is_not_utf_8_is_a_row_that_json_reads(tmp_path: Path):
    name = os.fsdecode(b'caf\xe9.txt')
    with keeping_rows(tmp_path / 'rows.jsonl') as keep:
        keep({'file': name})
    assert json.loads((tmp_path / 'rows.jsonl').read_text(encoding='utf-8')) == {'file': name}


def test_rows_go_to_a_pipe_as_they_come(tmp_path: Path):
    pipe = tmp_path / 'pipe'
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with keeping_rows(pipe) as keep:
        keep(1)
        assert os.read(reader, 100) == b'1\n'
    os.close(reader)
    assert pipe.is_fifo()
