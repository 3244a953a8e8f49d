import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, Trainer, TrainingArguments

from aft_vision.fastformer.data import label_maps, tokenize_dataset
from aft_vision.fastformer.tokenize import train_tokenizer

LENGTHS = [length for length in range(1, 33) for _ in range(4)]


@pytest.fixture
def tokenizer():
    return train_tokenizer(['a b c'], max_length=512)


@pytest.fixture
def dataset():
    texts = [' '.join(['a'] * length) for length in LENGTHS]
    labels = [length % 2 for length in LENGTHS]
    features = Features(text=Value('string'), label=ClassLabel(names=['even', 'odd']))
    return Dataset.from_dict(dict(text=texts, label=labels), features=features)


def test_texts_become_tokens_and_labels_stay(dataset, tokenizer):
    tokens = tokenize_dataset(dataset, tokenizer)
    assert tokens.column_names == ['label', 'input_ids']
    assert [len(ids) for ids in tokens['input_ids']] == LENGTHS
    assert tokens.features['label'] == dataset.features['label']


def test_a_summary_without_a_limit_stays_a_text(tokenizer):
    dataset = Dataset.from_dict(dict(text=['a b'], summary=['a'], label=[0]))
    assert tokenize_dataset(dataset, tokenizer).column_names == ['summary', 'label', 'input_ids']


def test_long_texts_are_cut_off(dataset, tokenizer):
    tokens = tokenize_dataset(DatasetDict(train=dataset), tokenizer, max_length=5)
    assert [len(ids) for ids in tokens['train']['input_ids']] == [min(length, 5) for length in LENGTHS]


def test_a_text_without_tokens_becomes_an_unknown_token(tokenizer):
    dataset = Dataset.from_dict(dict(text=['', ' \n', 'b'], label=[0, 0, 0]))
    assert tokenize_dataset(dataset, tokenizer)['input_ids'][:] == [[3], [3], tokenizer('b')['input_ids']]


def test_the_librarys_trainer_groups_by_length_and_pads_to_the_longest_of_a_batch(dataset, tokenizer, tmp_path):
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        num_attention_heads=1,
        num_hidden_layers=1,
        intermediate_size=8,
        **label_maps(dataset),
    )
    trainer = Trainer(
        BertForSequenceClassification(config),
        TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=4,
            train_sampling_strategy='group_by_length',
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=tokenize_dataset(dataset, tokenizer),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    torch.manual_seed(0)
    batches = list(trainer.get_train_dataloader())
    padding = sum(int((batch['attention_mask'] == 0).sum()) for batch in batches)
    assert sorted(int(n) for batch in batches for n in batch['attention_mask'].sum(1)) == LENGTHS
    assert all(batch['attention_mask'].sum(1).max() == batch['input_ids'].shape[1] for batch in batches)
    assert all((batch['input_ids'][batch['attention_mask'] == 0] == tokenizer.pad_token_id).all() for batch in batches)
    assert all((batch['labels'] == batch['attention_mask'].sum(1) % 2).all() for batch in batches)
    # Batches at random would be padding by a third.
    assert padding < 0.1 * sum(LENGTHS)
