#!/usr/bin/env bash
# MNN 3.6.1: a bicubic Resize that enlarges has other values in the first rows and columns, without a word.
#
# Half a pixel before the first one lies between the border and the image; MNN takes the neighbours of the place on the other
# side, so a ramp begins with a bump. With `align_corners`, at the other end, or where an image shrinks, it is right. One
# guesses the interpolation of ONNX, as the rest is equal to the last digit. Who exports a model that enlarges feature maps or
# a position embedding meets it: resize outside the model, or bilinearly.
#
# Seen: 0, 1, ..., 7 enlarged to 16: onnxruntime -0.11 0.19 0.67 1.30, MNN 0.67 0.19 0.67 1.30; the last twelve differ by 0.0000
PACKAGES='mnn==3.6.1 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6'
. "$(dirname "$0")/environment"
# MNN writes to the standard output itself.
"$PY" - 3>&1 > output 2> errors <<'P'
import _tools
import numpy
import onnx
import onnxruntime
from MNN import expr, nn
from onnx import TensorProto, helper, numpy_helper

sizes = numpy_helper.from_array(numpy.array([1, 1, 8, 16]), 'sizes')
node = helper.make_node('Resize', ['x', '', '', 'sizes'], ['y'], mode='cubic', cubic_coeff_a=-0.75)
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, 8, width]) for name, width in (('x', 8), ('y', 16)))
model = helper.make_model(
    helper.make_graph([node], 'enlarge', [x], [y], initializer=[sizes]),
    opset_imports=[helper.make_opsetid('', 18)],
    ir_version=8,
)
onnx.save(model, 'enlarge.onnx')
ramp = numpy.tile(numpy.arange(8, dtype=numpy.float32), (1, 1, 8, 1))
(exact,) = onnxruntime.InferenceSession('enlarge.onnx').run(None, {'x': ramp})
_tools.mnnconvert(['', '-f', 'ONNX', '--modelFile', 'enlarge.onnx', '--MNNModel', 'enlarge.mnn', '--bizCode', 'x'])
module = nn.load_module_from_file('enlarge.mnn', ['x'], ['y'])
output = expr.convert(module.forward([expr.const(ramp, [1, 1, 8, 8], expr.NCHW, expr.float)])[0], expr.NCHW)
exact, found = exact[0, 0, 4], numpy.array(output.read()).reshape(8, 16)[4]
rest = float(abs(found - exact)[4:].max())
first = [' '.join(f'{value:.2f}' for value in row[:4]) for row in (exact, found)]
text = '0, 1, ..., 7 enlarged to 16: onnxruntime {}, MNN {}; the last twelve differ by {:.4f}'
print(text.format(*first, rest), file=open(3, 'w'))
raise SystemExit(bool(rest > 1e-3 or abs(found - exact)[0] < 0.1))
P
