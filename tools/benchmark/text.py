"""Fastformer and the other text encoders: against the number of tokens (Fastformer Fig. 2), and latency (Table 8)."""

import argparse
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tools.benchmark import scaling
from tools.benchmark.compare import DIRECTIONS, Candidate, Prepared, compare, most_bytes
from tools.benchmark.printer import Report, plot_curves

BASELINE = 'transformer'
MATERIALISED = 'transformer materialised'
# MIND's topics.
LABELS = 18
# Before the first length a part of its batch tells what the whole could take.
PROBE = 16
BEHAVIORS = (50, 100, 200, 500, 1000)
# The table of words is not part of what is compared.
VOCAB = 1000
TYPES = ['search', 'page', 'ad']
# What a call computes: everything; what is left where a server keeps the vectors of texts; everything in training.
FORMS = {
    'whole': 'texts, user and ads',
    'kept vectors': 'user and ads, with the vectors of the texts kept',
    'training': 'forward and backward of texts, user and ads',
}
# A call in training is not waited for: a tenth of the rounds.
TRAINING_ROUNDS = 0.1


class Size(NamedTuple):
    """The size of the encoders, and of a request.

    Args:
        depth: Layers of the classifier; None is the paper's, 2, and 1 for each encoder of the conversions.
        ads: That are judged for a user.
        text_tokens: Of each text of a request.
    """

    dim: int = 256
    heads: int = 16
    depth: int | None = None
    ads: int = 20
    text_tokens: int = 16


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the classifier of MIND at lengths, or with --behaviors the predictor of conversions."""
    names = choose(args.models)
    size = Size(depth=args.depth)
    if args.behaviors is not None:
        rounds = 100 if args.rounds is None else args.rounds
        rows = measure_conversion(args.behaviors or BEHAVIORS, size, device, args.dtype, rounds, names)
        head = f'one user with {size.ads} ads, {size.text_tokens} tokens a text; ratios to the first encoder'
        return Report(rows, head)
    limit = scaling.Limit(args.most_seconds, most_bytes(args.most_gib, device))
    rounds = 3 if args.rounds is None else args.rounds
    lengths = args.tokens or scaling.TOKENS
    rows = measure_tokens(lengths, args.total_tokens, limit, device, args.dtype, rounds, names, size)
    fits = scaling.fit_rows(rows, 'tokens', ('milliseconds', 'peak_bytes'))
    head = f'{args.total_tokens} tokens in a batch; figures of one text of it, exponents of the upper half'
    return Report(rows, head, fits, partial(plot_curves, rows, fits, 'tokens', head))


def choose(models: Sequence[str] | None) -> list[str]:
    """Return the encoders: the fused Transformer, the materialised one, and the others of `encoder_mixer`.

    Args:
        models: Names; None is all.

    Raises:
        ValueError: an encoder is not known.
    """
    known = [BASELINE, MATERIALISED, *(name for name in library().ENCODERS if name != BASELINE)]
    if models is not None and set(models) - set(known):
        raise ValueError(f'expected names among {known}, got {list(models)}')
    return [name for name in known if models is None or name in models]


def library() -> Any:
    """Import and return `aft_vision.fastformer`.

    Raises:
        ImportError: transformers is not installed.
    """
    try:
        from aft_vision import fastformer
    except ImportError as error:
        raise ImportError(f"text encoders need transformers: pip install 'aft-vision[text]' ({error})") from error
    return fastformer


def measure_tokens(
    tokens: Sequence[int],
    total_tokens: int,
    limit: scaling.Limit,
    device: torch.device,
    dtype: str,
    rounds: int,
    names: Sequence[str],
    size: Size,
) -> list[dict[str, Any]]:
    """Measure the classifier of MIND with encoders at lengths, those of one length interleaved.

    Args:
        total_tokens: In a batch; it has at least one text.
        limit: Of a call, which takes the whole batch.

    Returns:
        The rows of `measure_until`. Time and memory are of one text: those of the batch are `batch_milliseconds` and
        `batch_peak_bytes`.

    Raises:
        ValueError: there are fewer than two lengths, or no token in a batch.
    """
    if total_tokens < 1:
        raise ValueError(f'expected at least 1 token in a batch, got {total_tokens}')
    shapes = [scaling.Shape(max(1, total_tokens // each), each) for each in scaling.ascending_lengths(tokens)]
    few = scaling.Shape(max(1, shapes[0].batch // PROBE), shapes[0].tokens)
    probes = [] if few in shapes else [few]

    # The encoders of a shape share what they get.
    @lru_cache(maxsize=1)
    def inputs(shape: scaling.Shape, width: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        embeds = torch.randn(*shape, width, generator=generator)
        return embeds.to(device), torch.randint(LABELS, (shape.batch,), generator=generator).to(device)

    def prepare(name: str, shape: scaling.Shape, training: bool) -> Prepared:
        model: Any = create_classifier(name, shape.tokens, size).to(device).train(training)
        embeds, labels = inputs(shape, model.config.embedding_size)
        # The gradients of the weights are there before a call, and are added to.
        return Prepared(
            lambda: model(inputs_embeds=embeds, labels=labels).loss,
            list(model.parameters()),
            [embeds, labels],
            learn=Tensor.backward,
        )

    def make(shape: scaling.Shape) -> list[Candidate]:
        return [Candidate(name, partial(prepare, name, shape)) for name in names]

    rows = scaling.measure_until(make, [*probes, *shapes], limit, device, rounds, dtype=dtype, directions=DIRECTIONS)
    tried = {(probe.batch, probe.tokens) for probe in probes}
    return [_of_a_text(row) for row in rows if 'name' in row and _is_kept(row, tried)]


def create_classifier(name: str, tokens: int, size: Size) -> nn.Module:
    """Build the classifier of MIND with an encoder, for texts of so many tokens; its table of words is not used."""
    config = (
        library()
        .PRESETS['mind_topic']
        .create_config(
            encoder_mixer=BASELINE if name == MATERIALISED else name,
            attn_implementation='eager' if name == MATERIALISED else 'sdpa',
            hidden_size=size.dim,
            intermediate_size=size.dim,
            num_attention_heads=size.heads,
            num_hidden_layers=2 if size.depth is None else size.depth,
            max_position_embeddings=tokens,
            vocab_size=8,
            num_labels=LABELS,
        )
    )
    return library().FastformerForSequenceClassification(config)


def measure_conversion(
    behaviors: Sequence[int],
    size: Size,
    device: torch.device,
    dtype: str,
    rounds: int,
    names: Sequence[str],
) -> list[dict[str, Any]]:
    """Measure single requests with every encoder, interleaved.

    Args:
        behaviors: Numbers M of behaviours of the user.
        rounds: Requests of each encoder.

    Returns:
        For each number of behaviours, form of FORMS and encoder the row of `compare` with `behaviors`, `what` and
        `p99_milliseconds`.

    Raises:
        ValueError: a number is below 1.
    """
    lengths = sorted(set(behaviors))
    if min(lengths) < 1:
        raise ValueError(f'expected numbers of behaviours from 1, got {list(behaviors)}')
    rows: list[dict[str, Any]] = []
    for length in lengths:
        requests = {name: make_request(create_predictor(name, length, size), length, size, device) for name in names}
        for form, words in FORMS.items():
            candidates = [
                Candidate(name, lambda training, found=request[form]: found)  # type: ignore[misc]
                for name, request in requests.items()
            ]
            learns = form == 'training'
            turns = max(1, round(TRAINING_ROUNDS * rounds)) if learns else rounds
            directions = DIRECTIONS[learns : learns + 1]
            found = compare(candidates, device, turns, dtype=dtype, directions=directions, single=True)
            rows += [{'behaviors': length, 'what': words, 'rounds': turns, **row} for row in found]
    return rows


def create_predictor(name: str, behaviors: int, size: Size) -> nn.Module:
    """Build the predictor of conversions with an encoder, for so many behaviours, with random weights."""
    config = library().FastformerConversionConfig(
        encoder_mixer=BASELINE if name == MATERIALISED else name,
        vocab_size=VOCAB,
        embedding_size=300,
        hidden_size=size.dim,
        intermediate_size=size.dim,
        num_attention_heads=size.heads,
        num_hidden_layers=1 if size.depth is None else size.depth,
        max_position_embeddings=size.text_tokens,
        max_behaviors=behaviors,
        behavior_types=TYPES,
    )
    attention = 'eager' if name == MATERIALISED else 'sdpa'
    return library().FastformerForConversion._from_config(config, attn_implementation=attention)


def make_request(model: Any, behaviors: int, size: Size, device: torch.device) -> dict[str, Prepared]:
    """Return the forms of one request, in which the texts of behaviours come before those of the ads."""
    draw = torch.Generator().manual_seed(0)
    texts = behaviors + size.ads
    # Id 0 is padding.
    input_ids = torch.randint(1, VOCAB, (texts, size.text_tokens), generator=draw).to(device)
    types = torch.randint(len(TYPES), (1, behaviors), generator=draw).to(device)
    rows = torch.arange(texts, device=device)[None]
    vectors = torch.randn(texts, size.dim, generator=draw).to(device)
    done, ads = rows[:, :behaviors], rows[:, behaviors:]
    request = (input_ids, torch.ones_like(input_ids), ads, done, types)
    labels = torch.zeros(ads.shape, device=device)
    model = model.to(device).eval()
    forms: dict[str, Callable[[], Tensor]] = {
        'whole': lambda: model(*request).logits,
        'kept vectors': lambda: model.score(model.encode_users(vectors, done, types), vectors[ads]),
        'training': lambda: model.train()(*request, labels=labels).loss,
    }
    # The gradients of the weights are there before a call, and are added to.
    return {form: Prepared(call, list(model.parameters()), learn=Tensor.backward) for form, call in forms.items()}


def _is_kept(row: dict[str, Any], probes: set[tuple[int, int]]) -> bool:
    # Of a probe only why an encoder stopped.
    return 'refused' in row or 'error' in row or (row['batch_size'], row['tokens']) not in probes


def _of_a_text(row: dict[str, Any]) -> dict[str, Any]:
    whole = {key: row[key] for key in ('milliseconds', 'peak_bytes') if key in row}
    return {
        **row,
        **{key: value / row['batch_size'] for key, value in whole.items()},
        **{f'batch_{key}': value for key, value in whole.items()},
    }
