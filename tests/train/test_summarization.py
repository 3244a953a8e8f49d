import dataclasses
import io
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers import randn
from safetensors.torch import load_file
from text_runs import arguments as smoke_arguments
from text_runs import assert_goes_on_to_the_same_weights
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, GenerationConfig

from aft_vision.fastformer import FastformerForSequenceClassification
from aft_vision.fastformer.rouge import ROUGES, rouge
from aft_vision.fastformer.summarize import summarize
from aft_vision.fastformer.tokenize import train_tokenizer
from tools import summarize as tool
from train.fastformer import __main__ as fastformer
from train.fastformer.schema import text_model_config
from train.fastformer.summarization import SummarizationRun, read_splits
from train.fastformer.tasks import load_text_config

SMOKE = Path(__file__).parents[2] / 'configs' / 'smoke' / 'summarization.yaml'
pytestmark = pytest.mark.filterwarnings('ignore:NLTK has no punkt_tab')


@pytest.fixture(scope='module')
def first_words(tmp_path_factory) -> Path:
    """Texts whose first three words are their summary."""
    draw = random.Random(0)
    rows = [draw.choices([f'w{index}' for index in range(12)], k=draw.randint(5, 10)) for _ in range(480)]
    return write(tmp_path_factory.mktemp('texts') / 'first.jsonl', [(row, row[:3]) for row in rows])


def write(path: Path, rows, **more) -> Path:
    lines = [{'text': ' '.join(text), 'summary': ' '.join(summary), **more} for text, summary in rows]
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return path


def arguments(path: Path, folder: Path, *overrides: str) -> list[str]:
    return smoke_arguments('summarization', path, folder, 'run.seeds=[0]', *overrides)


def read(path: Path, *overrides: str):
    config = load_text_config(SMOKE, [f'data.path={path}', *overrides])
    return read_splits(config.data)


LEARNING = ['model.hidden_size=32', 'model.num_attention_heads=4', 'schedule.epochs=4', 'optim.lr=1e-2', 'run.keep=2']


