#!/usr/bin/env bash
# onnxruntime 1.32.0: the float16 converter raises weights near 0 to 6e-8, the least float16, instead of rounding to 0.
#
# It does so to keep divisors from becoming 0, and to every weight. A sum over ten thousand weights of 1e-9 becomes 60 times as
# large. Exact zeros stay. One guesses the rounding of every other conversion. Who converts a model with weights that training
# drove to almost 0, as unused channels, meets it: set them to 0 before.
#
# Seen: 20000 -> 20000, 1e-9 -> 5.96e-08, 0 -> 0; NumPy rounds 1e-9 to 0
PACKAGES='onnxruntime==1.32.0 onnx==1.23.2 sympy==1.14.0 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import numpy as np
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

weights = np.array([20000, 1e-9, 0], np.float32)
sides = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ['n', 3])] for name in 'xy']
node = helper.make_node('Mul', ['x', 'w'], ['y'])
graph = helper.make_graph([node], 'scale', *sides, [numpy_helper.from_array(weights, 'w')])
half = convert_float_to_float16(helper.make_model(graph, opset_imports=[helper.make_opsetid('', 20)], ir_version=10))
large, small, zero = (float(value) for value in numpy_helper.to_array(half.graph.initializer[0]))
rounded = float(weights.astype(np.float16)[1])
print(f'20000 -> {large:.0f}, 1e-9 -> {small:.3g}, 0 -> {zero:.0f}; NumPy rounds 1e-9 to {rounded:.0f}')
raise SystemExit(large != 20000 or not 5e-8 < small < 7e-8 or zero != 0 or rounded != 0)
P
