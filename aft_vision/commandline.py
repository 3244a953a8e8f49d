"""One-line errors for commands."""

import io
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

# A value out of range or a damaged file, a missing path, a package of an extra, a run that diverged. Any other error,
# such as an AttributeError or a KeyError, is a bug and keeps its traceback.
USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError)
# Torch's words for a loading process that the system has ended, almost always for lack of memory.
ENDED = re.compile(r'DataLoader worker (\(pid(\(s\))? [\d, ]+\) )?(is killed|exited)')
EXIT_CODE = 2
# In seconds. torchrun ends the other processes within 0.1 s of the first that fails.
ERROR_DELAY = 2.0


def run_command(main: Callable[[Sequence[str] | None], Any], argv: Sequence[str] | None = None) -> None:
    """Run a command, and print an error that the user can fix as one line `error: ...`.

    Args:
        main: Function of the command; takes the command line and raises errors.
        argv: The command line, by default that of the process. With --debug the traceback is printed too.

    Raises:
        SystemExit: the command failed, with code 2, or was stopped by a signal, with code 128 plus its number.
    """
    argv = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == 'strict':
        # Names of files that are not UTF-8 are printed byte by byte, as `ls` does.
        sys.stdout.reconfigure(errors='surrogateescape')
    try:
        main(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:
        # The reader of the output has ended, such as `head`; Python would raise again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except Exception as error:
        if not is_user_error(error):
            raise
        if '--debug' in argv:
            traceback.print_exc()
        if process_number() > 0:
            # An error of all processes is printed once, by the first: torchrun ends this one in the meantime.
            time.sleep(ERROR_DELAY)
        where = f'process {process_number()}: ' if process_number() > 0 else ''
        print(f'error: {where}{one_line(error)}', file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CODE) from None


def print_once(line: str) -> None:
    """Print a line to stderr, in the first process only."""
    if process_number() == 0:
        print(line, file=sys.stderr, flush=True)


def process_number() -> int:
    """Return the number of this process among those that torchrun or SLURM started."""
    return int(os.environ.get('RANK', os.environ.get('SLURM_PROCID', '0')))


def is_user_error(error: BaseException) -> bool:
    """Return whether a user can fix the error; running out of memory counts."""
    by_memory = type(error).__name__ == 'OutOfMemoryError' or ENDED.match(_message(error)) is not None
    return isinstance(error, USER_ERRORS) or by_memory


def _message(error: BaseException) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames and frames[-1].f_globals.get('__name__') == 'multiprocessing.connection':
        # Its socket closes before torch sees that a loading process has ended.
        return f'DataLoader worker exited ({str(error) or type(error).__name__})'
    return str(error) or type(error).__name__


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line."""
    message = _message(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        message = f'{error.filename}: {error.strerror}'
    if 'Traceback (most recent call last)' in message:
        # A loading process sends its traceback; the message follows the name of its last error.
        message = re.split(r'^[\w.]*(?:Error|Exception): ', message, flags=re.MULTILINE)[-1]
    message = ' '.join(message.split())
    if ENDED.match(message):
        message += (
            '; the system ends processes for lack of memory, of which fewer (data.num_workers, --workers) take less'
        )
    return message
