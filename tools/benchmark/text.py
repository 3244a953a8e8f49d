"""Fastformer and the other text encoders: against the number of tokens (Fastformer Fig. 2), and latency (Table 8)."""

import argparse
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

try:
    from aft_vision import fastformer
except ImportError as error:
    raise ImportError(f"text encoders need transformers: pip install 'aft-vision[text]' ({error})") from error
from tools.benchmark.compare import DIRECTIONS, Candidate, Prepared, compare, draw
from tools.benchmark.printer import Report
from tools.benchmark.scaling import QUANTITIES, TOKENS, Shape, measure_until, report_fits, shapes_of

BASELINE, MATERIALISED = 'transformer', 'transformer materialised'
# MIND's topics.
LABELS = 18
# Width and heads of the encoders, ads that are judged for a user, and tokens of each text of a request.
DIM, HEADS, ADS, TEXT_TOKENS = 256, 16, 20, 16
BEHAVIORS = (50, 100, 200, 500, 1000)
TOTAL_TOKENS, MOST_SECONDS = 65536, 30.0
# The table of words is not part of what is compared.
VOCAB = 1000
TYPES = ['search', 'page', 'ad']
# Parts of a request: everything; the rest where a server keeps the vectors of texts; everything in training.
FORMS = {
    'whole': 'texts, user and ads',
    'kept vectors': 'user and ads, with the vectors of the texts kept',
    'training': 'forward and backward of texts, user and ads',
}
# A call in training is not waited for: a tenth of the rounds.
TRAINING_ROUNDS = 0.1


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the classifier of MIND at lengths, or with --behaviors the predictor of conversions."""
    measure = measure_lengths if args.behaviors is None else measure_requests
    return measure(args, choose(args.models), device)


def choose(models: Sequence[str] | None) -> list[str]:
    """Return the encoders: the fused Transformer, the materialised one, and the others of `encoder_mixer`.

    Args:
        models: Names; None is all.

    Raises:
        ValueError: an encoder is not known.
    """
    known = [BASELINE, MATERIALISED, *(name for name in fastformer.ENCODERS if name != BASELINE)]
    if models is not None and set(models) - set(known):
        raise ValueError(f'expected names among {known}, got {list(models)}')
    return [name for name in known if models is None or name in models]


def measure_lengths(args: argparse.Namespace, names: Sequence[str], device: torch.device) -> Report:
    """Measure the classifier of MIND with encoders at lengths, those of one length interleaved.

    The rows are those of `measure_until`, of one text: time and memory of the batch are `batch_milliseconds` and
    `batch_peak_bytes`.
    """
    total = TOTAL_TOKENS if args.total_tokens is None else args.total_tokens
    shapes, limit = shapes_of(args.tokens or TOKENS, total), args.most_seconds or MOST_SECONDS

    # The encoders of a shape share what they get.
    @lru_cache(maxsize=1)
    def inputs(shape: Shape, width: int) -> tuple[Tensor, Tensor]:
        return draw(*shape, width).to(device), torch.arange(shape.batch, device=device) % LABELS

    def prepare(name: str, shape: Shape, training: bool) -> Prepared:
        model: Any = create_classifier(name, shape.tokens).to(device).train(training)
        embeds, labels = inputs(shape, model.config.embedding_size)
        # The gradients of the weights exist before a call, which adds to them.
        loss = lambda: model(inputs_embeds=embeds, labels=labels).loss  # noqa: E731
        return Prepared(loss, list(model.parameters()), [embeds, labels], learn=Tensor.backward)

    def make(shape: Shape) -> list[Candidate]:
        return [Candidate(name, partial(prepare, name, shape)) for name in names]

    rows = measure_until(make, shapes, limit, device, args.rounds or 3, dtype=args.dtype, directions=DIRECTIONS)
    for row in rows:
        for key in (key for key in QUANTITIES if key in row):
            row[f'batch_{key}'], row[key] = row[key], row[key] / row['batch_size']
    head = f'{total} tokens in a batch; figures of one text of it, exponents of the upper half'
    return report_fits(rows, 'tokens', head)


def encoder_args(name: str, layers: int) -> dict[str, Any]:
    """Return the settings of an encoder that both models share."""
    return dict(
        encoder_mixer=BASELINE if name == MATERIALISED else name,
        hidden_size=DIM,
        intermediate_size=DIM,
        num_attention_heads=HEADS,
        num_hidden_layers=layers,
    )


def build(model_class: Any, config: Any, name: str) -> nn.Module:
    """Build a model of transformers with random weights, its attention fused or materialised."""
    return model_class._from_config(config, attn_implementation='eager' if name == MATERIALISED else 'sdpa')


def create_classifier(name: str, tokens: int) -> nn.Module:
    """Build the classifier of MIND with an encoder, for texts of so many tokens; its table of words is not used."""
    sizes: dict[str, Any] = dict(max_position_embeddings=tokens, vocab_size=8, num_labels=LABELS)
    config = fastformer.PRESETS['mind_topic'].create_config(**encoder_args(name, 2), **sizes)
    return build(fastformer.FastformerForSequenceClassification, config, name)


def create_predictor(name: str, behaviors: int) -> nn.Module:
    """Build the predictor of conversions with an encoder, for so many behaviours."""
    sizes: dict[str, Any] = dict(vocab_size=VOCAB, embedding_size=300, max_position_embeddings=TEXT_TOKENS)
    sizes |= dict(max_behaviors=behaviors, behavior_types=TYPES)
    config = fastformer.FastformerConversionConfig(**encoder_args(name, 1), **sizes)
    return build(fastformer.FastformerForConversion, config, name)


def measure_requests(args: argparse.Namespace, names: Sequence[str], device: torch.device) -> Report:
    """Measure single requests with every encoder, interleaved.

    The rows are those of `compare` with `behaviors`, `what` (of FORMS) and `p99_milliseconds`.

    Raises:
        ValueError: a number of behaviours is below 1.
    """
    behaviors, rounds = args.behaviors or BEHAVIORS, args.rounds or 100
    if min(behaviors) < 1:
        raise ValueError(f'expected numbers of behaviours from 1, got {list(behaviors)}')
    rows: list[dict[str, Any]] = []
    for length in sorted(set(behaviors)):
        requests = {name: make_request(create_predictor(name, length), length, device) for name in names}
        for form, words in FORMS.items():
            candidates = [
                Candidate(name, lambda training, ready=request[form]: ready)  # type: ignore[misc]
                for name, request in requests.items()
            ]
            learns = form == 'training'
            turns = max(1, round(TRAINING_ROUNDS * rounds)) if learns else rounds
            directions = DIRECTIONS[learns : learns + 1]
            found = compare(candidates, device, turns, dtype=args.dtype, directions=directions, single=True)
            rows += [{'behaviors': length, 'what': words, 'rounds': turns, **row} for row in found]
    return Report(rows, f'one user with {ADS} ads, {TEXT_TOKENS} tokens a text; ratios to the first encoder')


def make_request(model: Any, behaviors: int, device: torch.device) -> dict[str, Prepared]:
    """Return the forms of one request, in which the texts of behaviours come before those of the ads."""
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
    model = model.to(device).eval()
    forms: dict[str, Callable[[], Tensor]] = {
        'whole': lambda: model(*request).logits,
        'kept vectors': lambda: model.score(model.encode_users(vectors, done, types), vectors[ads]),
        'training': lambda: model.train()(*request, labels=labels).loss,
    }
    # The gradients of the weights exist before a call, which adds to them.
    return {form: Prepared(call, list(model.parameters()), learn=Tensor.backward) for form, call in forms.items()}
