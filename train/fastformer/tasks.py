"""The tasks by name, and loading of their experiments."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from transformers.training_args import OptimizerNames

from train.config import all_keys, build_config
from train.fastformer.classification import ClassificationRun
from train.fastformer.conversion import ConversionRun
from train.fastformer.recommendation import RecommendationRun
from train.fastformer.run import TextRun
from train.fastformer.schema import TextConfig
from train.fastformer.summarization import SummarizationRun
from train.layers import naming_sources, read_layers
from train.suggest import unknown

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
    task = next((layer['task'] for _, layer in reversed(layers) if 'task' in layer), 'classification')
    optimizers = (name.value for name in OptimizerNames)
    with naming_sources(path, layers):
        if not isinstance(task, str) or task not in TASKS:
            raise ValueError(unknown('task', task, TASKS, 'a task'))
        schema = TASKS[task].schema
        keys = all_keys(schema, schema.model_schema())
        built = build_config(layers, schema, optimizers, keys)
        return dataclasses.replace(built, model=built.check_model(keys))
