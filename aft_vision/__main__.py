"""Run a script with the `aft_*` models registered with timm.

python -m aft_vision [--import MODULE_OR_FILE ...] SCRIPT [ARGUMENT ...]

SCRIPT is a file, such as validate.py, train.py, benchmark.py or onnx_export.py of timm's repository. It runs as
`python SCRIPT ARGUMENT ...` would. Before it, --import imports a module of yours that registers other models.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from aft_vision.plugins import import_plugins


def main(argv: Sequence[str] | None = None) -> None:
    """Run a script as `__main__`.

    Raises:
        SystemExit: no script is named, there is no such file, or the script exits.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    imports = []
    while arguments[:1] == ['--import'] and len(arguments) > 1:
        imports.append(arguments[1])
        arguments = arguments[2:]
    if not arguments or arguments[0] in ('-h', '--help'):
        print(__doc__)
        raise SystemExit(0 if arguments else 2)
    script = Path(arguments[0])
    if not script.is_file():
        print(f'error: expected a script, got {script}, which is no file', file=sys.stderr)
        raise SystemExit(2)
    try:
        import_plugins(imports)
    except (ValueError, ImportError) as error:
        print(f'error: {error}', file=sys.stderr)
        raise SystemExit(2) from None
    sys.argv = arguments
    # Like any Python script, it can import modules next to it.
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name='__main__')


if __name__ == '__main__':
    main()
