"""Report of a weight transfer: the outcome of each tensor, and totals."""

import re
from typing import Any, NamedTuple

from timm.layers import Attention
from torch import nn

from aft_vision.layers import AFTMixer

PROJECTIONS = {'q': 'queries', 'k': 'keys', 'v': 'values'}
PARTS = {
    r'patch_embed\.': 'patch embedding',
    r'pos_embed': 'position embedding',
    r'cls_token': 'class token',
    r'dist_token': 'distillation token',
    r'reg_token': 'register tokens',
    r'(blocks\.\d+\.norm\d|norm|fc_norm|norm_pre)\.': 'norms',
    r'blocks\.\d+\.attn\.proj\.': 'output projections',
    r'blocks\.\d+\.attn\.(kernel|position_bias|row_bias|column_bias)\.': 'position biases',
    r'blocks\.\d+\.attn\.local_conv\.': 'local convolutions',
    r'blocks\.\d+\.mlp\.': 'MLPs',
    r'blocks\.\d+\.(ls\d\.gamma|gamma_\d)': 'layer scale',
    r'head\.': 'head',
    r'head_dist\.': 'distillation head',
}
INITIALISED = 'as initialised'


class TransferOutcome(NamedTuple):
    """The outcome of a tensor of the source, or of one projection in its fused qkv.

    Attributes:
        action: `copied`, `resampled` to another size, `merged` with another tensor, or `left out`.
        part: `q`, `k` or `v` of a fused projection, else empty.
        numel: Elements in the source; 0 for layer scale that the source lacks.
        target: Key in the model; empty if it was left out.
        note: Why it was left out, or how it was changed.
    """

    action: str
    part: str
    numel: int
    target: str = ''
    note: str = ''

    def __str__(self) -> str:
        part = f'{self.part}: ' if self.part else ''
        target = f' to {self.target}' if self.target else ''
        return f'{part}{self.action}{target}{f" ({self.note})" if self.note else ""}'


TransferReport = dict[str, list[TransferOutcome]]


class Row(NamedTuple):
    """One row of the table of a transfer; each projection of a fused qkv counts as one tensor."""

    action: str
    what: str
    tensors: int
    parameters: int
    note: str


def summarize_transfer(report: TransferReport, model: nn.Module) -> list[Row]:
    """Count the tensors that a transfer copied or left out, and those of the model that it did not set.

    Args:
        report: From `deit_to_aft`.
        model: The model that the weights are for.

    Returns:
        Rows for the actions `copied`, `resampled`, `merged` and `left out`, which count parameters of the source, and
        for `as initialised`, which counts parameters of the model.
    """
    sizes: dict[tuple[str, str, str], list[int]] = {}
    entries = [(key, outcome) for key, outcomes in report.items() for outcome in outcomes]
    for key, outcome in [*entries, *_untouched(report, model)]:
        sizes.setdefault((outcome.action, _part_name(key, outcome.part), outcome.note), []).append(outcome.numel)
    order = ['copied', 'resampled', 'merged', 'left out', INITIALISED]
    rows = [Row(action, what, len(numels), sum(numels), note) for (action, what, note), numels in sizes.items()]
    return sorted(rows, key=lambda row: order.index(row.action))


def describe_transfer(report: TransferReport, model: nn.Module) -> str:
    """Describe in one line what was left out, and what in the model is as initialised."""
    rows = summarize_transfer(report, model)
    left_out, initialised = (
        ', '.join(dict.fromkeys(row.what for row in rows if row.action == action)) or 'nothing'
        for action in ('left out', INITIALISED)
    )
    return f'transferred the weights of a ViT: left out {left_out}; as initialised {initialised}'


def _untouched(report: TransferReport, model: nn.Module) -> list[tuple[str, TransferOutcome]]:
    touched = {(outcome.target, outcome.part) for outcomes in report.values() for outcome in outcomes}
    found = []
    for key, tensor in model.state_dict().items():
        parent = key.rpartition('.')[0]
        rows = projection_sizes(model.get_submodule(parent.rpartition('.')[0])) if parent.endswith('.qkv') else {}
        if rows:
            width = tensor.numel() // tensor.shape[0]
            parts = {part: count * width for part, count in rows.items()}
        else:
            parts = {'': tensor.numel()}
        found += [
            (key, TransferOutcome(INITIALISED, part, n)) for part, n in parts.items() if (key, part) not in touched
        ]
    return found


def projection_sizes(mixer: Any) -> dict[str, int]:
    """Return the rows of queries, keys and values in a fused projection, in their order; {} without one."""
    if isinstance(mixer, Attention):
        return dict.fromkeys('qkv', mixer.attn_dim)
    if not isinstance(mixer, AFTMixer):
        return {}
    return dict(zip('qkv' if mixer.query_gate else 'kv', mixer.split_sizes, strict=True))


def _part_name(key: str, part: str) -> str:
    if part:
        return PROJECTIONS[part]
    # The keys of a source may have the prefix of a wrapper.
    return next(
        (name for pattern, name in PARTS.items() if re.match(rf'((module|_orig_mod)\.)*{pattern}', key)), 'other'
    )
