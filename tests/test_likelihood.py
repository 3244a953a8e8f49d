import math

import numpy as np
import pytest
import torch
from helpers import generator

from aft_vision.data import IGNORED, EvalDataset, sequence_eval_loader
from aft_vision.likelihood import BitsEvaluator, evaluate_bits, sequence_loss
from aft_vision.models.decoders import create_decoder

TEXT = np.random.default_rng(0).integers(256, size=37).astype(np.uint8)


def make_decoder(**kwargs: object) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = dict(depth=1, dim=16, window=4, bias_dim=2, context=8, dropout=0.5)
    return create_decoder('aft_local_char', **{**sizes, **kwargs})


class Uniform(torch.nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.full((*tokens.shape, 256), 3.0, dtype=torch.float64)


def test_a_uniform_model_has_exactly_8_bits():
    metrics = evaluate_bits(Uniform(), sequence_eval_loader(EvalDataset(TEXT, 8, 3), 4))
    assert metrics['bits'] == 8.0
    assert (metrics['tokens'], metrics['samples']) == (37, 11)


def test_the_bits_of_known_probabilities_are_their_negative_logarithms():
    # 1/4, 1/8 and 1/2, the last of which does not count.
    logits = torch.tensor([[[0.25, 0.75], [0.125, 0.875], [0.5, 0.5]]]).log()
    targets = torch.tensor([[0, 0, IGNORED]])
    evaluator = BitsEvaluator()
    evaluator.update(logits, targets)
    assert evaluator.compute()['bits'] == pytest.approx(2.5, rel=1e-6)
    assert evaluator.compute()['tokens'] == 2
    assert sequence_loss(logits, targets).item() == pytest.approx(2.5 * math.log(2), rel=1e-6)


def test_accuracy_is_of_the_targets_that_count():
    logits = torch.eye(4).expand(2, 4, 4)
    targets = torch.tensor([[0, 1, IGNORED, 0], [1, IGNORED, IGNORED, 3]])
    evaluator = BitsEvaluator()
    for row in range(2):
        evaluator.update(logits[row : row + 1], targets[row : row + 1])
    assert evaluator.compute()['accuracy'] == 60.0


def test_batches_of_other_sizes_count_by_their_tokens():
    logits, targets = torch.randn(5, 6, 9, generator=generator()), torch.randint(9, (5, 6), generator=generator())
    targets[0, :4] = IGNORED
    evaluator = BitsEvaluator()
    for part in (slice(0, 1), slice(1, 5)):
        evaluator.update(logits[part], targets[part])
    chosen = logits.double().log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = -chosen[targets != IGNORED].mean().item()
    found = evaluator.compute()
    assert found['loss'] == pytest.approx(expected, rel=1e-6)
    assert found['bits'] == pytest.approx(expected / math.log(2), rel=1e-6)
    assert found['tokens'] == 26


@pytest.mark.parametrize('stride', [1, 3, 8])
def test_a_sliding_window_is_the_sum_over_characters_of_their_windows(stride):
    model = make_decoder().eval()
    total = 0.0
    with torch.no_grad():
        for place in range(len(TEXT)):
            # The window whose last characters have this one among them.
            end = 8 if place < 8 else min(8 + stride * ((place - 8) // stride + 1), len(TEXT))
            window = torch.from_numpy(TEXT[end - 8 : end]).long()[None]
            total += model.nll(window)[0, place - (end - 8)].item()
    metrics = evaluate_bits(model, sequence_eval_loader(EvalDataset(TEXT, 8, stride), 5))
    assert metrics['loss'] == pytest.approx(total / len(TEXT), rel=1e-6)
    assert metrics['tokens'] == len(TEXT)


def test_the_loss_is_the_mean_of_the_models_likelihood():
    model, tokens = make_decoder(dropout=0.0), torch.from_numpy(TEXT[:32]).long().view(4, 8)
    torch.testing.assert_close(sequence_loss(model(tokens), tokens), model.nll(tokens).mean())


def test_logits_of_another_shape_are_rejected():
    with pytest.raises(ValueError, match=r"shape \(2, 3, 'V'\), got \(2, 4, 5\)"):
        sequence_loss(torch.zeros(2, 4, 5), torch.zeros(2, 3, dtype=torch.int64))
