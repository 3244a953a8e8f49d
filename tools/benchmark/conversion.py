"""Latency and memory of predicting conversions with each encoder (Fastformer Table 8), one user a call."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aft_vision.timing import time_latency
from tools.benchmark.fastformer import BASELINE, MATERIALISED, encoder_names
from tools.benchmark.memory import peak_memory
from tools.benchmark.times import Call
from tools.machine import autocast

BEHAVIORS = (50, 100, 200, 500, 1000)
# The table of words is not part of what is compared.
VOCAB = 1000
TYPES = ['search', 'page', 'ad']
# What a call computes: everything; what is left where a server keeps the vectors of texts; everything in training.
FORMS = {
    'whole': 'texts, user and ads',
    'at hand': 'user and ads, with the vectors of the texts at hand',
    'training': 'forward and backward of texts, user and ads',
}
# A call in training is not waited for: a tenth of the rounds.
TRAINING_ROUNDS = 0.1


class Setting(NamedTuple):
    """A request, and the size of the model.

    Args:
        ads: That are judged for the user.
        text_tokens: Of each text.
        dim: Width.
        depth: Layers of the text encoder and of the user encoder.
    """

    ads: int = 20
    text_tokens: int = 16
    dim: int = 256
    heads: int = 16
    depth: int = 1


def measure_conversion(
    behaviors: Sequence[int],
    setting: Setting,
    device: torch.device,
    dtype: str,
    rounds: int,
    *,
    models: Sequence[str] | None = None,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Measure single requests with every encoder, interleaved.

    Args:
        behaviors: Numbers M of behaviours of the user.
        dtype: Key of PRECISIONS.
        rounds: Requests of each encoder.
        models: Names of `encoder_names`; None is all. The Transformer is compared to if it is among them, else the
            first.

    Returns:
        For each number of behaviours, form of FORMS and encoder: `form`, `behaviors`, `encoder`, `rounds`, over these
        `milliseconds` (the median) and `p99_milliseconds` of a request, the median `ratio` of the time of the first
        encoder in the same round to its own with `ratio_quartiles`, `peak_bytes` beyond the weights and the request,
        and `peak_ratio`, of its peak to that of the first.

    Raises:
        ValueError: a number is below 1, or an encoder is not known.
        ImportError: transformers is not installed.
    """
    known = encoder_names()
    if models is not None and set(models) - set(known):
        raise ValueError(f'expected names among {known}, got {list(models)}')
    lengths = sorted(set(behaviors))
    if min(*setting, *lengths) < 1:
        raise ValueError(f'expected numbers from 1, got {list(behaviors)} behaviours and {setting}')
    chosen = [name for name in known if models is None or name in models]
    rows = []
    for length in lengths:
        requests = {name: make_request(create_model(name, length, setting), length, setting, device) for name in chosen}
        for form in FORMS:
            learns = form == 'training'
            calls = {name: _in_precision(device, dtype, request[form]) for name, request in requests.items()}
            with torch.inference_mode(not learns):
                turns = max(1, round(TRAINING_ROUNDS * rounds)) if learns else rounds
                rows += _measure(form, length, calls, device, turns, progress)
    return rows


def create_model(name: str, behaviors: int, setting: Setting) -> nn.Module:
    """The predictor of conversions with an encoder, for so many behaviours, with random weights."""
    from aft_vision.fastformer import FastformerConversionConfig, FastformerForConversion

    config = FastformerConversionConfig(
        encoder_mixer=BASELINE if name == MATERIALISED else name,
        vocab_size=VOCAB,
        embedding_size=300,
        hidden_size=setting.dim,
        intermediate_size=setting.dim,
        num_attention_heads=setting.heads,
        num_hidden_layers=setting.depth,
        max_position_embeddings=setting.text_tokens,
        max_behaviors=behaviors,
        behavior_types=TYPES,
    )
    attention = 'eager' if name == MATERIALISED else 'sdpa'
    return FastformerForConversion._from_config(config, attn_implementation=attention)


def format_conversion(rows: Sequence[dict[str, Any]]) -> str:
    """A table for each form and number of behaviours."""
    width, lines = max(len(row['encoder']) for row in rows), []
    for form, words in FORMS.items():
        for length in dict.fromkeys(row['behaviors'] for row in rows):
            lines.append(f'{words}; {length} behaviours')
            lines.append(
                f'  {"":{width}} {"ms":>9} {"p99 ms":>9} {"ratio":>6} {"quartiles":>13} {"peak MiB":>8} {"to first":>8}'
            )
            for row in rows:
                if (row['form'], row['behaviors']) == (form, length):
                    low, high = row['ratio_quartiles']
                    lines.append(
                        f'  {row["encoder"]:{width}} {row["milliseconds"]:9.2f} {row["p99_milliseconds"]:9.2f} '
                        f'{row["ratio"]:6.2f} {f"{low:.2f} - {high:.2f}":>13} {row["peak_bytes"] / 2**20:8.2f} '
                        f'{row["peak_ratio"]:8.2f}'
                    )
    return '\n'.join(lines)


def make_request(
    model: Any, behaviors: int, setting: Setting, device: torch.device
) -> dict[str, Callable[[], Tensor | None]]:
    """The forms of one request, whose behaviours' texts come before those of the ads."""
    draw = torch.Generator().manual_seed(0)
    texts = behaviors + setting.ads
    # Id 0 is padding.
    input_ids = torch.randint(1, VOCAB, (texts, setting.text_tokens), generator=draw).to(device)
    types = torch.randint(len(TYPES), (1, behaviors), generator=draw).to(device)
    rows = torch.arange(texts, device=device)[None]
    vectors = torch.randn(texts, setting.dim, generator=draw).to(device)
    done, ads = rows[:, :behaviors], rows[:, behaviors:]
    request = (input_ids, torch.ones_like(input_ids), ads, done, types)
    labels = torch.zeros(ads.shape, device=device)
    model = model.to(device).eval()
    return {
        'whole': lambda: model(*request).logits,
        'at hand': lambda: model.score(model.encode_users(vectors, done, types), vectors[ads]),
        # The gradients of the weights are there before a call, and are added to.
        'training': lambda: model.train()(*request, labels=labels).loss.backward(),
    }


def _in_precision(device: torch.device, dtype: str, request: Call) -> Call:
    def call() -> object:
        with autocast(device, dtype):
            return request()

    return call


def _measure(
    form: str, behaviors: int, calls: dict[str, Call], device: torch.device, rounds: int, progress: bool
) -> list[dict[str, Any]]:
    latencies = time_latency(list(calls.values()), device, rounds, progress=progress)
    peaks = [peak_memory(call, device) for call in calls.values()]
    return [
        {
            'form': form,
            'behaviors': behaviors,
            'encoder': name,
            'rounds': rounds,
            'milliseconds': 1e3 * latency.median,
            'p99_milliseconds': 1e3 * latency.p99,
            'ratio': latency.ratio,
            'ratio_quartiles': latency.quartiles,
            'peak_bytes': peak,
            'peak_ratio': peak / peaks[0],
        }
        for (name, latency), peak in zip(zip(calls, latencies, strict=True), peaks, strict=True)
    ]