@pytest.fixture(scope='module')
def trained(first_words, tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp('run')
    return folder, fastformer.main(arguments(first_words, folder, *LEARNING))


def written(folder: Path, split: str = 'test') -> list[dict]:
    return [json.loads(line) for line in (folder / 'seed_0' / f'{split}_summaries.jsonl').read_text().splitlines()]


def test_fastformer_learns_to_copy_the_first_words(trained):
    _, summary = trained
    assert summary['test_rouge1']['mean'] > 0.9
    assert summary['test_rougeL']['mean'] > 0.9


def test_the_figures_are_those_of_the_summaries_that_are_written(trained, first_words):
    folder, summary = trained
    rows, result = written(folder), summary['runs'][0]
    assert [row['reference'] for row in rows] == read(first_words)['test']['summary'][:]
    found = rouge([row['summary'] for row in rows], [row['reference'] for row in rows])
    assert found == pytest.approx({name: result[f'test_{name}'] for name in ROUGES})
    assert rows[0]['rouge1'] == rouge([rows[0]['summary']], [rows[0]['reference']])['rouge1']
    # Each text is one sentence.
    assert result['test_lead_3']['rouge1'] < result['test_rouge1']


def measured(checkpoint: Path, run: SummarizationRun, metric: str) -> float:
    """The validation loss or rougeL of a checkpoint, without a Trainer."""
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval()
    tokenizer, texts = AutoTokenizer.from_pretrained(checkpoint), run.splits['validation']
    if metric == 'rougeL':
        return rouge(summarize(model, tokenizer, texts['text'][:], num_beams=2), texts['summary'][:])['rougeL']
    batch = DataCollatorForSeq2Seq(tokenizer, model)(list(run.examples('validation', tokenizer)))
    with torch.no_grad():
        return float(model(**batch).loss)


@pytest.mark.parametrize('metric', ['loss', 'rougeL'])
def test_the_best_epoch_by_validation_is_kept_and_tested(first_words, tmp_path, metric):
    # At so high a rate the best epoch is not the last.
    more = ['data.max_texts=80', 'schedule.epochs=4', 'optim.lr=1e-1', 'model.hidden_size=32', 'run.keep=4']
    more += [f'generate.validate={metric == "rougeL"}']
    (result,) = fastformer.main(arguments(first_words, tmp_path, *more))['runs']
    run = SummarizationRun.read(load_text_config(SMOKE, [f'data.path={first_words}', *more]), tmp_path)
    folders = [tmp_path / 'seed_0' / f'checkpoint-{4 * epoch}' for epoch in range(1, 5)]
    figures = [measured(folder, run, metric) for folder in folders]
    best = figures.index(min(figures) if metric == 'loss' else max(figures))
    assert best < 3
    assert result['best_epoch'] == best + 1
    assert result['texts'] == {'train': 64, 'validation': 8, 'test': 8}
    assert result[f'validation_{metric}'] == pytest.approx(figures[best], rel=1e-5)
    kept, expected = (load_file(path / 'model.safetensors') for path in (tmp_path / 'seed_0' / 'best', folders[best]))
    assert all(torch.equal(kept[key], expected[key]) for key in expected)
    model, tokenizer = (auto.from_pretrained(folders[best]) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
    tested = summarize(model, tokenizer, run.splits['test']['text'][:], num_beams=2)
    assert [row['summary'] for row in written(tmp_path)] == tested


def test_the_best_model_is_one_of_transformers_and_tests_as_it_did(trained, first_words, capsys):
    folder, _ = trained
    fastformer.main(['--eval', *arguments(first_words, folder, *LEARNING, 'data.eval_split=validation')])
    assert 'seed_0/best, validation: rouge1' in capsys.readouterr().out
    assert len(written(folder, 'validation')) == 48
    best = folder / 'seed_0' / 'best'
    assert GenerationConfig.from_pretrained(best).num_beams == 2
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(best), AutoTokenizer.from_pretrained(best)
    texts = read(first_words)['test']['text'][:]
    assert summarize(model, tokenizer, texts, batch_size=16) == [row['summary'] for row in written(folder)]


def test_the_tool_does_not_overwrite_a_text(tmp_path):
    path = tmp_path / 'text.txt'
    path.write_text('a text')
    with pytest.raises(ValueError, match=r'another place than that of .*text\.txt, which is read'):
        tool.main(['--model', 'missing', str(path), '--out', str(path)])
    assert path.read_text() == 'a text'


def test_the_tool_summarizes_files_and_standard_input(trained, tmp_path, capsys, monkeypatch):
    folder, _ = trained
    model = ['--model', str(folder / 'seed_0' / 'best'), '--device', 'cpu']
    for name, text in (('a.txt', 'w3 w1 w4 w1 w5'), ('b.txt', 'w2 w7 w10 w8 w2 w8 w1')):
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in ('a.txt', 'b.txt')]
    found = tool.main([*model, *files, '--out', str(tmp_path / 'out.jsonl')])
    # The model was taught to repeat three words; after few updates the last one depends on the processor's rounding.
    assert [summary.split()[:2] for summary in found] == [['w3', 'w1'], ['w2', 'w7']]
    assert capsys.readouterr().out == f'{files[0]}:\n{found[0]}\n\n{files[1]}:\n{found[1]}\n\n'
    rows = [json.loads(line) for line in (tmp_path / 'out.jsonl').read_text().splitlines()]
    assert rows == [{'file': file, 'summary': summary} for file, summary in zip(files, found, strict=True)]
    monkeypatch.setattr('sys.stdin', io.StringIO('w3 w1 w4 w1 w5\n'))
    assert tool.main(model) == found[:1]
    capsys.readouterr()
    monkeypatch.setattr('sys.stdin', io.StringIO('w3 w1 w4 w1 w5\n'))
    assert tool.main([*model, '--max-tokens', '2', '--num-beams', '1']) == ['w3 w1']
    assert capsys.readouterr().out == 'w3 w1\n'


def test_the_tool_keeps_what_was_summarized_before_an_error(trained, tmp_path, monkeypatch):
    best = trained[0] / 'seed_0' / 'best'
    (tmp_path / 'a.txt').write_text('w1 w2')
    out = tmp_path / 'out.jsonl'
    out.write_text('earlier')
    original, calls = tool.summarize, []

    def summarize(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError
        return original(*args, **kwargs)

    monkeypatch.setattr(tool, 'summarize', summarize)
    with pytest.raises(MemoryError):
        tool.main(['--model', str(best), *[str(tmp_path / 'a.txt')] * 2, '--batch-size', '1', '--out', str(out)])
    assert out.read_text() == 'earlier'
    assert (tmp_path / 'out.jsonl.part').read_text().count('a.txt') == 1


def test_no_summary_is_shorter_than_the_experiment_and_the_tool_say(trained, first_words, tmp_path):
    folder, _ = trained
    best = folder / 'seed_0' / 'best'
    common = arguments(first_words, tmp_path, f'run.init_from={shutil.copytree(best, tmp_path / "a" / "best")}')
    fastformer.main(['--eval', *common, 'generate.min_length=4', 'generate.num_beams=1'])
    (path,) = tmp_path.rglob('test_summaries.jsonl')
    found = [json.loads(line)['summary'] for line in path.read_text().splitlines()]
    # The model was taught to write three words, and the fourth may be a special token, which is no word.
    assert sum(len(summary.split()) > 3 for summary in found) > len(found) / 2
    (tmp_path / 'a.txt').write_text(read(first_words)['test']['text'][0])
    options = ['--min-tokens', '4', '--num-beams', '1']
    assert tool.main(['--model', str(best), *options, str(tmp_path / 'a.txt')]) == found[:1]


def test_the_tool_refuses_a_minimal_length_above_the_maximal_one(capsys):
    lengths = ['--min-tokens', '30', '--max-tokens']
    assert tool.parse_args(['--model', 'x', *lengths, '30']).min_new_tokens == 30
    with pytest.raises(SystemExit):
        tool.parse_args(['--model', 'x', *lengths, '6'])
    assert 'expected --min-tokens of at most --max-tokens 6, got 30' in capsys.readouterr().err


def test_only_weights_that_are_tied_to_none_are_said_to_be_missing(trained, first_words, monkeypatch):
    folder, _ = trained
    config = load_text_config(SMOKE, [f'data.path={first_words}'])
    trainer = SummarizationRun.read(config, folder).load_trainer(folder / 'seed_0' / 'best')
    said = []
    monkeypatch.setattr('transformers.trainer.logger.warning', said.append)
    # As Trainer does to resume, and to load the best model.
    trainer._load_from_checkpoint(str(folder / 'seed_0' / 'best'))
    assert said == []
    saved = trainer.model.state_dict()
    del saved['lm_head.weight'], saved['decoder.layers.0.mlp.fc1.bias']
    trainer._issue_warnings_after_load(trainer.model.load_state_dict(saved, strict=False))
    (message,) = said
    assert 'decoder.layers.0.mlp.fc1.bias' in message
    assert 'lm_head' not in message


def test_the_tool_names_what_is_wrong(trained, tmp_path, capsys):
    folder, _ = trained
    (tmp_path / 'blank.txt').write_text('\n')
    model = ['--model', str(folder / 'seed_0' / 'best')]
    with pytest.raises(ValueError, match=r'expected a text in .*blank\.txt, got none'):
        tool.main([*model, str(tmp_path / 'blank.txt')])
    with pytest.raises(ValueError, match=r'expected a text in UTF-8 in .*nowhere\.txt, got: '):
        tool.main([*model, str(tmp_path / 'nowhere.txt')])
    with pytest.raises(ValueError, match=r'which has no config\.json'):
        tool.main(['--model', str(tmp_path), __file__])
    with pytest.raises(ValueError, match='expected --max-tokens of at most 8, as the model takes, got 9'):
        tool.main([*model, '--max-tokens', '9', __file__])
    with pytest.raises(ValueError, match='expected a file for the summaries, got --out'):
        tool.main([*model, '--out', str(tmp_path), __file__])
    for option in ('--num-beams', '--max-tokens', '--batch-size'):
        with pytest.raises(SystemExit):
            tool.main([*model, option, '0', __file__])
        assert f'argument {option}: expected a number from 1 on' in capsys.readouterr().err


def test_an_interrupted_run_goes_on_to_the_same_weights(first_words, tmp_path, monkeypatch):
    folders = tmp_path / 'whole', tmp_path / 'parts'
    more = ['schedule.max_updates=7', 'data.max_texts=80', 'model.hidden_dropout_prob=0.2', 'run.save_updates=5']
    more += ['run.keep=2', 'generate.validate=true']
    whole, parts = (arguments(first_words, folder, *more) for folder in folders)
    (result,) = fastformer.main(whole)['runs']
    assert set(result['epochs'][0]) == {'loss', 'epoch', *ROUGES}
    assert_goes_on_to_the_same_weights(monkeypatch, 6, parts, folders[1], folders[0])
    with pytest.raises(ValueError, match=r'expected generate\.num_beams = 2 as in .*, got 3'):
        fastformer.main([*parts, 'run.resume=auto', 'generate.num_beams=3'])


def test_parts_come_from_a_column_from_files_or_by_chance(tmp_path):
    def rows(letter, count):
        return [([f'{letter}{i}'], [f's{i}']) for i in range(count)]

    train, other = write(tmp_path / 'a.jsonl', rows('a', 20)), write(tmp_path / 'b.jsonl', rows('b', 3))
    sizes = {name: len(part) for name, part in read(train).items()}
    assert sizes == {'train': 16, 'validation': 2, 'test': 2}
    parts = read(train, f'data.test_path={other}', 'data.valid_share=0.25')
    assert {name: len(part) for name, part in parts.items()} == {'train': 15, 'validation': 5, 'test': 3}
    parts = read(train, f'data.test_path={other}', f'data.valid_path={other}', 'data.max_texts=7')
    assert {name: len(part) for name, part in parts.items()} == {'train': 7, 'validation': 3, 'test': 3}
    whole = tmp_path / 'whole.jsonl'
    whole.write_text(
        ''.join(
            write(tmp_path / 'c.jsonl', rows(part, count), part=part).read_text()
            for part, count in (('train', 9), ('validation', 2), ('test', 4))
        )
    )
    parts = read(whole, 'data.split_column=part', 'data.max_texts=5')
    assert {name: len(part) for name, part in parts.items()} == {'train': 5, 'validation': 2, 'test': 4}
    assert all(text.startswith('test') for text in parts['test']['text'])


def test_a_headline_is_neither_read_nor_led_with(tmp_path):
    path = tmp_path / 'news.jsonl'
    rows = [{'text': f'Title {i}\n\nBody {i} is here. And ends.', 'summary': f'Body {i} is here.'} for i in range(20)]
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    config = load_text_config(SMOKE, [f'data.path={path}', 'data.skip_lines=1'])
    run = SummarizationRun.read(config, tmp_path)
    assert all(text.startswith('Body') for part in run.splits.values() for text in part['text'])
    # 4 words of the reference's 4, among 6; with the headline they are among 8.
    assert run.lead_3('test')['rouge1'] == pytest.approx(2 * 4 / (4 + 6))


@pytest.mark.parametrize(
    ('kind', 'name', 'config', 'summary'),
    [
        ('cnn_dailymail', 'abisee/cnn_dailymail', '3.0.0', 'highlights'),
        ('pubmed', 'ccdv/pubmed-summarization', 'document', 'abstract'),
    ],
)
def test_a_data_set_of_the_hub_brings_its_parts(monkeypatch, kind, name, config, summary):
    asked = []

    def load(name, config, split, revision):
        asked.append((name, config, split, revision))
        return Dataset.from_dict({'article': [split] * 5, summary: ['s'] * 5, 'id': ['x'] * 5})

    monkeypatch.setattr('aft_vision.fastformer.data.summaries.load_dataset', load)
    parts = read(Path(), f'data.kind={kind}', 'data.path=""', 'data.revision=abc', 'data.max_texts=3')
    assert [(part['text'][0], len(part)) for part in parts.values()] == [('train', 3), ('validation', 5), ('test', 5)]
    assert asked == [(name, config, split, 'abc') for split in parts]


def test_a_model_of_shorter_texts_is_an_error(trained, first_words, tmp_path):
    folder, _ = trained
    best = folder / 'seed_0' / 'best'
    more = [f'run.init_from={best}', 'data.max_summary_length=9']
    with pytest.raises(ValueError, match=r'data\.max_summary_length of at most 8, as .*best takes, got 9'):
        fastformer.main(['--eval', *arguments(first_words, tmp_path, *more)])


def test_training_goes_on_from_a_model_of_a_preset_with_summaries_of_another_length(first_words, tmp_path):
    small = dict(embedding_size=16, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, decoder_layers=1)
    keys = [f'model.{key}={value}' for key, value in {'preset': 'cnn_dailymail', **small}.items()]
    config = load_text_config(SMOKE, [f'data.path={first_words}', 'data.max_summary_length=9', *keys])
    run = SummarizationRun.read(config, tmp_path)
    run.make_model(run.tokenizer, seed=0).save_pretrained(tmp_path)
    run.tokenizer.save_pretrained(tmp_path)
    resumed = dataclasses.replace(config.run, init_from=str(tmp_path))
    again = dataclasses.replace(run, config=dataclasses.replace(config, run=resumed))
    assert again.make_model(again.make_tokenizer(), seed=0).config.max_target_positions == 9


def test_glove_fills_the_embedding_that_encoder_decoder_and_head_share(first_words, tmp_path):
    vector = randn(16, seed=1)
    (tmp_path / 'glove.txt').write_text(
        '\n'.join(' '.join([word, *map(str, vector.tolist())]) for word in ('w1', 'w2'))
    )
    config = load_text_config(SMOKE, [f'data.path={first_words}', f'data.glove={tmp_path / "glove.txt"}'])
    run = SummarizationRun.read(config, tmp_path)
    tokenizer = run.make_tokenizer()
    model = run.make_model(tokenizer, seed=0)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    found = model.lm_head.weight[tokenizer.convert_tokens_to_ids('w1')]
    torch.testing.assert_close(found.double(), vector, atol=1e-6, rtol=0)


@pytest.mark.parametrize(('kind', 'source'), [('table', 'a file'), ('hub', 'the name of a data set')])
def test_an_experiment_without_a_path_is_an_error(kind, source):
    config = load_text_config(SMOKE, [f'data.kind={kind}', 'data.path=""'])
    with pytest.raises(ValueError, match=f"data.path to be {source} where data.kind is {kind}, got ''"):
        read_splits(config.data)


def test_a_classifier_gives_its_encoder_to_a_summariser(first_words, tmp_path):
    texts = read(first_words)['train']['text'][:]
    train_tokenizer(texts, max_length=32).save_pretrained(tmp_path / 'classifier')
    config = load_text_config(SMOKE, [f'data.path={first_words}', f'run.init_from={tmp_path / "classifier"}'])
    made = text_model_config(config.model, 32, vocab_size=40, num_labels=3)
    classifier = FastformerForSequenceClassification(made)
    classifier.save_pretrained(tmp_path / 'classifier')
    run = SummarizationRun.read(config, tmp_path)
    tokenizer = run.make_tokenizer()
    encoder = run.make_model(tokenizer, 0).encoder.state_dict()
    expected = classifier.model.state_dict()
    assert len(tokenizer) == len(train_tokenizer(texts))
    assert len(encoder) > 10
    assert all(torch.equal(value, expected[name]) for name, value in encoder.items())
