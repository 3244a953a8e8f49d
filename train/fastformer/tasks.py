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
from train.layers import last_text, naming_sources, read_layers, typed_layers
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
    optimizers = (name.value for name in OptimizerNames)
    with naming_sources(path, layers):
        task = last_text(layers, 'task', 'classification')
        if not isinstance(task, str) or task not in TASKS:
            raise ValueError(unknown('task', task, TASKS, 'a task'))
        schema = TASKS[task].schema
        arguments = schema.model_schema()
        keys, layers = all_keys(schema, arguments), typed_layers(layers, schema, arguments)
        built = build_config(layers, schema, optimizers, keys)
        return dataclasses.replace(built, model=built.check_model(keys))
