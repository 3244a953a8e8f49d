"""Transfer of weights from DeiT and other vision transformers to AFT models (AFT Sec. 5.3, Table 8).

Patch embedding, values, output projections, norms, MLPs and head have the same role in a ViT and in an AFT model and
are copied. Queries and keys are not: AFT does not multiply queries with keys.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import Attention
from timm.models import adapt_input_conv, clean_state_dict
from torch import Tensor, nn

from aft_vision.layers import token_mixers
from aft_vision.models.state_dict import StateDictError, find_grid, resample_grid, resample_patches, unknown_grid
from aft_vision.models.transfer_report import TransferOutcome, TransferReport, projection_sizes

PATCHES = 'patch_embed.proj.weight'
# timm's fused projection, or the separate biases of a ViT whose keys have none.
QKV = re.compile(r'(blocks\.\d+\.attn)\.(?:qkv\.(weight|bias)|([qv])_bias)')
LAYER_SCALE = re.compile(r'(blocks\.\d+)\.ls([12])\.gamma')
# Keys that every ViT has; biases may be missing.
CORE = re.compile(
    r'patch_embed\.proj\.weight|blocks\.\d+\.(norm1|norm2|attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.weight'
)
# Position biases of AFT; no ViT has such keys.
AFT_ONLY = ('.attn.kernel.', '.attn.position_bias.', '.attn.offset', '.attn.row_bias.')
PREFIX_TOKENS = ('cls_token', 'dist_token', 'reg_token')


def is_deit_like(state_dict: Mapping[str, Any], model: nn.Module) -> bool:
    """Return whether a state dict belongs to a ViT: it lacks the position biases of the model.

    AFT-simple has no position biases. Its keys and shapes are a ViT's, so only a distilled DeiT is recognised.
    """
    own, given = (any(part in key for key in keys for part in AFT_ONLY) for keys in (model.state_dict(), state_dict))
    return (own and not given) or 'dist_token' in state_dict


def deit_to_aft(
    state_dict: Mapping[str, Any], model: nn.Module, grid: tuple[int, int] | None = None
) -> tuple[dict[str, Tensor], TransferReport]:
    """Map the weights of a DeiT or ViT to an AFT model (AFT Table 8); neither is modified.

    Patch embedding, values, output projections, norms, MLPs, layer scale and head are copied, and class token and
    position embedding if the model has them. Queries and keys are left out. Tensors that the source lacks keep the
    model's values.

    * A patch embedding of another size and a position embedding on another grid are resampled by timm's functions.
    * A distilled DeiT averages the logits of its two heads, so their weights and biases are averaged. Its distillation
      token is left out.
    * Layer scale that the model does not have is folded into the projection before it, which changes no output. If
      only the model has it, it is set to 1, because its small initial value would suppress the copied branches.
    * A head for another number of classes is left out.
    * Blocks of softmax attention (`attention_blocks`) get queries and keys too.

    Args:
        state_dict: State dict of a `deit*` or `vit_*` model of timm, or a dict with it under `model` or `state_dict`.
        model: An AFTVisionTransformer of the same width and depth.
        grid: (H, W) of the source's position embedding in tokens. None takes it from the `input_size` of the model's
            `pretrained_cfg`, else the model's own grid if it has as many tokens, else a square.

    Returns:
        A complete state dict of the model, and a report that maps each key of the source to its outcomes: one, or three
        for the queries, keys and values of a fused projection. Layer scale that only the model has is listed under the
        model's key, with 0 elements.

    Raises:
        ValueError: the model is not an AFT model, or the grid is unknown; as StateDictError, the source is not a ViT or
            differs in width, depth or MLP.
    """
    if not token_mixers(model):
        raise ValueError(f'expected a model with AFT mixers, got a {type(model).__name__}')
    if not hasattr(model, 'patch_embed'):
        raise ValueError(f'expected a model with the patches and blocks of a ViT, got a {type(model).__name__}')
    source = unwrap_state_dict(state_dict)
    names = {key: _timm_name(key) for key in source}
    transfer = _Transfer({names[key]: value for key, value in source.items()}, model, grid)
    transfer.check()
    transfer.merge()
    report = {key: transfer.place(name) for key, name in names.items()}
    report.update(transfer.neutralize_layer_scale())
    return transfer.result, report


class _Transfer:
    """A transfer of the tensors of a source, under timm's names, into a copy of a model's state dict."""

    def __init__(self, source: dict[str, Tensor], model: nn.Module, grid: tuple[int, int] | None) -> None:
        self.source, self.grid = source, grid
        self.model: Any = model
        self.own = model.state_dict()
        self.result = dict(self.own)
        # How tensors were changed by merging others into them, and where the merged ones went.
        self.merged: dict[str, str] = {}
        self.moved: dict[str, str] = {}

    def check(self) -> None:
        """Raise a StateDictError unless the source is a ViT of the model's width and depth."""
        aft = [name for name in self.source if any(part in name for part in AFT_ONLY)]
        if aft:
            raise StateDictError(f'expected weights of a ViT, got those of an AFT model, which has {aft[0]}')
        qkv = self.source.get('blocks.0.attn.qkv.weight')
        if qkv is not None and PATCHES in self.source:
            depth = len({name.split('.')[1] for name in self.source if name.startswith('blocks.')})
            shape, wanted = (qkv.shape[-1], depth), (self.model.embed_dim, len(self.model.blocks))
            if shape != wanted:
                raise StateDictError(
                    f'expected weights of width {wanted[0]} and depth {wanted[1]}, as the model has, got width '
                    f'{shape[0]} and depth {shape[1]}, which embed_dim={shape[0]} and depth={shape[1]} make'
                )
        missing = [name for name in self.own if CORE.fullmatch(name) and name not in self.source]
        if missing or any(name.startswith('patch_embed.backbone.') for name in self.source):
            unplaced = ', '.join([name for name in self.source if name not in self.own][:3])
            wanted_key = f' with {missing[0]}' if missing else ''
            raise StateDictError(f'expected weights of a ViT{wanted_key}, got {unplaced or "only some of them"}')

    def merge(self) -> None:
        """Fold tensors that the model lacks into their neighbours, which changes no output."""
        for parameter in ('weight', 'bias'):
            head, other = f'head.{parameter}', f'head_dist.{parameter}'
            if head in self.source and other in self.source:
                self._fold(other, head, (self.source[head] + self.source[other]) / 2, 'mean of the two heads')
        for name in list(self.source):
            match = LAYER_SCALE.fullmatch(name)
            if match and name not in self.own:
                self._fold_layer_scale(name, f'{match[1]}.{"attn.proj" if match[2] == "1" else "mlp.fc2"}')
        if 'pos_embed' in self.own and 'pos_embed' in self.source and self.model.no_embed_class:
            for name, rows in self._source_positions()[0].items():
                if rows.any():
                    self.source[name] = self.source[name] + rows
                    self.merged[name] = 'plus its position embedding'

    def _fold_layer_scale(self, name: str, projection: str) -> None:
        gamma = self.source[name]
        for key in (f'{projection}.bias', f'{projection}.weight'):
            if key in self.source and key in self.own:
                scaled = self.source[key] * (gamma if key.endswith('bias') else gamma[:, None])
                self._fold(name, key, scaled, 'times layer scale, which the model does not have')

    def _fold(self, name: str, target: str, value: Tensor, how: str) -> None:
        self.source[target], self.merged[target], self.moved[name] = value, how, target

    def place(self, name: str) -> list[TransferOutcome]:
        """Put one tensor into the result and return its outcome."""
        value = self.source[name]
        block, within, _ = name.partition('.attn.')
        if within and not projection_sizes(self.model.get_submodule(f'{block}.attn')):
            return [self._left_out(name)]
        if match := QKV.fullmatch(name):
            return self._place_projections(value, *match.groups())
        if name in self.moved:
            target = self.moved[name]
            if target not in self.own or self.own[target].shape != self.source[target].shape:
                return [self._left_out(name)]
            return [TransferOutcome('merged', '', value.numel(), target, self.merged[target])]
        if name == PATCHES:
            return [self._place_patches(value)]
        if name == 'pos_embed' and name in self.own:
            return [self._place_positions()]
        # The last norm comes before or after the pooling.
        first, _, rest = name.partition('.')
        other = {'norm': f'fc_norm.{rest}', 'fc_norm': f'norm.{rest}'}.get(first, name)
        target = name if name in self.own else other
        if target in self.own and self.own[target].shape == value.shape:
            return [self._placed('copied', name, target, value, '' if target == name else f'{first} in the source')]
        if target in self.own and not name.startswith(('head.', 'reg_token')):
            wanted = tuple(self.own[target].shape)
            raise StateDictError(f'expected {name} of shape {wanted}, as the model has, got {tuple(value.shape)}')
        return [self._left_out(name)]

    def neutralize_layer_scale(self) -> TransferReport:
        """Set layer scale that only the model has to 1, which is equivalent to a source without it."""
        names = [name for name in self.own if LAYER_SCALE.fullmatch(name) and name not in self.source]
        self.result.update({name: torch.ones_like(self.own[name]) for name in names})
        note = 'no layer scale in the source is a layer scale of 1'
        return {name: [TransferOutcome('copied', '', 0, name, note)] for name in names}

    def _placed(self, action: str, name: str, target: str, value: Tensor, note: str) -> TransferOutcome:
        # A copy, so that training the model does not change the source.
        self.result[target] = value.detach().to(self.own[target], copy=True)
        if name in self.merged:
            action, note = 'merged', ', '.join(filter(None, [note, self.merged[name]]))
        return TransferOutcome(action, '', self.source[name].numel(), target, note)

    def _left_out(self, name: str) -> TransferOutcome:
        target = name.replace('head_dist', 'head')
        if name.startswith('head') and target in self.own:
            note = f'the model has {self.own[target].shape[0]} classes, the source {self.source[name].shape[0]}'
        else:
            note = 'the model has no such tensor'
        return TransferOutcome('left out', '', self.source[name].numel(), note=note)

    def _place_projections(
        self, value: Tensor, block: str, parameter: str | None, part: str | None
    ) -> list[TransferOutcome]:
        dim, target = self.model.embed_dim, f'{block}.qkv.{parameter or "bias"}'
        if part is None and value.shape[0] != 3 * dim:
            raise StateDictError(f'expected {target} of {3 * dim} rows, three projections, got {value.shape[0]}')
        sizes = projection_sizes(self.model.get_submodule(block))
        names = 'qkv' if part is None else part
        note = 'as in the paper' if target in self.own else 'the model has no such tensor'
        copied = 'qkv' if isinstance(self.model.get_submodule(block), Attention) else 'v'
        return [
            self._place_rows(name, rows, target, sizes)
            if name in copied and target in self.own
            else TransferOutcome('left out', name, rows.numel(), note=note)
            for name, rows in zip(names, value.split(dim), strict=True)
        ]

    def _place_rows(self, part: str, rows: Tensor, target: str, sizes: dict[str, int]) -> TransferOutcome:
        if self.result[target] is self.own[target]:
            self.result[target] = self.own[target].clone()
        before = 'qkv'[: 'qkv'.index(part)]
        start = sum(sizes.get(name, 0) for name in before)
        self.result[target][start : start + rows.shape[0]] = rows.to(self.result[target])
        return TransferOutcome('copied', part, rows.numel(), target)

    def _place_patches(self, value: Tensor) -> TransferOutcome:
        own = self.own[PATCHES]
        if value.ndim != 4 or value.shape[0] != own.shape[0]:
            raise StateDictError(f'expected {PATCHES} like {tuple(own.shape)}, got {tuple(value.shape)}')
        size, channels = list(own.shape[-2:]), own.shape[1]
        changes = []
        if list(value.shape[-2:]) != size:
            changes.append(f'{value.shape[-2]} x {value.shape[-1]} to {size[0]} x {size[1]} pixels')
        if value.shape[1] != channels:
            changes.append(f'{value.shape[1]} to {channels} channels')
        if not changes:
            return self._placed('copied', PATCHES, PATCHES, value, '')
        resized = adapt_input_conv(channels, resample_patches(value, size), base_chans=value.shape[1])
        return self._placed('resampled', PATCHES, PATCHES, resized, ', '.join(changes))

    def _place_positions(self) -> TransferOutcome:
        own = self.own['pos_embed']
        prefix, patches, grid = self._source_positions()
        if patches.shape[-1] != own.shape[-1]:
            raise StateDictError(f'expected pos_embed of width {own.shape[-1]}, got {patches.shape[-1]}')
        own_prefix = {} if self.model.no_embed_class else _split_prefix(self.own, own)
        fitting = {
            name: rows for name, rows in prefix.items() if name in own_prefix and rows.shape == own_prefix[name].shape
        }
        rows = [fitting.get(name, mine.to(patches)) for name, mine in own_prefix.items()]
        new_grid = tuple(self.model.patch_embed.grid_size)
        rows.append(resample_grid(patches, self.model, grid).unsqueeze(0))
        notes = [] if grid == new_grid else [f'{grid[0]} x {grid[1]} to {new_grid[0]} x {new_grid[1]} tokens']
        notes += [f'without the row of {name}' for name in prefix if name not in fitting and name not in self.merged]
        action = 'copied' if grid == new_grid else 'resampled'
        return self._placed(action, 'pos_embed', 'pos_embed', torch.cat(rows, dim=1), ', '.join(notes))

    def _source_positions(self) -> tuple[dict[str, Tensor], Tensor, tuple[int, int]]:
        """Return the source's position embedding: rows (1, n, C) of prefix tokens, rows (T, C) of the grid, its size.

        DeiT III and others have no position for prefix tokens: their rows are then 0.
        """
        value = self.source['pos_embed']
        prefix = sum(self.source[name].shape[1] for name in PREFIX_TOKENS if name in self.source)
        for count in dict.fromkeys((prefix, 0)):
            tokens = value.shape[1] - count
            grid = self.grid or find_grid(self.model, self.source[PATCHES], tokens)
            if grid is not None and grid[0] * grid[1] == tokens:
                rows = value[:, :count] if count else value.new_zeros(1, prefix, value.shape[-1])
                return _split_prefix(self.source, rows), value[0, count:], grid
        raise unknown_grid(value.shape[1] - prefix)


