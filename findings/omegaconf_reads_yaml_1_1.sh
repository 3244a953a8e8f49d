#!/usr/bin/env bash
# omegaconf 2.4.0: a value of the command line is YAML 1.1, so a date with an underscore is a number.
#
# `run=20240501_1200` becomes 202405011200, `0123` becomes 83 and `12:30:00` 45000, also in a field that is declared as text,
# which then has the digits of that number. One guesses that text stays as it is typed. Who names runs by date or folders by
# number meets it.
#
# Seen: 20240501_1200 -> 202405011200, 0123 -> 83, 12:30:00 -> 45000, 1.10 -> 1.1
PACKAGES='omegaconf==2.4.0'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
from dataclasses import dataclass

from omegaconf import OmegaConf


@dataclass
class Run:
    name: str = ''


typed = ('20240501_1200', '0123', '12:30:00', '1.10')
seen = [OmegaConf.merge(OmegaConf.structured(Run), OmegaConf.from_dotlist([f'name={text}'])).name for text in typed]
print(', '.join(f'{text} -> {name}' for text, name in zip(typed, seen)))
raise SystemExit(seen != ['202405011200', '83', '45000', '1.1'])
P
