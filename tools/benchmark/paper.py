"""The rows of AFT Tables 7 and 8 as printed, and the models that they are."""

from typing import NamedTuple


class PaperRow(NamedTuple):
    """A row as the paper prints it."""

    name: str
    # The registered model; None for what timm does not have.
    model: str | None
    # The row that it is compared with.
    baseline: str
    kernel: int | None
    heads: int | None
    top1: float
    # In millions.
    parameters: float
    images_per_second: float
    memory_gb: float


class PaperTable(NamedTuple):
    """A table, the size of its images in pixels, and what the paper says of its device and batch."""

    rows: tuple[PaperRow, ...]
    img_size: int
    measured_on: str


TINY, SMALL, BASE = 'DeiT tiny', 'DeiT small', 'DeiT base'
TABLES = {
    7: PaperTable(
        (
            PaperRow('ResNet50', 'resnet50', SMALL, 3, None, 76.9, 25.6, 1257, 6.5),
            PaperRow(TINY, 'deit_tiny_patch16_224', TINY, None, 3, 72.2, 5.7, 2507, 1.9),
            PaperRow(SMALL, 'deit_small_patch16_224', SMALL, None, 6, 79.9, 22.1, 1010, 2.9),
            PaperRow('Lambda tiny', None, TINY, None, 3, 72.4, 4.8, 2157, 2.7),
            PaperRow('Lambda small', None, SMALL, None, 6, 80.0, 17.7, 1057, 5.8),
            PaperRow('AFT-full tiny', 'aft_full_tiny', TINY, None, 1, 72.4, 6.3, 2523, 1.8),
            PaperRow('AFT-full small', 'aft_full_small', SMALL, None, 1, 79.8, 22.6, 1011, 2.6),
            PaperRow('AFT-conv tiny', 'aft_conv_tiny_k11_h32', TINY, 11, 32, 73.9, 5.4, 2359, 1.8),
            PaperRow('AFT-conv tiny', 'aft_conv_tiny', TINY, 11, 192, 74.8, 5.9, 2365, 2.2),
            PaperRow('AFT-conv small', 'aft_conv_small_k11_h16', SMALL, 11, 16, 80.2, 20.3, 989, 2.5),
            PaperRow('AFT-conv small', 'aft_conv_small', SMALL, 11, 384, 80.8, 22.5, 936, 3.2),
            PaperRow('AFT-conv small', 'aft_conv_small_k15_h384', SMALL, 15, 384, 81.0, 23.0, 936, 3.2),
        ),
        img_size=224,
        measured_on='V100, batch of 256',
    ),
    8: PaperTable(
        (
            PaperRow(BASE, 'deit_base_patch16_384', BASE, None, 12, 82.9, 86.9, 89.6, 13.6),
            PaperRow('AFT-conv ft', 'aft_conv_base_k25_h32_384', BASE, 25, 32, 83.4, 79.7, 98.5, 8.9),
            PaperRow('AFT-conv rand', 'aft_conv_base_k25_h32_384', BASE, 25, 32, 81.6, 79.7, 98.5, 8.9),
        ),
        img_size=384,
        measured_on='device and batch not stated',
    ),
}
