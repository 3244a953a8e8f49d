"""The command as a module: `python -m aft_vision_cli`, or `python -m tools.console` in a checkout."""

from . import main

main()
