#!/usr/bin/env bash
# OpenCV 5.0.0: average pooling in ceil mode counts pixels beyond the image and its padding.
#
# A last window that hangs over the edge has fewer pixels; torch, ONNX and onnxruntime divide by those, with
# `count_include_pad=1`, torch's default, too, as there is no padding. OpenCV divides by the whole window, without a word, so
# the last row and column are too small. One guesses the same mean. Who exports `AvgPool2d(2, ceil_mode=True)` for odd sizes meets
# it: `count_include_pad=False`, as timm's ResNets have it, which OpenCV reads right.
#
# Seen: ones of 3 x 3, window 2: onnxruntime 1 1 1 1, OpenCV 1 0.5 0.5 0.25, with count_include_pad=0 1 1 1 1
PACKAGES='opencv-python-headless==5.0.0.93 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import cv2
import numpy
import onnx
import onnxruntime
from onnx import TensorProto, helper

ONES = numpy.ones((1, 1, 3, 3), numpy.float32)


def means(include):
    """Return what onnxruntime and OpenCV compute."""
    options = dict(kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1, count_include_pad=include)
    node = helper.make_node('AveragePool', ['x'], ['y'], **options)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, side, side]) for name, side in (('x', 3), ('y', 2)))
    graph = helper.make_graph([node], 'pool', [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid('', 19)], ir_version=9), 'pool.onnx')
    net = cv2.dnn.readNetFromONNX('pool.onnx')
    net.setInput(ONES)
    exact = onnxruntime.InferenceSession('pool.onnx').run(None, {'x': ONES})[0]
    return [' '.join(f'{value:g}' for value in found.reshape(-1)) for found in (exact, net.forward())]


seen = (*means(1), means(0)[1])
print('ones of 3 x 3, window 2: onnxruntime {}, OpenCV {}, with count_include_pad=0 {}'.format(*seen))
raise SystemExit(seen != ('1 1 1 1', '1 0.5 0.5 0.25', '1 1 1 1'))
P
