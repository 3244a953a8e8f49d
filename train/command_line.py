"""The parser of the commands of train and tools, and their one-line errors; it imports nothing that takes seconds."""

import argparse
import difflib
import io
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

# The home folder at the start of a path, or of timm's name of a folder.
HOME = re.compile(r'\A(?P<scheme>(?:local-dir:)?)(?:\$HOME|\$\{HOME\}|(?P<user>~[^/]*))(?=/|$)')
# A value out of range or a damaged file, a missing path, a package of an extra, a run that diverged. Any other error,
# such as an AttributeError or a KeyError, is a bug and keeps its traceback.
USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError)
# Torch's words for a loading process that the system has ended, almost always for lack of memory.
ENDED = re.compile(r'DataLoader worker (\(pid(\(s\))? [\d, ]+\) )?(is killed|exited)')
EXIT_CODE = 2
# In seconds. torchrun ends the other processes within 0.1 s of the first that fails.
ERROR_DELAY = 2.0


def expand_home(text: str) -> str:
    """Expand `~`, `~user` and `$HOME` at the start of a text, as a shell does where an option is a word of its own."""
    return HOME.sub(lambda match: match['scheme'] + os.path.expanduser(match['user'] or '~'), text)


def program_name() -> str | None:
    """Return the running command, `aft-vision train` or `python -m train.imagenet`, or None if it is neither."""
    module = _module_name()
    return _console_name() or (None if module is None else f'python -m {module}')


def _console_name() -> str | None:
    # Set by aft_vision_cli.main.
    return getattr(sys.modules['__main__'], 'PROGRAM', None)


def _module_name() -> str | None:
    spec = getattr(sys.modules['__main__'], '__spec__', None)
    return None if spec is None else str(spec.name).removesuffix('.__main__')


def import_plugins(*names: str) -> None:
    """Import modules of others, unless the command has not imported the package yet and only looks for --help."""
    if 'aft_vision' in sys.modules:
        from aft_vision import plugins

        plugins.import_plugins(names)


class Import(argparse.Action):
    """A module or a file to import, of which a command line may name several."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        import_plugins(values)
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest, None) or ()), values])


class CommandParser(argparse.ArgumentParser):
    """A parser with an unformatted description, --import, --debug, and one-line errors.

    Paths may begin with `~` or `$HOME`. A command parses its arguments once before its slow imports too, so that --help
    and errors are immediate; modules of others are imported when it parses them again.
    """

    def __init__(self, description: str | None, prog: str | None = None) -> None:
        if description is not None and (console := _console_name()):
            description = description.replace(f'python -m {_module_name()}', console)
            # torchrun takes another program than Python by an option.
            description = description.replace(f'-m {_module_name()}', f'--no-python {console}')
        super().__init__(
            prog or program_name(), description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        # Also of options without a type, which may be a path or a name.
        self.register('type', None, expand_home)
        self.register('type', Path, lambda text: Path(expand_home(text)))
        self.add_argument(
            '--import',
            dest='imports',
            action=Import,
            metavar='MODULE_OR_FILE',
            help='import it first, such as a file with a mixer of yours; may be given several times',
        )
        self.add_argument('--debug', action='store_true', help='show the traceback of an error')

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = sys.argv[1:] if args is None else list(args)
        import_plugins()
        parsed, rest = super().parse_known_args(args, namespace)
        # The rest has the options of a parser within another one, and overrides, which are parsed after the options.
        if options := [each for each in rest if each.startswith('--')]:
            self.error(f'unrecognized arguments: {" ".join(options)}')
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        # argparse does not say which option it does not know if another one is missing.
        for given in (each.partition('=')[0] for each in getattr(self, '_given', ()) if each.startswith('--')):
            near = difflib.get_close_matches(given, self._option_string_actions, n=1)
            if near and not any(option.startswith(given) for option in self._option_string_actions):
                message = f'there is no option {given}; did you mean {near[0]}?'
                break
        self.exit(2, f'error: {message}; --help shows the usage\n')


def parse_args(
    description: str | None, example: str, argv: Sequence[str] | None = None, evaluates: bool = True
) -> argparse.Namespace:
    """Parse the command line of a trainer.

    Args:
        example: The config to suggest if none is given.
        evaluates: Whether the trainer has --eval.
    """
    parser = CommandParser(description)
    parser.add_argument('--config', type=Path, help='the YAML experiment, or the name of one of the package')
    if evaluates:
        parser.add_argument('--eval', action='store_true', help='evaluate, and train nothing')
    parser.add_argument('--keys', action='store_true', help='print every key of an experiment and exit')
    parser.add_argument('--quiet', action='store_true', help='no progress bar')
    parser.add_argument('overrides', nargs='*', metavar='section.key=value', help='changes to the experiment')
    args = parser.parse_intermixed_args(argv)
    if args.config is None and not args.keys:
        parser.error(f'expected an experiment, got none; try --config {example}')
    if args.imports:
        # The run remembers them.
        args.overrides.append(f'run.imports={json.dumps(args.imports)}')
    return args


def run_command(main: Callable[[Sequence[str] | None], Any], argv: Sequence[str] | None = None) -> None:
    """Run a command, and print an error that the user can fix as one line `error: ...`.

    Args:
        main: Function of the command; takes the command line and raises errors.
        argv: The command line, by default the process's. With --debug the traceback is printed too.

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
    """Return whether a user can fix the error."""
    # Memory has run out, or a file of safetensors is damaged.
    by_name = type(error).__name__ in ('OutOfMemoryError', 'SafetensorError')
    return isinstance(error, USER_ERRORS) or by_name or ENDED.match(_message(error)) is not None


def _message(error: BaseException) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    in_socket = bool(frames) and frames[-1].f_globals.get('__name__') == 'multiprocessing.connection'
    if in_socket and isinstance(error, (EOFError, ConnectionError)):
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
