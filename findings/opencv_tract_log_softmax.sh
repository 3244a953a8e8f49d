#!/usr/bin/env bash
# OpenCV 5.0.0, tract 0.23.9: logsumexp of logits beyond 88 is infinite, and a log of a softmax below -104 is.
#
# Both take the sum of the exponentials as they are for ReduceLogSumExp, and the logarithm of a finished softmax for LogSoftmax,
# while their Softmax subtracts the largest logit. One guesses that all three do, as onnxruntime and torch. Who exports a model
# that gives log-likelihoods, or that mixes tokens by logsumexp, meets it: subtract the largest one in the model.
#
# Seen: logits 100, 200, 300: onnxruntime 300, -200; OpenCV inf, -inf; tract inf, -inf (logsumexp, log softmax of the first)
PACKAGES='opencv-python-headless==5.0.0.93 tract==0.23.9 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import cv2
import numpy
import onnx
import onnxruntime
import tract
from onnx import TensorProto, helper

LOGITS = numpy.array([[100, 200, 300]], numpy.float32)


def by_opencv():
    net = cv2.dnn.readNetFromONNX('log.onnx')
    net.setInput(LOGITS)
    return net.forward()


def outputs(operator, **options):
    """Return the first value of onnxruntime, OpenCV and tract."""
    node = helper.make_node(operator, ['x'], ['y'], **options)
    width = 3 if operator == 'LogSoftmax' else 1
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size]) for name, size in (('x', 3), ('y', width)))
    graph = helper.make_graph([node], 'log', [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid('', 13)], ir_version=8), 'log.onnx')
    exact = onnxruntime.InferenceSession('log.onnx').run(None, {'x': LOGITS})[0]
    by_tract = tract.onnx().load('log.onnx').into_model().into_runnable().run([LOGITS])[0].to_numpy()
    return [f'{found[0, 0]:g}' for found in (exact, by_opencv(), by_tract)]


seen = list(zip(outputs('ReduceLogSumExp', axes=[1]), outputs('LogSoftmax', axis=1), strict=True))
texts = [', '.join(each) for each in seen]
print('logits 100, 200, 300: onnxruntime {}; OpenCV {}; tract {} (logsumexp, log softmax of the first)'.format(*texts))
raise SystemExit(seen != [('300', '-200'), ('inf', '-inf'), ('inf', '-inf')])
P
