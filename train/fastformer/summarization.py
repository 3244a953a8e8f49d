"""Summarisation (Fastformer Table 6)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from datasets import Dataset
from torch.utils.data import Sampler, SequentialSampler
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from aft_vision.fastformer import FastformerForConditionalGeneration
from aft_vision.fastformer.data import tokenize_dataset
from aft_vision.fastformer.rouge import ROUGES, lead, rouge, rouge_of_each
from aft_vision.fastformer.summarize import decode
from aft_vision.files import keeping_rows
from train.fastformer.run import TextRun
from train.fastformer.schema import TextConfig
from train.fastformer.summaries import Generation, SummarizationData, read_splits
from train.fastformer.trainer import TextTrainer, describe
from train.schema import require


@dataclass(frozen=True)
class SummarizationConfig(TextConfig):
    """One experiment with a model that summarises."""

    task: str = 'summarization'
    data: SummarizationData = field(default_factory=SummarizationData)
    generate: Generation = field(default_factory=Generation)

    def __post_init__(self) -> None:
        super().__post_init__()
        shortest, longest = self.generate.min_length, self.data.max_summary_length
        require('generate.min_length', shortest, shortest < longest, f'below data.max_summary_length ({longest})')


class SummarizationTrainer(TextTrainer, Seq2SeqTrainer):
    """transformers' Seq2SeqTrainer with the batches of TextTrainer, which evaluates texts in their order."""

    def _get_eval_sampler(self, eval_dataset: Dataset) -> Sampler | None:
        return SequentialSampler(eval_dataset) if self.args.world_size <= 1 else None


@dataclass(frozen=True)
class SummarizationRun(TextRun):
    """Texts and their summaries: `splits` have columns `text` and `summary`."""

    config: SummarizationConfig
    _leads: dict[str, dict[str, float]] = field(default_factory=dict, init=False)

    schema = SummarizationConfig
    metrics = ROUGES
    model_class = FastformerForConditionalGeneration
    auto_model = AutoModelForSeq2SeqLM
    limits: ClassVar[dict[str, str]] = {**TextRun.limits, 'max_target_positions': 'max_summary_length'}

    @property
    def best_metric(self) -> str:
        return 'rougeL' if self.config.generate.validate else 'loss'

    @property
    def validation_metrics(self) -> tuple[str, ...]:
        return ('loss', *ROUGES) if self.config.generate.validate else ('loss',)

    @classmethod
    def read(cls, config: SummarizationConfig, folder: Path, quiet: bool = True) -> Self:
        return cls(config, folder, quiet, read_splits(config.data))

    def texts(self) -> Sequence[str]:
        return [*self.splits['train']['text'], *self.splits['train']['summary']]

    def examples(self, split: str, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        data = self.config.data
        most = data.max_summary_length
        return tokenize_dataset(self.splits[split], tokenizer, data.max_length, max_summary_length=most)

    def model_fields(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        return {
            'max_target_positions': self.config.data.max_summary_length,
            'bos_token_id': tokenizer.bos_token_id,
            'eos_token_id': tokenizer.eos_token_id,
            'decoder_start_token_id': tokenizer.bos_token_id,
        }

    def arguments(self, folder: Path, seed: int, **more: Any) -> TrainingArguments:
        generates = self.config.generate.validate
        return super().arguments(
            folder, seed, arguments_class=Seq2SeqTrainingArguments, predict_with_generate=generates, **more
        )

    def new_trainer(self, **options: Any) -> Trainer:
        model, tokenizer, generate = options['model'], options['processing_class'], self.config.generate
        # It is saved with the model; both lengths count the start token.
        model.generation_config.update(
            max_length=self.config.data.max_summary_length + 1,
            num_beams=generate.num_beams,
            length_penalty=generate.length_penalty,
            no_repeat_ngram_size=generate.no_repeat_ngram_size,
            min_length=generate.min_length + 1 if generate.min_length else 0,
        )

        def measure(prediction: EvalPrediction) -> dict[str, float]:
            return rouge(*self.generated(prediction.predictions, 'validation', tokenizer))

        collate = DataCollatorForSeq2Seq(tokenizer, model)
        return SummarizationTrainer(
            data_collator=collate, compute_metrics=measure if generate.validate else None, **options
        )

    def generated(self, tokens: Any, split: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[str]]:
        """Return the texts of the tokens that the trainer gathered, and the whole summaries of a split."""
        references = list(self.splits[split]['summary'])
        # Between batches the trainer pads with -100; several processes repeat the first texts at the end.
        tokens = np.where(tokens < 0, tokenizer.pad_token_id, tokens)[: len(references)]
        return decode(tokens, tokenizer), references

    def test(self, trainer: Any, tokenizer: PreTrainedTokenizerBase, split: str, folder: Path) -> dict[str, float]:
        trainer.args.predict_with_generate = True
        # It is the loss of the validation texts.
        trainer.compute_metrics = None
        output = trainer.predict(self.tokenized(split, tokenizer), metric_key_prefix='test')
        summaries, references = self.generated(output.predictions, split, tokenizer)
        scores = rouge_of_each(summaries, references)
        if trainer.is_world_process_zero():
            path = folder / f'{split}_summaries.jsonl'
            write_summaries(path, references, summaries, scores)
            print(f'{split} summaries in {path}; the first three sentences give {describe(self.lead_3(split))}')
        means = {name: sum(row[name] for row in scores) / len(scores) for name in ROUGES}
        return {'loss': output.metrics['test_loss'], **means}

    def lead_3(self, split: str) -> dict[str, float]:
        """Compute ROUGE of the first three sentences of each text."""
        if split not in self._leads:
            rows = self.splits[split]
            self._leads[split] = rouge([lead(text) for text in rows['text']], list(rows['summary']))
        return self._leads[split]

    def summarize_data(self) -> dict[str, Any]:
        return {'texts': self.counts(), 'test_lead_3': self.lead_3('test')}


def write_summaries(
    path: Path, references: Sequence[str], summaries: Sequence[str], scores: Sequence[dict[str, float]]
) -> None:
    """Write JSON lines, one per text: its number, the reference, the summary and its ROUGE."""
    with keeping_rows(path) as keep:
        for row, (reference, summary, score) in enumerate(zip(references, summaries, scores, strict=True)):
            keep({'row': row, 'reference': reference, 'summary': summary, **score})
