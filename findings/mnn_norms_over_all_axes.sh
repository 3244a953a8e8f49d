#!/usr/bin/env bash
# MNN 3.6.1: the norms of an ONNX file of opset 18 or later are taken over all axes, without a word.
#
# From opset 18 on, the axes of ReduceL1, ReduceL2 and ReduceLogSumExp are an input; MNN looks for them in the attribute that
# earlier opsets have, and takes all axes where there is none. Sums and means are read right. One guesses an error or the right
# axes. Who exports `F.normalize`, cosine similarity, ArcFace's head or `logsumexp` by torch meets it, as torch writes opset 20:
# write `x.square().sum(dim, keepdim=True).sqrt()`.
#
# Seen: L2 norm of 2 rows of (3, 4), (6, 8): onnxruntime [5.0, 10.0], MNN of opset 13 [5.0, 10.0], MNN of opset 18 [11.2]
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

ROWS = numpy.array([[3, 4], [6, 8]], numpy.float32)


def save(opset):
    """Write a file that takes the norm of each row."""
    axes = numpy_helper.from_array(numpy.array([1]), 'axes')
    new = opset >= 18
    inputs, options = (['x', 'axes'], {}) if new else (['x'], {'axes': [1]})
    node = helper.make_node('ReduceL2', inputs, ['y'], keepdims=0, **options)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (('x', [2, 2]), ('y', [2])))
    graph = helper.make_graph([node], 'norm', [x], [y], initializer=[axes] if new else [])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid('', opset)], ir_version=8), f'{opset}.onnx')


def by_mnn(opset):
    """Return what MNN computes from the file."""
    _tools.mnnconvert(['', '-f', 'ONNX', '--modelFile', f'{opset}.onnx', '--MNNModel', f'{opset}.mnn', '--bizCode', 'x'])
    rows = expr.const(ROWS, [2, 2], expr.NCHW, expr.float)
    output = nn.load_module_from_file(f'{opset}.mnn', ['x'], ['y']).forward([rows])[0]
    return [round(float(value), 1) for value in numpy.array(output.read()).reshape(-1)]


save(13)
save(18)
seen = onnxruntime.InferenceSession('18.onnx').run(None, {'x': ROWS})[0].tolist(), by_mnn(13), by_mnn(18)
text = 'L2 norm of 2 rows of (3, 4), (6, 8): onnxruntime {}, MNN of opset 13 {}, MNN of opset 18 {}'
print(text.format(*seen), file=open(3, 'w'))
raise SystemExit(seen[0] != [5, 10] or seen[1] != [5, 10] or seen[2] != [11.2])
P
