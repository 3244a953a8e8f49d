#!/usr/bin/env bash
# OpenCV 5.0.0, MNN 3.6.1: a bicubic GridSample has another cubic, and MNN does not reflect at the border.
#
# ONNX and torch sample by the cubic of -0.75, onnxruntime and tract too; OpenCV and MNN agree with each other on another one,
# which shows inside the image as well. `padding_mode='reflection'` of MNN gives other values in every mode. Nothing is said.
# One guesses the values of ONNX, as bilinear sampling has them. Who exports a model that warps or samples deformably meets it:
# bilinear, and with borders or zeros.
#
# Seen: differ from onnxruntime: cubic inside OpenCV 0.3, MNN 0.3, tract 0.0; linear with reflection OpenCV 0.0, MNN 0.9, tract 0.0
PACKAGES='opencv-python-headless==5.0.0.93 mnn==3.6.1 tract==0.23.9 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6'
. "$(dirname "$0")/environment"
# MNN writes to the standard output itself.
"$PY" - 3>&1 > output 2> errors <<'P'
import _tools
import cv2
import numpy
import onnx
import onnxruntime
import tract
from MNN import expr, nn
from onnx import TensorProto, helper, numpy_helper

IMAGE = numpy.random.default_rng(1).normal(size=(1, 1, 6, 6)).astype(numpy.float32)
PLACES = numpy.random.default_rng(0).uniform(-1.5, 1.5, (1, 4, 4, 2)).astype(numpy.float32)


def by_opencv():
    net = cv2.dnn.readNetFromONNX('sample.onnx')
    net.setInput(IMAGE)
    return net.forward()


def by_mnn():
    _tools.mnnconvert(['', '-f', 'ONNX', '--modelFile', 'sample.onnx', '--MNNModel', 'sample.mnn', '--bizCode', 'x'])
    image = expr.const(IMAGE, [1, 1, 6, 6], expr.NCHW, expr.float)
    output = nn.load_module_from_file('sample.mnn', ['x'], ['y']).forward([image])[0]
    return numpy.array(expr.convert(output, expr.NCHW).read()).reshape(1, 1, 4, 4)


def by_tract():
    return tract.onnx().load('sample.onnx').into_model().into_runnable().run([IMAGE])[0].to_numpy()


def differences(places, **options):
    """Return how far OpenCV, MNN and tract are from onnxruntime."""
    node = helper.make_node('GridSample', ['x', 'places'], ['y'], **options)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, side, side]) for name, side in (('x', 6), ('y', 4)))
    graph = helper.make_graph([node], 'sample', [x], [y], initializer=[numpy_helper.from_array(places, 'places')])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid('', 20)], ir_version=9), 'sample.onnx')
    exact = onnxruntime.InferenceSession('sample.onnx').run(None, {'x': IMAGE})[0]
    return [round(float(abs(found() - exact).max()), 1) for found in (by_opencv, by_mnn, by_tract)]


# Places within 0.6 of the half size, whose sixteen neighbours lie in the image or are repeated.
cubic = differences(PLACES * 0.4, mode='cubic', padding_mode='border')
linear = differences(PLACES, mode='linear', padding_mode='reflection')
text = 'OpenCV {}, MNN {}, tract {}'
seen = f'cubic inside {text.format(*cubic)}; linear with reflection {text.format(*linear)}'
print(f'differ from onnxruntime: {seen}', file=open(3, 'w'))
raise SystemExit(min(cubic[:2]) < 0.1 or cubic[2] > 0 or linear[1] < 0.1 or linear[0] > 0 or linear[2] > 0)
P
