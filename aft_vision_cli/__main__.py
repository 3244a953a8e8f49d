"""The command as a module: `python -m aft_vision_cli`."""

from . import main

main()
