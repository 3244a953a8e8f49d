"""The rows of AFT Tables 2, 4, 7 and 8 as printed, and the models that they are."""

from typing import Any, NamedTuple


class PaperRow(NamedTuple):
    """A row as the paper prints it.

    Args:
        baseline: Place in the table of the row that it is compared with; None is none.
        model: Of timm, or for Tables 2 and 4 the arguments of `create_decoder` for the recipe `config`; None for what
            is not measured.
        printed: Figures by the names of `PaperTable.columns`; those that are not printed are left out.
    """

    name: str
    baseline: int | None
    model: str | None
    printed: dict[str, float]
    config: str | None = None
    arguments: dict[str, Any] | None = None


class PaperTable(NamedTuple):
    """A table: its rows, what the paper says of its device and batch, and the size of its inputs.

    Args:
        size: Side of the images in pixels, or tokens of a sequence.
        folder: Of the recipes, for sequences.
    """

    rows: tuple[PaperRow, ...]
    measured_on: str
    size: int
    folder: str | None = None


_IMAGES = ('kernel', 'heads', 'top1', 'parameters', 'speed', 'memory_gb')
_SEQUENCES = ('depth', 'dim', 'heads', 'train_bits', 'test_bits', 'speed', 'memory_gb')


def _image(name: str, baseline: int, model: str | None, *values: float | None) -> PaperRow:
    # `parameters` are in millions, `speed` in images/s.
    return PaperRow(name, baseline, model, _printed(_IMAGES, values))


def _sequence(
    name: str, baseline: int | None, model: str | None, config: str | None, *values: float | None, **kwargs: Any
) -> PaperRow:
    # Bits per dimension (Table 2) or character (Table 4), `speed` in iterations/s.
    printed = _printed(_SEQUENCES, values)
    arguments = {'depth': printed.get('depth'), 'dim': printed.get('dim'), **kwargs} if model else None
    return PaperRow(name, baseline, model, printed, config, arguments)


def _printed(columns: tuple[str, ...], values: tuple[float | None, ...]) -> dict[str, float]:
    return {key: value for key, value in zip(columns, values, strict=True) if value is not None}