def _split_prefix(tensors: Mapping[str, Tensor], positions: Tensor) -> dict[str, Tensor]:
    counts = {name: tensors[name].shape[1] for name in PREFIX_TOKENS if name in tensors}
    starts = itertools.accumulate(counts.values(), initial=0)
    return {name: positions[:, start : start + n] for (name, n), start in zip(counts.items(), starts, strict=False)}


def unwrap_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state dict, which may be under the key `state_dict` or `model`.

    Raises:
        StateDictError: it is none, or has values that are not tensors.
    """
    if not isinstance(state_dict, Mapping):
        raise StateDictError(f'expected a state dict, got a {type(state_dict).__name__}')
    for key in ('state_dict', 'model'):
        if isinstance(state_dict.get(key), Mapping):
            state_dict = state_dict[key]
    for key, value in state_dict.items():
        if not isinstance(value, Tensor):
            raise StateDictError(f'expected a state dict, got {key} with a {type(value).__name__}')
    return dict(state_dict)


def _timm_name(key: str) -> str:
    # Remove the prefixes of DistributedDataParallel and torch.compile, and rename DeiT III's layer scale.
    (name,) = clean_state_dict({key: None})
    return re.sub(r'(blocks\.\d+)\.gamma_([12])', r'\1.ls\2.gamma', name)
