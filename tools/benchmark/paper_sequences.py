"""The rows of AFT Tables 2 and 4 as printed, and the models that they are."""

from typing import Any, NamedTuple


class SequenceRow(NamedTuple):
    """A row as the paper prints it; None where it prints nothing.

    Args:
        config: The file of the row's recipe, without its suffix; None for models that are not ours.
        model: Arguments of `create_decoder`.
        baseline: Place in the table of the Transformer that it is compared with.
        train_bits, test_bits: Per dimension (Table 2) or character (Table 4).
    """

    name: str
    config: str | None
    model: dict[str, Any]
    baseline: int | None
    depth: int | None
    dim: int | None
    heads: int | None
    train_bits: float | None
    test_bits: float | None
    iterations_per_second: float | None
    memory_gb: float | None


class SequenceTable(NamedTuple):
    """A table: its folder of recipes, the tokens of its sequences, their classes, and what the paper says of it."""

    rows: tuple[SequenceRow, ...]
    folder: str
    tokens: int
    measured_on: str


def _deep(name: str, **kwargs: Any) -> dict[str, Any]:
    return {'name': name, 'depth': 24, 'dim': 256, **kwargs}


def _wide(name: str, **kwargs: Any) -> dict[str, Any]:
    return {'name': name, 'depth': 12, 'dim': 512, **kwargs}


_TRANSFORMER = ('transformer_l12_d512', 'transformer_l24_d256')
_PIXEL, _CHAR = dict(window=256, bias_dim=64), dict(window=32, bias_dim=256)

_row = SequenceRow
SEQUENCE_TABLES = {
    2: SequenceTable(
        (
            _row('PixelCNN', None, {}, None, None, None, None, 3.08, 3.14, None, None),
            _row('PixelCNN++', None, {}, None, None, None, None, None, 2.92, None, None),
            _row('PixelSNAIL', None, {}, None, None, None, None, None, 2.85, None, None),
            _row('Sparse Transformer strided', None, {}, None, 128, 256, 2, None, 2.80, None, None),
            _row('Image Transformer local2d', None, {}, 5, 12, 512, 4, None, 2.90, 1.61, 22.3),
            _row(
                'Transformer',
                _TRANSFORMER[0],
                _wide('transformer_pixel', num_heads=4),
                5,
                12,
                512,
                4,
                2.90,
                2.88,
                1.35,
                30.6,
            ),
            _row(
                'Transformer',
                _TRANSFORMER[1],
                _deep('transformer_pixel', num_heads=2),
                6,
                24,
                256,
                2,
                2.90,
                2.86,
                1.36,
                30.4,
            ),
            _row(
                'AFT-local-256',
                'aft_local_256_l12_d512',
                _wide('aft_local_pixel', **_PIXEL),
                5,
                12,
                512,
                1,
                2.78,
                2.80,
                1.68,
                11.4,
            ),
            _row(
                'AFT-local-256',
                'aft_local_256_l24_d256',
                _deep('aft_local_pixel', **_PIXEL),
                6,
                24,
                256,
                1,
                2.75,
                2.74,
                1.67,
                12.8,
            ),
            _row('AFT-simple', 'aft_simple_l24_d256', _deep('aft_simple_pixel'), 6, 24, 256, 1, 2.82, 2.89, 2.15, 9.5),
        ),
        folder='pixel',
        tokens=3072,
        measured_on='eight V100, batch of 32',
    ),
    4: SequenceTable(
        (
            _row(
                'Transformer',
                _TRANSFORMER[0],
                _wide('transformer_char', num_heads=8),
                0,
                12,
                512,
                8,
                0.977,
                1.137,
                1.42,
                29.4,
            ),
            _row(
                'Transformer',
                _TRANSFORMER[1],
                _deep('transformer_char', num_heads=4),
                1,
                24,
                256,
                4,
                1.039,
                1.130,
                1.57,
                28.3,
            ),
            _row('Reformer', None, {}, 0, 12, 512, 8, 1.04, 1.195, 1.05, 20.9),
            _row('Synthesizer', None, {}, 0, 12, 512, 8, 0.994, 1.298, 1.49, 29.9),
            _row('Linear Transformer', None, {}, 0, 12, 512, 8, 0.981, 1.207, 1.46, 10.6),
            _row('Performer', None, {}, 0, 12, 512, 8, 1.002, 1.199, 1.44, 10.1),
            _row(
                'AFT-local-32',
                'aft_local_32_l12_d512',
                _wide('aft_local_char', **_CHAR),
                0,
                12,
                512,
                1,
                0.854,
                1.180,
                1.85,
                11.3,
            ),
            _row(
                'AFT-local-32',
                'aft_local_32_l24_d256',
                _deep('aft_local_char', **_CHAR),
                1,
                24,
                256,
                1,
                0.972,
                1.154,
                2.04,
                11.2,
            ),
            _row('AFT-simple', 'aft_simple_l24_d256', _deep('aft_simple_char'), 1, 24, 256, 1, 1.046, 1.209, 2.61, 9.6),
        ),
        folder='char',
        tokens=1024,
        measured_on='eight V100, batch of 128',
    ),
}
