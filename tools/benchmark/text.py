"""Fastformer and the other text encoders: against the number of tokens (Fastformer Fig. 2), and latency (Table 8)."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aft_vision import fastformer
from tools.benchmark.compare import DIRECTIONS, Candidate, Prepared, compare, draw, next_to_the_paper
from tools.benchmark.printer import Report
from tools.benchmark.scaling import QUANTITIES, measure_until, report_fits

BASELINE = 'transformer'
# MIND's topics.
LABELS = 18
# Width and heads of the encoders, ads that are judged for a user, and tokens of each text of a request.
DIM, HEADS, ADS, TEXT_TOKENS = 256, 16, 20, 16
BEHAVIORS = (50, 100, 200, 500, 1000)
# The table of words is not part of what is compared.
VOCAB = 1000
TYPES = ['search', 'page', 'ad']
# Parts of a request: everything; the rest where a server keeps the vectors of texts; everything in training.
WHOLE, KEPT = 'texts, user and ads', 'user and ads, with the vectors of the texts kept'
TRAINING = 'forward and backward of texts, user and ads'


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the classifier of MIND at lengths, or with --behaviors the predictor of conversions.

    Raises:
        ValueError: an encoder is not known.
    """
    if set(args.models) - set(fastformer.ENCODERS):
        raise ValueError(f'expected names among {list(fastformer.ENCODERS)}, got {args.models}')
    measure = measure_lengths if args.behaviors is None else measure_requests
    # The others are compared with the Transformer.
    return measure(args, list(dict.fromkeys([BASELINE, *args.models])), device)


def measure_lengths(args: argparse.Namespace, names: Sequence[str], device: torch.device) -> Report:
    """Measure the classifier of MIND with encoders at lengths, interleaved at each length.

    Returns the rows of `measure_until`, with the time and memory of one text of the batch.
    """

    def prepare(name: str, batch: int, tokens: int, training: bool) -> Prepared:
        # Its table of words is not used.
        sizes = dict(max_position_embeddings=tokens, vocab_size=8, num_labels=LABELS, num_hidden_layers=2)
        config = fastformer.PRESETS['mind_topic'].create_config(**encoder_args(name) | sizes)
        model: Any = fastformer.FastformerForSequenceClassification(config)
        model.to(device).train(training)
        embeds, labels = draw(batch, tokens, config.embedding_size), torch.arange(batch) % LABELS
        given = {'inputs_embeds': embeds.to(device), 'labels': labels.to(device)}
        # The gradients of the weights exist before a call, which adds to them.
        return Prepared(lambda: model(**given).loss, list(model.parameters()), list(given.values()), Tensor.backward)

    def make(batch: int, tokens: int) -> list[Candidate]:
        return next_to_the_paper([Candidate(name, partial(prepare, name, batch, tokens)) for name in names])

    options = {name: getattr(args, name) for name in ('most_seconds', 'total_tokens', 'dtype')}
    rows = measure_until(make, args.tokens or (), device, args.rounds or 3, directions=DIRECTIONS, **options)
    for row in rows:
        row |= {key: row[key] / row['batch_size'] for key in QUANTITIES if key in row}
    head = f'{args.total_tokens} tokens in a batch; measurements of one text of it, exponents of the upper half'
    return report_fits(rows, head)


def encoder_args(name: str) -> dict[str, Any]:
    """Return the settings of an encoder that both models share."""
    return dict(encoder_mixer=name, hidden_size=DIM, intermediate_size=DIM, num_attention_heads=HEADS)


def measure_requests(args: argparse.Namespace, names: Sequence[str], device: torch.device) -> Report:
    """Measure single requests with every encoder, interleaved, for numbers of behaviours."""
    rows: list[dict[str, Any]] = []
    for length in sorted(set(args.behaviors or BEHAVIORS)):
        for request in (WHOLE, KEPT, TRAINING):
            requests = [Candidate(name, partial(make_request, name, length, request, device)) for name in names]
            options = dict(dtype=args.dtype, directions=DIRECTIONS[request == TRAINING :][:1], single=True)
            # A step of training takes far longer than a request.
            rounds = max(1, (args.rounds or 100) // 10) if request == TRAINING else args.rounds or 100
            measured = compare(next_to_the_paper(requests), device, rounds, **options)
            rows += [{'behaviors': length, 'what': request, **row} for row in measured]
    return Report(rows, f'one user with {ADS} ads, {TEXT_TOKENS} tokens a text; ratios to the first encoder')


def make_request(name: str, behaviors: int, what: str, device: torch.device, training: bool) -> Prepared:
    """Return a kind of request of an encoder, in which the texts of behaviours come before the texts of the ads."""
    generator = torch.Generator().manual_seed(0)
    texts = behaviors + ADS
    # Id 0 is padding.
    input_ids = torch.randint(1, VOCAB, (texts, TEXT_TOKENS), generator=generator).to(device)
    types = torch.arange(behaviors, device=device)[None] % len(TYPES)
    rows = torch.arange(texts, device=device)[None]
    vectors = draw(texts, DIM).to(device)
    done, ads = rows[:, :behaviors], rows[:, behaviors:]
    request = (input_ids, torch.ones_like(input_ids), ads, done, types)
    labels = torch.zeros(ads.shape, device=device)
    sizes: dict[str, Any] = dict(vocab_size=VOCAB, embedding_size=300, max_position_embeddings=TEXT_TOKENS)
    sizes |= dict(max_behaviors=behaviors, behavior_types=TYPES, num_hidden_layers=1)
    config = fastformer.FastformerConversionConfig(**encoder_args(name), **sizes)
    model: Any = fastformer.FastformerForConversion(config)
    model.to(device).train(training)
    calls: dict[str, Callable[[], Tensor]] = {
        WHOLE: lambda: model(*request).logits,
        KEPT: lambda: model.score(model.encode_users(vectors, done, types), vectors[ads]),
        TRAINING: lambda: model(*request, labels=labels).loss,
    }
    # The gradients of the weights exist before a call, which adds to them.
    return Prepared(calls[what], list(model.parameters()), learn=Tensor.backward)
