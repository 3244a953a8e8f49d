#!/usr/bin/env bash
# captum 0.9.0: DeepLift and GuidedBackprop have no rule for GELU, SiLU or Hardswish and say nothing.
#
# DeepLift is then the gradient times the difference of the inputs, and its attributions do not add up to the difference of the
# outputs; GuidedBackprop is the plain gradient. The warnings speak of hooks only. One guesses an error or a warning that names
# the activation. Who explains a ViT, a ConvNeXt or a MobileNet, none of which has a ReLU, meets it: IntegratedGradients, and
# `return_convergence_delta=True` to see it.
#
# Seen: ReLU: sum off by 0 %, another map than the gradient; GELU: sum off by 66 %, DeepLift = gradient x input True, GuidedBackprop = gradient True
PACKAGES='captum==0.9.0 torch==2.14.1'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import warnings

import torch
from captum.attr import DeepLift, GuidedBackprop, Saliency
from torch import nn


def explain(activation):
    """Return the relative error of DeepLift's sum, whether each method is the gradient, and the warnings."""
    torch.manual_seed(0)
    mixer = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), activation(), nn.Conv2d(8, 8, 1), activation()
    model = nn.Sequential(nn.Conv2d(3, 8, 4, 4), *mixer, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()
    images = 2 * torch.randn(2, 3, 32, 32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        lifted, delta = DeepLift(model).attribute(images, target=1, return_convergence_delta=True)
        guided = GuidedBackprop(model).attribute(images, target=1)
    gradient = Saliency(model).attribute(images, target=1, abs=False)
    change = (model(images) - model(torch.zeros_like(images)))[:, 1]
    same = torch.allclose(lifted, gradient * images, atol=1e-6), torch.allclose(guided, gradient, atol=1e-6)
    named = any(activation.__name__ in str(each.message) for each in caught)
    return float((delta.abs().max() / change.abs().max()).detach()), same, named


(relu, relu_same, _), (gelu, gelu_same, named) = explain(nn.ReLU), explain(nn.GELU)
other = 'the gradient' if any(relu_same) else 'another map than the gradient'
text = 'ReLU: sum off by {:.0%}, {}; GELU: sum off by {:.0%}, DeepLift = gradient x input {}, GuidedBackprop = gradient {}'
print(text.format(relu, other, gelu, *gelu_same).replace('%', ' %'))
raise SystemExit(relu > 1e-3 or any(relu_same) or gelu < 0.02 or not all(gelu_same) or named)
P