_WIDE, _DEEP = 'transformer_l12_d512', 'transformer_l24_d256'
_PIXEL: dict[str, Any] = dict(window=256, bias_dim=64)
_CHAR: dict[str, Any] = dict(window=32, bias_dim=256)
_PIXEL_TRANSFORMER, _CHAR_TRANSFORMER = 'transformer_pixel', 'transformer_char'
TABLES = {
    2: PaperTable(
        (
            _sequence('PixelCNN', None, None, None, None, None, None, 3.08, 3.14, None, None),
            _sequence('PixelCNN++', None, None, None, None, None, None, None, 2.92, None, None),
            _sequence('PixelSNAIL', None, None, None, None, None, None, None, 2.85, None, None),
            _sequence('Sparse Transformer strided', None, None, None, 128, 256, 2, None, 2.80, None, None),
            _sequence('Image Transformer local2d', 5, None, None, 12, 512, 4, None, 2.90, 1.61, 22.3),
            _sequence('Transformer', 5, _PIXEL_TRANSFORMER, _WIDE, 12, 512, 4, 2.90, 2.88, 1.35, 30.6, num_heads=4),
            _sequence('Transformer', 6, _PIXEL_TRANSFORMER, _DEEP, 24, 256, 2, 2.90, 2.86, 1.36, 30.4, num_heads=2),
            _sequence(
                *('AFT-local-256', 5, 'aft_local_pixel', 'aft_local_256_l12_d512'),
                *(12, 512, 1, 2.78, 2.80, 1.68, 11.4),
                **_PIXEL,
            ),
            _sequence(
                *('AFT-local-256', 6, 'aft_local_pixel', 'aft_local_256_l24_d256'),
                *(24, 256, 1, 2.75, 2.74, 1.67, 12.8),
                **_PIXEL,
            ),
            _sequence('AFT-simple', 6, 'aft_simple_pixel', 'aft_simple_l24_d256', 24, 256, 1, 2.82, 2.89, 2.15, 9.5),
        ),
        measured_on='eight V100, batch of 32',
        size=3072,
        folder='pixel',
    ),
    4: PaperTable(
        (
            _sequence('Transformer', 0, _CHAR_TRANSFORMER, _WIDE, 12, 512, 8, 0.977, 1.137, 1.42, 29.4, num_heads=8),
            _sequence('Transformer', 1, _CHAR_TRANSFORMER, _DEEP, 24, 256, 4, 1.039, 1.130, 1.57, 28.3, num_heads=4),
            _sequence('Reformer', 0, None, None, 12, 512, 8, 1.04, 1.195, 1.05, 20.9),
            _sequence('Synthesizer', 0, None, None, 12, 512, 8, 0.994, 1.298, 1.49, 29.9),
            _sequence('Linear Transformer', 0, None, None, 12, 512, 8, 0.981, 1.207, 1.46, 10.6),
            _sequence('Performer', 0, None, None, 12, 512, 8, 1.002, 1.199, 1.44, 10.1),
            _sequence(
                *('AFT-local-32', 0, 'aft_local_char', 'aft_local_32_l12_d512'),
                *(12, 512, 1, 0.854, 1.180, 1.85, 11.3),
                **_CHAR,
            ),
            _sequence(
                *('AFT-local-32', 1, 'aft_local_char', 'aft_local_32_l24_d256'),
                *(24, 256, 1, 0.972, 1.154, 2.04, 11.2),
                **_CHAR,
            ),
            _sequence('AFT-simple', 1, 'aft_simple_char', 'aft_simple_l24_d256', 24, 256, 1, 1.046, 1.209, 2.61, 9.6),
        ),
        measured_on='eight V100, batch of 128',
        size=1024,
        folder='char',
    ),
    7: PaperTable(
        (
            _image('ResNet50', 2, 'resnet50', 3, None, 76.9, 25.6, 1257, 6.5),
            _image('DeiT tiny', 1, 'deit_tiny_patch16_224', None, 3, 72.2, 5.7, 2507, 1.9),
            _image('DeiT small', 2, 'deit_small_patch16_224', None, 6, 79.9, 22.1, 1010, 2.9),
            _image('Lambda tiny', 1, None, None, 3, 72.4, 4.8, 2157, 2.7),
            _image('Lambda small', 2, None, None, 6, 80.0, 17.7, 1057, 5.8),
            _image('AFT-full tiny', 1, 'aft_full_tiny', None, 1, 72.4, 6.3, 2523, 1.8),
            _image('AFT-full small', 2, 'aft_full_small', None, 1, 79.8, 22.6, 1011, 2.6),
            _image('AFT-conv tiny', 1, 'aft_conv_tiny_k11_h32', 11, 32, 73.9, 5.4, 2359, 1.8),
            _image('AFT-conv tiny', 1, 'aft_conv_tiny', 11, 192, 74.8, 5.9, 2365, 2.2),
            _image('AFT-conv small', 2, 'aft_conv_small_k11_h16', 11, 16, 80.2, 20.3, 989, 2.5),
            _image('AFT-conv small', 2, 'aft_conv_small', 11, 384, 80.8, 22.5, 936, 3.2),
            _image('AFT-conv small', 2, 'aft_conv_small_k15_h384', 15, 384, 81.0, 23.0, 936, 3.2),
        ),
        measured_on='V100, batch of 256',
        size=224,
    ),
    8: PaperTable(
        (
            _image('DeiT base', 0, 'deit_base_patch16_384', None, 12, 82.9, 86.9, 89.6, 13.6),
            _image('AFT-conv ft', 0, 'aft_conv_base_k25_h32_384', 25, 32, 83.4, 79.7, 98.5, 8.9),
            _image('AFT-conv rand', 0, 'aft_conv_base_k25_h32_384', 25, 32, 81.6, 79.7, 98.5, 8.9),
        ),
        measured_on='device and batch not stated',
        size=384,
    ),
}
