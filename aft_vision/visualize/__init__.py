"""Pictures of training, accuracy, position biases, keys and attention, and a page of them (needs the extra `viz`)."""

from aft_vision.data.class_names import class_labels, class_names
from aft_vision.visualize.accuracy import LabelledPrediction, predict_labelled
from aft_vision.visualize.attention import (
    attention_heads,
    draw_attention,
    draw_key_maps,
    draw_relative_attention,
    implicit_attention,
    relative_attention,
    relative_mean,
)
from aft_vision.visualize.biases import (
    bias_rows,
    bias_statistics,
    draw_position_biases,
)
from aft_vision.visualize.capture import MixerInputs, capture_mixers, has_keys, has_token_grid, keyed_layers
from aft_vision.visualize.figure import DPI, evenly_spaced, figure_png, literal, new_figure, save_figure
from aft_vision.visualize.history import (
    describe_targets,
    draw_bits,
    draw_history,
    read_history,
)
from aft_vision.visualize.page import render_page
from aft_vision.visualize.photographs import (
    Photograph,
    SkippedImages,
    find_photographs,
    find_readable,
    list_photographs,
    load_batches,
    load_image,
    load_photograph,
    predictions,
)
from aft_vision.visualize.report import Report, Section, report_sections
from aft_vision.visualize.samples import completion_sheet, image_sheet, load_pixels
