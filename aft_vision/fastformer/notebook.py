"""Names of the authors' notebook for the weights of `FastformerForSequenceClassification`."""

import re
from collections.abc import Mapping

from torch import Tensor

from .config import FastformerConfig

_LAYER = r'fastformer_model\.encoders\.(\d+)\.'
_OURS = r'model.encoder.layers.\1.'
# The notebook's names, as regular expressions, to ours; None for parameters that cancel in a softmax.
_NAMES: dict[str, str | None] = {
    r'word_embedding\.weight': 'model.embeddings.embed_tokens.weight',
    r'fastformer_model\.position_embeddings\.weight': 'model.embeddings.embed_positions.weight',
    r'fastformer_model\.LayerNorm\.(weight|bias)': r'model.embeddings.norm.\1',
    _LAYER + r'attention\.self\.(query|key|transform)\.(weight|bias)': _OURS + r'attn.\2.\3',
    _LAYER + r'attention\.self\.(query|key)_att\.weight': _OURS + r'attn.\2_score',
    _LAYER + r'attention\.self\.(query|key)_att\.bias': None,
    _LAYER + r'attention\.output\.dense\.(weight|bias)': _OURS + r'attn.proj.\2',
    _LAYER + r'attention\.output\.LayerNorm\.(weight|bias)': _OURS + r'norm1.\2',
    _LAYER + r'intermediate\.dense\.(weight|bias)': _OURS + r'mlp.fc1.\2',
    _LAYER + r'output\.dense\.(weight|bias)': _OURS + r'mlp.fc2.\2',
    _LAYER + r'output\.LayerNorm\.(weight|bias)': _OURS + r'norm2.\2',
    r'fastformer_model\.poolers\.0\.att_fc1\.(weight|bias)': r'model.pooling.hidden.\1',
    r'fastformer_model\.poolers\.0\.att_fc2\.weight': 'model.pooling.score.weight',
    r'fastformer_model\.poolers\.0\.att_fc2\.bias': None,
    r'dense_linear\.(weight|bias)': r'classifier.\1',
}


def convert_notebook_state_dict(
    state_dict: Mapping[str, Tensor], config: FastformerConfig
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Rename the parameters of the authors' classifier.

    The authors publish no trained weights, so this is for weights that were trained with the notebook. The names follow
    the notebook's structure and have not been tested with a file that it wrote: word_embedding, fastformer_model with
    encoders, position_embeddings, LayerNorm and poolers, and dense_linear. Any other name is an error, so nothing is
    lost silently.

    Args:
        state_dict: of the notebook's PyTorch model.
        config: of the model to load into: score='dense', share_layers=False, and otherwise what the notebook has:
            output projection, residual, LayerNorm, feed-forward network, positions, shared queries and values.

    Returns:
        The state dict, for `load_state_dict`, and a report that maps every name of the notebook to ours, or to the
        reason why it is left out: biases of scores, which cancel in the softmax.

    Raises:
        ValueError: the config has another structure, or a name is not in the notebook.
    """
    _check(config)
    converted: dict[str, Tensor] = {}
    report: dict[str, str] = {}
    for name, value in state_dict.items():
        target = _rename(name)
        if target is None:
            report[name] = 'cancels in the softmax'
            continue
        if target.endswith('_score'):
            # Row h of the notebook's matrix has the channels of all heads, head by head.
            value = value.unflatten(1, (config.num_attention_heads, -1))
        converted[target], report[name] = value, target
    return converted, report


def _rename(name: str) -> str | None:
    for pattern, replacement in _NAMES.items():
        if match := re.fullmatch(pattern, name):
            return None if replacement is None else match.expand(replacement)
    raise ValueError(
        'expected the parameters of the published notebook (word_embedding, fastformer_model, dense_linear), '
        f'got {name!r}'
    )


def _check(config: FastformerConfig) -> None:
    parts = ('output_proj', 'residual', 'layer_norm', 'ffn', 'position_embeddings')
    wanted = {
        'score': 'dense',
        'interaction': 'multiply',
        'share_query_value': True,
        'share_layers': False,
        'encoder_mixer': 'fastformer',
        'embedding_size': config.hidden_size,
        **{f'use_{part}': True for part in parts},
    }
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ValueError(
                f'expected {name}={value!r} in the configuration, as the notebook has, got {getattr(config, name)!r}'
            )
