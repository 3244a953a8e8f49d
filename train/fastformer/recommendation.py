"""Recommendation: ranking of news, or films, for a user by earlier clicks (Fastformer Table 5)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from accelerate import PartialState
from torch.utils.data import Sampler
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from aft_vision.fastformer import FastformerForNewsRecommendation
from aft_vision.fastformer.data.impressions import Behaviors, ClickSamples, NewsCollator, tokenize_texts
from aft_vision.fastformer.data.mind import News
from aft_vision.fastformer.metrics import RANKING_METRICS, click_loss, ranking_metrics
from aft_vision.fastformer.predictions import write_predictions
from aft_vision.fastformer.ranking import score_behaviors
from train.fastformer.recommendation_data import RecommendationData, read_splits
from train.fastformer.run import TextRun
from train.fastformer.schema import TextConfig
from train.fastformer.trainer import EpochTrainer, with_epochs
from train.schema import require

PREDICTION = 'prediction_{split}.zip'


@dataclass(frozen=True)
class RecommendationConfig(TextConfig):
    """One experiment with a recommender; `model` may also have `text_model`, a language model for the texts."""

    more_keys: ClassVar[Mapping[str, str]] = {
        'text_model': 'A language model for the texts: a folder, or a name on the hub.'
    }

    task: str = 'recommendation'
    data: RecommendationData = field(default_factory=RecommendationData)

    def check_model(self) -> dict[str, Any]:
        plain = self.data.glove is None or self.model.get('text_model') is None
        require('data.glove', self.data.glove, plain, 'null with model.text_model')
        return super().check_model()


class ClickOrder(Sampler):
    """Random sample numbers, offset by the samples of earlier epochs.

    A number determines the negatives of `ClickSamples`, so a resumed run is the same.
    """

    def __init__(self, samples: int, seed: int) -> None:
        self.samples, self.seed, self.epoch = samples, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order and the negatives."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        # Both numbers, not their sum, which would repeat for the next seed.
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.samples)
        return iter((order + self.epoch * self.samples).tolist())


class RecommendationTrainer(EpochTrainer):
    """transformers' Trainer, whose evaluation encodes each news once and ranks whole impressions."""

    model: Any
    data_collator: Any

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler:
        samples: Any = self.train_dataset if train_dataset is None else train_dataset
        return with_epochs(self, ClickOrder(len(samples), self.args.seed))

    def scores(self, behaviors: Behaviors) -> np.ndarray:
        """Score the candidates (n,); each process ranks its share of the impressions, and all get the result."""
        rows = np.arange(self.args.process_index, len(behaviors), self.args.world_size)
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        batch_size = self.args.per_device_eval_batch_size
        with self.accelerator.autocast():
            part = score_behaviors(model, behaviors.select(rows), self.data_collator, batch_size)
        if self.args.world_size == 1:
            return part
        whole = torch.zeros(len(behaviors.candidates.values))
        whole[torch.from_numpy(behaviors.candidates.indices(rows))] = torch.from_numpy(part)
        return self.accelerator.reduce(whole.to(self.args.device), 'sum').cpu().numpy()

    def evaluate(  # type: ignore[override]
        self,
        eval_dataset: Behaviors | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = 'eval',
    ) -> dict[str, float]:
        behaviors: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        ranked = measure(self.scores(behaviors), behaviors)
        metrics = {f'{metric_key_prefix}_{name}': value for name, value in ranked.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


@dataclass(frozen=True)
class RecommendationRun(TextRun):
    """News and impressions.

    Attributes:
        splits: Impressions.
        news: All of them, of every split.
    """

    config: RecommendationConfig
    news: News = field(default_factory=lambda: News([], []))

    schema = RecommendationConfig
    metrics = RANKING_METRICS
    model_class = FastformerForNewsRecommendation
    auto_model = AutoModel

    @classmethod
    def read(cls, config: RecommendationConfig, folder: Path, quiet: bool = True) -> Self:
        news, splits = read_splits(config.data)
        return cls(config, folder, quiet, splits, news)

    def check_splits(self) -> None:
        for name, split in self.splits.items():
            # Test impressions without labels are ranked only.
            if name == 'test' and split.labels is None:
                continue
            try:
                ClickSamples(split)
            except ValueError as error:
                raise ValueError(f'the split {name!r}: {error}') from error

    def texts(self) -> Sequence[str]:
        train = self.splits['train']
        rows = np.unique(np.concatenate([train.histories.values, train.candidates.values]))
        return [self.news.texts[row] for row in rows]

    def examples(self, split: str, tokenizer: PreTrainedTokenizerBase) -> Any:
        return self.splits[split]

    def make_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of `run.init_from` or of `model.text_model`, or train one."""
        text_model = self.config.model.get('text_model')
        if self.config.run.init_from is not None or text_model is None:
            return super().make_tokenizer()
        return AutoTokenizer.from_pretrained(text_model, model_max_length=self.config.data.max_length)

    def model_fields(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        data = self.config.data
        fields = {'max_behaviors': data.max_behaviors}
        text_model = self.config.model.get('text_model')
        if text_model is None:
            return fields
        text_config = AutoConfig.from_pretrained(text_model)
        longest = getattr(text_config, 'max_position_embeddings', None)
        # XLNet, which has no limit, says -1.
        if longest is not None and 0 < longest < data.max_length:
            raise ValueError(
                f'expected data.max_length of at most {longest}, as {text_model} takes, got {data.max_length}'
            )
        # The rows that a language model has, as in `from_text_model`, which its tokenizer may not fill.
        return {**fields, 'text_config': text_config, 'vocab_size': getattr(text_config, 'vocab_size', len(tokenizer))}

    def arguments(self, folder: Path, seed: int, **more: Any) -> TrainingArguments:
        arguments = super().arguments(folder, seed, **more)
        # A language model may have weights that take no part, such as the mask of XLNet.
        text_model = self.config.model.get('text_model') or self.config.run.init_from
        arguments.ddp_find_unused_parameters = text_model is not None
        return arguments

    def new_model(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        model: Any = super().new_model(tokenizer)
        text_model = self.config.model.get('text_model')
        if text_model is not None:
            model.text_encoder.load(text_model)
        return model

    def make_model(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
        model = super().make_model(tokenizer, seed)
        # Also of a saved model, which may have been trained on others.
        model.config.text_columns = list(self.config.data.text_columns)
        return model

    def new_trainer(self, **options: Any) -> Trainer:
        tokenizer, data = options['processing_class'], self.config.data
        tokens = tokenize_texts(self.news.texts, tokenizer, data.max_length)
        if options['train_dataset'] is not None:
            options['train_dataset'] = ClickSamples(options['train_dataset'], data.negatives, options['args'].seed)
        return RecommendationTrainer(data_collator=NewsCollator(tokens, tokenizer.pad_token_id), **options)

    def check_loaded(self, model: PreTrainedModel, source: str | Path) -> None:
        if not isinstance(model, FastformerForNewsRecommendation):
            raise ValueError(f'expected a recommender, got {source} with a {type(model).__name__}')
        behaviors, expected = model.config.max_behaviors, self.config.data.max_behaviors
        if behaviors != expected:
            raise ValueError(
                f'expected a model of {expected} clicks (data.max_behaviors), got {source} with {behaviors}'
            )
        super().check_loaded(model, source)

    def check_as_stated(self, model: PreTrainedModel, source: str | Path) -> None:
        super().check_as_stated(model, source)
        text_model = self.config.model.get('text_model')
        if text_model is not None and model.config.text_config is None:
            raise ValueError(
                f'expected a language model for the texts in run.init_from ({source}), or nothing in model.text_model, '
                f'got {text_model!r}'
            )

    def test(self, trainer: Any, tokenizer: PreTrainedTokenizerBase, split: str, folder: Path) -> dict[str, float]:
        """Evaluate a trainer's model on a split if it has labels, and write its ranks of the candidates.

        Args:
            folder: Receives `prediction_SPLIT.zip`.
        """
        return self.write(trainer.scores(self.splits[split]), split, folder)

    def write(self, scores: np.ndarray, split: str, folder: Path) -> dict[str, float]:
        """Write the ranks of a split's candidates in the leaderboard's format, and return the metrics."""
        behaviors = self.splits[split]
        if PartialState().is_main_process:
            path = folder / PREDICTION.format(split=split)
            write_predictions(path, behaviors.impression_ids, scores, behaviors.candidates.sizes)
        return {} if behaviors.labels is None else measure(scores, behaviors)

    def evaluate_all(self, sources: Sequence[Path], split: str) -> dict[str, dict[str, float]]:
        """Evaluate saved models, with `data.ensemble` also their ensemble, and write their ranks."""
        results, scores = {}, []
        for source in sources:
            trainer = self.load_trainer(source)
            scores.append(trainer.scores(self.splits[split]))
            results[str(source)] = self.write(scores[-1], split, self.output_dir(source))
        if self.config.data.ensemble:
            mean = np.stack(scores).mean(axis=0, dtype=np.float64)
            results[f'ensemble of {len(sources)}'] = self.write(mean, split, self.folder)
        return results

    def summarize_data(self) -> dict[str, Any]:
        return {'impressions': self.counts(), 'news': len(self.news)}


def measure(scores: np.ndarray, behaviors: Behaviors) -> dict[str, float]:
    """Compute the metrics, and the mean loss of a click among the unclicked candidates of its impression.

    Raises:
        ValueError: the impressions have no labels.
    """
    if behaviors.labels is None:
        raise ValueError('expected impressions with labels to measure, got none')
    sizes = behaviors.candidates.sizes
    return {**ranking_metrics(scores, behaviors.labels, sizes), 'loss': click_loss(scores, behaviors.labels, sizes)}
