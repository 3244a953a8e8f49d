"""The notebook's state dict: a model of its structure, written from its equations, gives the same logits."""

from pathlib import Path

import pytest
import torch
import yaml
from helpers import assert_close, generator, randn
from torch import Tensor
from torch.nn import functional as F

from aft_vision.fastformer import FastformerConfig, FastformerForSequenceClassification, convert_notebook_state_dict

C, HEADS, VOCAB, LAYERS = 12, 3, 20, 2


def make_config(**kwargs: object) -> FastformerConfig:
    sizes = dict(vocab_size=VOCAB, hidden_size=C, num_attention_heads=HEADS, num_hidden_layers=LAYERS)
    structure = dict(score='dense', share_layers=False, pooling_hidden_size=C, max_position_embeddings=8, num_labels=4)
    return FastformerConfig(**{**sizes, **structure, **kwargs})


def make_notebook_state() -> dict[str, Tensor]:
    """State of the notebook's model, with its biases of the scores."""
    shapes = {'word_embedding.weight': (VOCAB, C), 'fastformer_model.position_embeddings.weight': (8, C)}
    linears = {'fastformer_model.poolers.0.att_fc1': C, 'fastformer_model.poolers.0.att_fc2': 1, 'dense_linear': 4}
    norms = ['fastformer_model.LayerNorm']
    for i in range(LAYERS):
        layer = f'fastformer_model.encoders.{i}.'
        linears |= {f'{layer}attention.self.{name}': C for name in ('query', 'key', 'transform')}
        linears |= {f'{layer}attention.self.{name}_att': HEADS for name in ('query', 'key')}
        linears |= {f'{layer}{name}.dense': C for name in ('attention.output', 'intermediate', 'output')}
        norms += [f'{layer}attention.output.LayerNorm', f'{layer}output.LayerNorm']
    shapes |= {f'{name}.weight': (width, C) for name, width in linears.items()}
    shapes |= {f'{name}.bias': (width,) for name, width in linears.items()}
    shapes |= {f'{name}.{part}': (C,) for name in norms for part in ('weight', 'bias')}
    return {name: randn(*shape, seed=i, scale=0.5) for i, (name, shape) in enumerate(shapes.items())}


def run_notebook(state: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The logits of the notebook's structure, token by token, for texts without padding."""

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, state[f'{name}.weight'], state[f'{name}.bias'])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (C,), state[f'{name}.weight'], state[f'{name}.bias'], eps=1e-12)

    def pool(x: Tensor, scores: Tensor) -> Tensor:  # (B, N, C) and (B, N, h): each head pools its own channels
        heads = x.unflatten(-1, (scores.shape[-1], -1))
        return (scores.softmax(1)[..., None] * heads).sum(1, keepdim=True).flatten(2)

    model, scale = 'fastformer_model', (C // HEADS) ** -0.5
    x = F.embedding(ids, state['word_embedding.weight']) + state[f'{model}.position_embeddings.weight'][: ids.shape[1]]
    x = norm(x, f'{model}.LayerNorm')
    for i in range(LAYERS):
        layer = f'{model}.encoders.{i}'
        own = f'{layer}.attention.self'
        q, k = linear(x, f'{own}.query'), linear(x, f'{own}.key')
        p = k * pool(q, linear(q, f'{own}.query_att') * scale)
        u = q * pool(p, linear(p, f'{own}.key_att') * scale)
        y = linear(linear(u, f'{own}.transform') + q, f'{layer}.attention.output.dense')
        x = norm(x + y, f'{layer}.attention.output.LayerNorm')
        y = linear(F.gelu(linear(x, f'{layer}.intermediate.dense')), f'{layer}.output.dense')
        x = norm(x + y, f'{layer}.output.LayerNorm')
    scores = linear(torch.tanh(linear(x, f'{model}.poolers.0.att_fc1')), f'{model}.poolers.0.att_fc2')
    return linear(pool(x, scores).squeeze(1), 'dense_linear')


def test_a_converted_model_gives_the_notebooks_logits():
    config, state = make_config(), make_notebook_state()
    model = FastformerForSequenceClassification(config).double().eval()
    converted, report = convert_notebook_state_dict(state, config)
    model.load_state_dict(converted)
    ids = torch.randint(1, VOCAB, (2, 7), generator=generator())
    assert_close(model(ids).logits, run_notebook(state, ids), 1e-12)
    assert set(report) == set(state)
    assert {name for name, target in report.items() if target not in converted} == {
        name for name in state if name.endswith(('_att.bias', 'att_fc2.bias'))
    }


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"parameters of the published notebook .*, got 'bert\.pooler\.weight'"):
        convert_notebook_state_dict({'bert.pooler.weight': torch.zeros(1)}, make_config())


@pytest.mark.parametrize('fields', [dict(score='per_head'), dict(share_layers=True), dict(embedding_size=8)], ids=str)
def test_a_config_of_another_structure_is_refused(fields: dict[str, object]):
    with pytest.raises(ValueError, match=f'expected {next(iter(fields))}=.* as the notebook has, got'):
        convert_notebook_state_dict({}, make_config(**fields))


def test_the_notebooks_recipe_has_the_model_of_the_notebook():
    recipe = yaml.safe_load((Path(__file__).parents[2] / 'configs' / 'fastformer' / 'ag_news.yaml').read_text())
    config = FastformerConfig(**{'vocab_size': VOCAB, 'num_labels': 4, **recipe['model']})
    assert convert_notebook_state_dict({}, config) == ({}, {})
    assert config.pooling_hidden_size == config.intermediate_size == config.hidden_size == 256
    assert config.initializer_range == 0.02
    assert recipe['schedule']['epochs'] == 2
