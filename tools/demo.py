"""Serve a page that classifies a photograph at any size and draws what the models attend to.

python -m tools.demo [--checkpoint FILE_OR_DIR ...] [--examples FOLDER] [--port 7860]

FILE_OR_DIR is a run or a checkpoint of train.imagenet, an exported folder, or the name of a model with weights; the
models are shown side by side, with the time that each takes. By default they are the models whose weights are in the
package and the DeiT of docs/results/data/imagenette, if there is one. The page takes a photograph and a size; a click
on what the models see chooses the token whose attention is drawn. It is served on this machine only, and asks nothing
of a network (needs gradio: pip install 'aft-vision[demo]').
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.arguments import add_decoding, decoding
from train.command_line import CommandParser, run_command

DEIT = Path('docs/results/data/imagenette/deit_seed0')
EXAMPLES = Path('tests/assets/clothing/validation')


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('--checkpoint', nargs='+', metavar='FILE_OR_DIR', help='models (default: those with weights)')
    parser.add_argument('--examples', type=Path, default=EXAMPLES, help=f'photographs to begin with ({EXAMPLES})')
    add_decoding(parser)
    parser.add_argument('--port', type=int, default=7860, help='default: 7860')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

import copy
import io
import math

import timm
import torch
from PIL import Image

from aft_vision.data import Decoding
from aft_vision.models.checkpoint import load_model
from aft_vision.sizes import default_size, resize_model
from aft_vision.timing import time_rounds
from aft_vision.visualize import (
    SkippedImages,
    attention_heads,
    capture_mixers,
    draw_attention,
    draw_key_maps,
    evenly_spaced,
    figure_png,
    find_readable,
    has_keys,
    has_token_grid,
    keyed_layers,
    load_photograph,
    predictions,
)

# Layers and heads in the pictures: more would take seconds.
MAX_LAYERS, MAX_HEADS = 3, 8
# The largest side to choose in pixels, unless a model was trained with larger images.
DEFAULT_MAX_SIDE = 384


class Answer(NamedTuple):
    """Classes, time and pictures of a photograph by a model."""

    classes: dict[str, float]
    milliseconds: float
    attention: Image.Image
    # None for a model without AFT.
    keys: Image.Image | None


def main(argv: Sequence[str] | None = None) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        ImportError: gradio is not installed.
        ValueError: a checkpoint or the folder of examples is not valid, or there are no models.
    """
    args = parse_args(argv)
    models = load_models(args.checkpoint)
    examples = find_readable(args.examples, 6, SkippedImages(), decoding(args))
    page = build_page(models, examples, decoding(args))
    page.launch(server_name='127.0.0.1', server_port=args.port, share=False, **page_theme())


def load_models(checkpoints: Sequence[str] | None) -> dict[str, Any]:
    """Load the models by their names on the page.

    Raises:
        ValueError: a checkpoint is not valid, its model has no grid of tokens of one size or no attention that can be
            drawn, or there are none.
    """
    if checkpoints is None:
        checkpoints = timm.list_models('aft_*', pretrained=True)
        checkpoints += [str(DEIT)] if (DEIT / 'model.safetensors').is_file() else []
    if not checkpoints:
        raise ValueError('expected models with weights, got none; --checkpoint FILE_OR_DIR names some')
    models = {}
    for checkpoint in checkpoints:
        model: Any = load_model(checkpoint)
        name = model.pretrained_cfg['architecture']
        if not (hasattr(model, 'blocks') and has_token_grid(model)):
            raise ValueError(
                f'expected a model with one grid of tokens, such as aft_conv_tiny or a ViT, got {name} of '
                f'{checkpoint}; aft-vision predict classifies with it'
            )
        try:
            # Its error now, and not at every photograph.
            attention_heads(model)
        except ValueError as error:
            raise ValueError(f'{checkpoint}: {error}') from error
        models[name if name not in models else f'{name} ({checkpoint})'] = model
    return models


