"""`python -m aft_vision` without a script."""

import pytest

from aft_vision.__main__ import main


@pytest.mark.parametrize(('arguments', 'code', 'message'), [([], 2, ''), (['none.py'], 2, 'none.py'), (['-h'], 0, '')])
def test_without_a_script_it_says_how_it_is_used(capsys, arguments, code, message):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == code
    output = capsys.readouterr()
    assert message in output.err
    assert message or 'python -m aft_vision [--import MODULE_OR_FILE ...] SCRIPT' in output.out
