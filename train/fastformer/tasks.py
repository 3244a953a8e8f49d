"""The tasks by name, and loading of their experiments."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from transformers.training_args import OptimizerNames

from aft_vision.fastformer import PRESETS
from train.config import build_config
from train.config_layers import COMMAND_LINE, Layer, last_text, naming_sources, read_layers, section, type_layers
from train.fastformer.classification import ClassificationRun
from train.fastformer.conversion import ConversionRun
from train.fastformer.recommendation import RecommendationRun
from train.fastformer.run import TextRun
from train.fastformer.schema import TextConfig
from train.fastformer.summarization import SummarizationRun
from train.model_section import leave_out
from train.schema import unknown

TASKS: dict[str, type[TextRun]] = {
    'classification': ClassificationRun,
    'conversion': ConversionRun,
    'recommendation': RecommendationRun,
    'summarization': SummarizationRun,
}


def load_text_config(path: str | Path, overrides: Sequence[str] = ()) -> TextConfig:
    """Read, merge and check one experiment, as `train.config.load_config` does for images.

    Raises:
        ValueError: an unknown task or key, a value of the wrong type or range, or a file that cannot be read.
    """
    layers = read_layers(path, overrides)
    optimizers = (name.value for name in OptimizerNames)
    with naming_sources(path, layers):
        task = last_text(layers, 'task', 'classification')
        if not isinstance(task, str) or task not in TASKS:
            raise ValueError(unknown('task', task, TASKS, 'a task'))
        schema = TASKS[task].schema
        layers = drop_for_preset(type_layers(layers, schema, schema.model_schema()))
        built = build_config(layers, schema, optimizers)
        return dataclasses.replace(built, model=built.check_model())


def drop_for_preset(layers: Sequence[Layer]) -> list[Layer]:
    """Drop arguments of the files that a preset of the command line states, and print one line with them."""
    given = [section(layer, 'model') for source, layer in layers if source == COMMAND_LINE]
    preset = next((model['preset'] for model in reversed(given) if 'preset' in model), None)
    if preset not in PRESETS:
        return list(layers)
    stated = PRESETS[preset].model
    return leave_out(layers, lambda key, value: key not in stated, f'model.preset={preset} states them')
