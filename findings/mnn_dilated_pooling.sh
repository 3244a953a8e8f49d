#!/usr/bin/env bash
# MNN 3.6.1: the dilation of an ONNX MaxPool is left out, without a word.
#
# The converter reads the kernel, the strides and the padding; the result is that of a dense window and has another size. One
# guesses an error, as of other options that MNN does not have. Who exports an atrous pooling pyramid, or pools a feature map
# densely at the stride of a later stage, meets it: take strided slices and pool each.
#
# Seen: window of 3 x 3, dilation 2, over 0, 1, ..., 7: onnxruntime 3, 4, 5, 6, 7, 6; MNN 1, 2, 3, 4, 5, 6, 7, 7
PACKAGES='mnn==3.6.1 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6'
. "$(dirname "$0")/environment"
# MNN writes to the standard output itself.
"$PY" - 3>&1 > output 2> errors <<'P'
import _tools
import numpy
import onnx
import onnxruntime
from MNN import expr, nn
from onnx import TensorProto, helper

node = helper.make_node('MaxPool', ['x'], ['y'], kernel_shape=[3, 3], dilations=[2, 2], strides=[1, 1], pads=[1, 1, 1, 1])
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, width, width]) for name, width in (('x', 8), ('y', 6)))
graph = helper.make_graph([node], 'pool', [x], [y])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid('', 18)], ir_version=8), 'pool.onnx')
ramp = numpy.tile(numpy.arange(8, dtype=numpy.float32), (1, 1, 8, 1))
(exact,) = onnxruntime.InferenceSession('pool.onnx').run(None, {'x': ramp})
_tools.mnnconvert(['', '-f', 'ONNX', '--modelFile', 'pool.onnx', '--MNNModel', 'pool.mnn', '--bizCode', 'x'])
module = nn.load_module_from_file('pool.mnn', ['x'], ['y'])
output = expr.convert(module.forward([expr.const(ramp, [1, 1, 8, 8], expr.NCHW, expr.float)])[0], expr.NCHW)
seen = [values[0, 0, 0].astype(int).tolist() for values in (exact, numpy.array(output.read()))]
texts = (', '.join(map(str, values)) for values in seen)
print('window of 3 x 3, dilation 2, over 0, 1, ..., 7: onnxruntime {}; MNN {}'.format(*texts), file=open(3, 'w'))
raise SystemExit(seen != [[3, 4, 5, 6, 7, 6], [1, 2, 3, 4, 5, 6, 7, 7]])
P
