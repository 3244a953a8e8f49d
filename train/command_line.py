"""The parser of the commands of train and tools; it imports nothing that takes seconds."""

import argparse
import difflib
import os
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

# The home folder at the start of a path, or of timm's name of a folder.
HOME = re.compile(r'\A(?P<scheme>(?:local-dir:)?)(?:\$HOME|\$\{HOME\}|(?P<user>~[^/]*))(?=/|$)')


def expand_home(text: str) -> str:
    """Expand `~`, `~user` and `$HOME` at the start of a text, as a shell does where an option is a word of its own."""
    return HOME.sub(lambda found: found['scheme'] + os.path.expanduser(found['user'] or '~'), text)


def program_name() -> str | None:
    """Return the running command, `aft-vision train` or `python -m train.imagenet`, or None if it is neither."""
    module = _module_name()
    return _console_name() or (None if module is None else f'python -m {module}')


def _console_name() -> str | None:
    # Set by tools.console.
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
        found, rest = super().parse_known_args(args, namespace)
        # The rest has the options of a parser within another one, and overrides, which are parsed after the options.
        if options := [each for each in rest if each.startswith('--')]:
            self.error(f'unrecognized arguments: {" ".join(options)}')
        return found, rest

    def error(self, message: str) -> NoReturn:
        # argparse does not say which option it does not know if another one is missing.
        for given in (each.partition('=')[0] for each in getattr(self, '_given', ()) if each.startswith('--')):
            near = difflib.get_close_matches(given, self._option_string_actions, n=1)
            if near and not any(option.startswith(given) for option in self._option_string_actions):
                message = f'there is no option {given}; did you mean {near[0]}?'
                break
        self.exit(2, f'error: {message}; --help shows the usage\n')
