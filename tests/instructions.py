"""Which compiled forms run on this processor: each kind of product, in the vectors of each set of instructions.

As a command it compiles the kernels for every set, with warnings as errors, and prints the table.
"""

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from aft_vision import ops  # noqa: F401
from aft_vision.ops.common import build, cpp
from aft_vision.ops.declaration import OPERATIONS

KINDS = {'single': cpp.SINGLE, 'pairs': cpp.PAIRS, 'tiles': cpp.TILES}
# Inputs of each form, as the arguments of `make_inputs`: blocks of rows, strips and steps that they fill and do not
# fill. Those of the first group multiply bfloat16 in several ways.
MULTIPLIED: dict[tuple[str, str], list[tuple[Any, ...]]] = {
    ('aft_full', 'cpp'): [(17, 40), (33, 17)],
    ('aft_conv', 'conv'): [((7, 8), 24, 5, 2), ((3, 33), 34, 3, 2)],
    ('aft_conv', 'wide'): [((5, 15), 36, 5, 18)],
    ('aft_local_causal', 'cpp'): [(17, 33, 60), (70, 5, 3)],
}
OTHERS: dict[tuple[str, str], list[tuple[Any, ...]]] = {
    ('aft_conv', 'depthwise'): [((5, 7), 67, 3)],
    ('aft_onehot', 'cpp'): [((5, 7), 66, 4)],
    ('aft_axial', 'cpp'): [((6, 5), 60, (9, 2), 10), ((3, 5), 67, (2, 9))],
    ('aft_simple_causal', 'cpp'): [(65, 37)],
}


class Place(NamedTuple):
    """A form in a kind of products, in the library for a set of instructions."""

    operation: str
    form: str
    kind: str
    instructions: str


def places() -> list[Place]:
    """Return all that exist."""
    return [
        Place(*form, kind, name)
        for name in build.INSTRUCTIONS
        for form in MULTIPLIED | OTHERS
        for kind in (KINDS if form in MULTIPLIED else ['single'])
    ]


def how_it_runs(place: Place) -> str:
    """Return 'native', 'emulated' (in loops of the same arithmetic), or 'not run': the processor lacks its vectors."""
    if place.instructions not in build.runnable_instructions():
        return 'not run'
    if place.kind == 'pairs':
        return 'native' if 'bf16' in place.instructions else 'emulated'
    if place.kind == 'tiles':
        has_tiles = 'amx' in place.instructions and cpp.native_operands() == cpp.TILES
        return 'native' if has_tiles else 'emulated'
    return 'native'


def find_missing() -> list[tuple[str, str]]:
    """Return the compiled forms that have no inputs here."""
    forms = [(x.name, form.name) for x in OPERATIONS.values() for form in x.forms if form.backend == 'cpp']
    return [form for form in forms if form not in MULTIPLIED | OTHERS]


def main() -> None:
    """Compile every library strictly, and print how each form runs in it."""
    for name in build.INSTRUCTIONS:
        start = time.perf_counter()
        try:
            path = build.build_library(name, rebuild=True, strict=True)
        except RuntimeError as error:
            if not build.is_unknown(error):
                raise
            print(f'{name}: the compiler does not know it ({error})')
            continue
        print(f'{name}: {time.perf_counter() - start:.1f} s, {Path(path).stat().st_size} bytes')
    print(f'{"form":24} {"product":8} ' + ' '.join(f'{name:15}' for name in build.INSTRUCTIONS))
    for form in MULTIPLIED | OTHERS:
        for kind in KINDS if form in MULTIPLIED else ['single']:
            found = [how_it_runs(Place(*form, kind, name)) for name in build.INSTRUCTIONS]
            print(f'{" ".join(form):24} {kind:8} ' + ' '.join(f'{how:15}' for how in found))


if __name__ == '__main__':
    sys.exit(main())
