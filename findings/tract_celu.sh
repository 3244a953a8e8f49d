#!/usr/bin/env bash
# tract 0.23.9: CELU leaves out the factor alpha, without a word.
#
# Below zero it gives exp(x / alpha) - 1, where torch, ONNX and onnxruntime give alpha times that. One guesses the formula of
# ONNX, as ELU, which has its own alpha, is right. Who exports an activation with a slower saturation meets it: scale by hand.
#
# Seen: -4, -1, 1, alpha 2: onnxruntime -1.73 -0.79 1.00, tract -0.86 -0.39 1.00
PACKAGES='tract==0.23.9 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import numpy
import onnx
import onnxruntime
import tract
from onnx import TensorProto, helper

INPUTS = numpy.array([-4, -1, 1], numpy.float32)


def outputs(operator):
    """Return what onnxruntime and tract compute."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in 'xy')
    graph = helper.make_graph([helper.make_node(operator, ['x'], ['y'], alpha=2.0)], 'unit', [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid('', 18)], ir_version=8), 'unit.onnx')
    exact = onnxruntime.InferenceSession('unit.onnx').run(None, {'x': INPUTS})[0]
    return exact, tract.onnx().load('unit.onnx').into_model().into_runnable().run([INPUTS])[0].to_numpy()


seen = outputs('Celu')
print('-4, -1, 1, alpha 2: onnxruntime {}, tract {}'.format(*(' '.join(f'{value:.2f}' for value in each) for each in seen)))
elu, elu_of_tract = outputs('Elu')
raise SystemExit(bool(abs(elu - elu_of_tract).max() > 1e-5 or abs(seen[1][:2] * 2 - seen[0][:2]).max() > 1e-3))
P
