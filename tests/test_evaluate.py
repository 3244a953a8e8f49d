import math
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from timm.data import ImageNetInfo
from torch import nn

from aft_vision.evaluate import ClassEvaluator, check_classes, evaluate, evaluate_all, find_classes

TINY_VIT = dict(depth=1, embed_dim=16, num_heads=1, patch_size=8, img_size=16, num_classes=3)


class Lookup(nn.Module):
    """Returns the logits that the images carry."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def batches(logits: torch.Tensor, targets: torch.Tensor, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(logits.split(size), targets.split(size), strict=True))


def test_accuracy_and_loss_count_every_sample_once_over_uneven_batches():
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(23, 8, generator=generator), torch.randint(8, (23,), generator=generator)
    metrics = evaluate(Lookup(), batches(logits, targets, size=5))
    assert metrics['samples'] == 23
    assert metrics['top1'] == pytest.approx(100 * (logits.argmax(1) == targets).double().mean().item())
    in_top5 = (logits.topk(5).indices == targets[:, None]).any(1).double().mean().item()
    assert metrics['top5'] == pytest.approx(100 * in_top5)
    assert metrics['loss'] == pytest.approx(nn.functional.cross_entropy(logits, targets).item(), rel=1e-5)
    assert metrics['images_per_second'] > 0


def test_top5_of_five_classes_or_fewer_is_left_out():
    metrics = evaluate(Lookup(), [(torch.eye(3), torch.tensor([0, 0, 0]))])
    assert metrics['top1'] == pytest.approx(100 / 3)
    assert 'top5' not in metrics


def test_predictions_are_counted_by_class():
    evaluator = ClassEvaluator(torch.device('cpu'), 6)
    # The last class is after the five best.
    evaluator.update(torch.arange(6.0, 0.0, -1.0).expand(2, 6), torch.tensor([0, 5]))
    assert evaluator.by_class[[0, 1, 5]].tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize('training', [True, False])
def test_evaluation_runs_in_eval_mode_and_restores_the_mode(training):
    model = nn.Sequential(nn.Dropout(p=1.0)).train(training)
    metrics = evaluate(model, [(torch.eye(4), torch.arange(4))])
    assert metrics['top1'] == 100
    assert model.training is training


def test_evaluation_restores_the_mode_of_each_module_also_after_an_error():
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(4).eval()).train()
    model[1].eval()
    evaluate(model, [(torch.eye(4), torch.arange(4))])
    with pytest.raises(RuntimeError):
        evaluate(model, [(torch.eye(5), torch.arange(5))])
    assert (model.training, model[0].training, model[1].training) == (True, True, False)


def test_names_of_a_classifier_that_was_replaced_are_no_classes():
    model = timm.create_model('vit_tiny_patch16_224', **TINY_VIT, pretrained_cfg_overlay={'label_names': ['a', 'b']})
    check_classes(model, ['x', 'y', 'z'], 'the data')
    model.pretrained_cfg['label_names'] = ['a', 'b', 'c']
    with pytest.raises(
        ValueError, match='expected the classes of the model in the data, got x, y, z, where the model has a, b, c'
    ):
        check_classes(model, ['x', 'y', 'z'], 'the data')


def named(*names: str) -> Any:
    """Stand for a model by what is known of it."""
    return SimpleNamespace(num_classes=len(names), pretrained_cfg={'label_names': names})


def test_classes_of_another_order_or_a_part_of_them_are_found_by_name():
    assert find_classes(named('a', 'b', 'c'), ['a', 'b', 'c'], 'x') is None
    assert find_classes(named('a', 'b', 'c'), ['c', 'a', 'b'], 'x') == [2, 0, 1]
    assert find_classes(named('a', 'b', 'c'), ['c', 'b'], 'x') == [2, 1]
    for other in (['c', 'a', 'b'], ['c', 'b'], ['a', 'b', 'd']):
        with pytest.raises(ValueError, match='classes'):
            check_classes(named('a', 'b', 'c'), other, 'x')


def test_classes_are_compared_by_place_where_they_are_numbers_or_it_is_asked_for():
    for model, names in ((named('a', 'b'), ['0', '1']), (named('0', '1'), ['a', 'b']), (named('a', 'b'), ['00', '01'])):
        assert find_classes(model, names, 'x') is None
    assert find_classes(named('a', 'b'), ['b', 'a'], 'x', by_place=True) is None
    with pytest.raises(ValueError, match='expected 2 classes in x, as many as the model has, got 1'):
        find_classes(named('a', 'b'), ['a'], 'x', by_place=True)


def test_an_error_about_other_classes_names_both_sides_and_the_remedy():
    with pytest.raises(ValueError, match=r'in pets, got z, where the model has b, c; .*place') as error:
        find_classes(named('a', 'b', 'c'), ['a', 'z'], 'pets')
    assert 'data.match_classes=place' in str(error.value)
    assert '--match-classes place' in str(error.value)


def test_weights_of_a_thousand_classes_without_names_have_those_of_imagenet():
    model = SimpleNamespace(num_classes=1000, pretrained_cfg={'num_classes': 1000})
    names = ImageNetInfo().label_names()
    assert find_classes(model, names, 'x') is None
    assert find_classes(model, names[2:4], 'x') == [2, 3]
    with pytest.raises(ValueError, match='got dress, where the model has n01440764'):
        find_classes(model, ['dress', *names[1:]], 'x')
    # Another classifier than that of the weights.
    model.pretrained_cfg['num_classes'] = 21843
    assert find_classes(model, ['dress', *names[1:]], 'x') is None


def test_only_the_outputs_of_the_classes_of_the_data_are_compared():
    logits = torch.tensor([[9.0, 1.0, 2.0], [9.0, 2.0, 1.0]])
    metrics = evaluate(Lookup(), [(logits, torch.tensor([0, 1]))], classes=[2, 1])
    assert metrics['top1'] == 100
    assert metrics['loss'] == pytest.approx(math.log(1 + math.exp(-1)), rel=1e-5)


def test_autocast_runs_the_model_in_the_asked_data_type():
    seen = []
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    evaluate(model, [(torch.eye(4), torch.arange(4))], amp_dtype=torch.bfloat16)
    assert seen == [torch.bfloat16]


def test_an_empty_loader_is_rejected():
    with pytest.raises(ValueError, match='at least one sample'):
        evaluate(Lookup(), [])


def test_several_models_are_evaluated_in_one_pass():
    loader = iter([(torch.eye(4), torch.arange(4))])
    right, wrong = evaluate_all([Lookup(), nn.Softmin(dim=1)], loader)
    assert (right['top1'], wrong['top1']) == (100, 0)


def test_a_batch_of_skipped_images_counts_for_nothing():
    empty = (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    metrics = evaluate(Lookup(), [empty, (torch.eye(4), torch.arange(4)), empty])
    assert metrics['samples'] == 4
    assert metrics['top1'] == 100