def answer(
    model: Any, path: str | Path, side: int, query: tuple[float, float], decoding: Decoding | None = None
) -> Answer:
    """Classify a photograph.

    Args:
        side: Side of the square that the model sees, in pixels.
        query: (y, x) of the token whose attention is drawn, as shares of the square in [0, 1].
        decoding: Options of reading the file; None for the default ones.
    """
    # Resizing twice would resample what has been resampled.
    model = resize_model(copy.deepcopy(model), (side, side))
    photograph = load_photograph(path, model, (side, side), decoding)
    with torch.inference_mode():
        logits = model(photograph.images)
        (seconds,) = time_rounds([lambda: model(photograph.images)], torch.device('cpu'), 5)
    grid = model.patch_embed.dynamic_feat_size((side, side))
    token = tuple(min(int(share * length), length - 1) for share, length in zip(query, grid, strict=True))
    keys = None
    if has_keys(model):
        # A hybrid has blocks of attention too, whose keys are not drawn.
        _, layers = capture_mixers(model, photograph.images)
        chosen = [layers[index].layer for index in evenly_spaced(len(layers), MAX_LAYERS)]
        keys = to_image(draw_key_maps(photograph, layers, max_heads=MAX_HEADS, chosen_layers=chosen))
    drawn = [*keyed_layers(model, attention=True).values()]
    chosen = [drawn[index] for index in evenly_spaced(len(drawn), MAX_LAYERS)]
    attention = to_image(draw_attention(photograph, model, token, max_heads=MAX_HEADS, chosen_layers=chosen))
    return Answer(dict(predictions(model, logits)), 1000 * min(seconds), attention, keys)


def to_image(figure: Any) -> Image.Image:
    """Return a figure as a picture."""
    return Image.open(io.BytesIO(figure_png(figure)))


def page_theme() -> dict[str, Any]:
    """Return the theme of the page, with fonts of the browser: others would be downloaded."""
    import gradio

    theme = gradio.themes.Default(font=['system-ui', 'sans-serif'], font_mono=['monospace'])
    return {'theme': theme, 'footer_links': []}


def add_outputs(name: str, model: Any) -> list[Any]:
    """Add the outputs of a model's answer to the page: classes, time, attention and keys."""
    import gradio

    gradio.Markdown(f'## {name}\n{sum(x.numel() for x in model.parameters()):,} parameters')
    classes, time = gradio.Label(label='Classes', num_top_classes=3), gradio.Markdown()
    attention = gradio.Image(show_label=False, interactive=False)
    keys = gradio.Image(show_label=False, interactive=False, visible=has_keys(model))
    return [classes, time, attention, keys]


def side_limits(models: Sequence[Any]) -> tuple[int, int, int]:
    """Return the smallest side of an image, the largest, and the step between sides that all models take, in pixels."""
    step = math.lcm(*(side for model in models for side in model.patch_embed.patch_size))
    largest = max(DEFAULT_MAX_SIDE, *(side for model in models for side in default_size(model)))
    return 4 * step, max(4, -(-largest // step)) * step, step


def build_page(models: dict[str, Any], examples: Sequence[Path], decoding: Decoding | None = None) -> Any:
    """Build the page.

    Args:
        decoding: Options of reading the photographs; None for the default ones.

    Raises:
        ImportError: gradio is not installed.
    """
    try:
        import gradio
    except ImportError as error:
        raise ImportError("the page needs gradio: pip install 'aft-vision[demo]'") from error
    first = next(iter(models.values()))
    smallest, largest, step = side_limits(list(models.values()))

    def show(path: str | None, side: int, query: tuple[float, float]) -> list[Any]:
        if path is None:
            return [None] * (1 + 4 * len(models))
        answers = [answer(model, path, side, query, decoding) for model in models.values()]
        threads = torch.get_num_threads()
        times = [f'{each.milliseconds:.1f} ms, one image, {threads} thread{"s" * (threads > 1)}' for each in answers]
        each = [[a.classes, t, a.attention, a.keys] for a, t in zip(answers, times, strict=True)]
        seen = Image.fromarray(load_photograph(path, first, (side, side), decoding).pixels.numpy())
        return [seen, *(part for parts in each for part in parts)]

    def choose_token(picture: Image.Image, event: gradio.SelectData) -> tuple[float, float]:
        x, y = event.index
        return y / picture.height, x / picture.width

    with gradio.Blocks(title='Attention-free image models', analytics_enabled=False) as page:
        gradio.Markdown(
            '# Attention-free image models\nThe same photograph at any size, and what each model makes of it.'
        )
        query = gradio.State((0.5, 0.5))
        with gradio.Row():
            photograph = gradio.Image(str(examples[0]), label='Photograph', type='filepath', height=300)
            crop = gradio.Image(
                label='What the models see: click a token', type='pil', height=300, interactive=False, elem_id='crop'
            )
        side = gradio.Slider(
            smallest,
            largest,
            max(smallest, -(-default_size(first)[0] // step) * step),
            step=step,
            label='Side of the image in pixels',
        )
        gradio.Examples([str(path) for path in examples], photograph)
        outputs: list[Any] = [crop]
        with gradio.Row():
            for name, model in models.items():
                with gradio.Column():
                    outputs += add_outputs(name, model)
        inputs = [photograph, side, query]
        gradio.on([page.load, photograph.change, side.release, query.change], show, inputs, outputs)
        crop.select(choose_token, crop, query)
    return page


if __name__ == '__main__':
    run_command(main)
