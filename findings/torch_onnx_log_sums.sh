#!/usr/bin/env bash
# torch 2.14.1: an exported `logaddexp` overflows, and `logsigmoid` of a small number is -inf, without a word.
#
# The ONNX exporter writes the plain formulas, log(exp(a) + exp(b)) and log(sigmoid(x)); torch computes both stably. The check
# of the example does not see it. One guesses the stable form, as softplus and logsumexp have in the file. Who exports a model that
# works in logarithms meets it: `a + softplus(b - a)` and `-softplus(-x)`.
#
# Seen: logaddexp(100, 101): torch 101.3, onnxruntime inf, by softplus 101.3; logsigmoid(-30): torch -30.0, onnxruntime -inf, by softplus -30.0
PACKAGES='onnxruntime==1.32.0 onnx==1.23.2 onnxscript==0.7.2 torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import onnxruntime
import torch
from torch.nn import functional as F

FORMS = {
    'logaddexp': lambda x: torch.logaddexp(x[:, :1], x[:, 1:]),
    'by softplus': lambda x: x[:, :1] + F.softplus(x[:, 1:] - x[:, :1]),
    'logsigmoid': lambda x: F.logsigmoid(x),
    'minus softplus': lambda x: -F.softplus(-x),
}


class Form(torch.nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = FORMS[form]

    def forward(self, x):
        return self.form(x)


def outputs(form, *values):
    """Return what torch and onnxruntime compute."""
    x = torch.tensor([values])
    torch.onnx.export(Form(form).eval(), (torch.zeros_like(x),), 'form.onnx', dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession('form.onnx')
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return FORMS[form](x)[0, 0].item(), float(found[0, 0])


sums = *outputs('logaddexp', 100.0, 101.0), outputs('by softplus', 100.0, 101.0)[1]
gates = *outputs('logsigmoid', -30.0), outputs('minus softplus', -30.0)[1]
text = 'torch {:.1f}, onnxruntime {:.1f}, by softplus {:.1f}'
print(f'logaddexp(100, 101): {text.format(*sums)}; logsigmoid(-30): {text.format(*gates)}')
right = abs(sums[2] - sums[0]) < 1e-3 and abs(gates[2] - gates[0]) < 1e-3
raise SystemExit(not right or sums[1] != float('inf') or gates[1] != -float('inf'))
P
