#!/usr/bin/env bash
# iree 3.13.0: a negative number to the power of a whole float is NaN, where the exponents differ.
#
# The compiler makes products of a power only where one number is the exponent of all; others become an exponential of a
# logarithm. One guesses -8 for (-2) ** 3.0 either way, as ONNX, torch and onnxruntime have it. Who exports a power for each
# channel, as a generalised-mean pooling or a learned polynomial has it, meets it: sign(x) ** n * |x| ** n.
#
# Seen: -2, -2, 2 to the power of 3, 2, 3: onnxruntime -8 4 8, IREE nan nan 8; all of 3 by IREE -8 -8 8
PACKAGES='iree-base-compiler[onnx]==3.13.0 iree-base-runtime==3.13.0 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import subprocess
import sys

import iree.compiler.tools
import iree.runtime
import numpy
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

NUMBERS = numpy.array([-2, -2, 2], numpy.float32)


def by_iree():
    """Return what IREE computes from the file."""
    importer = [sys.executable, '-m', 'iree.compiler.tools.import_onnx', 'power.onnx', '-o', 'power.mlir']
    subprocess.run([*importer, '--opset-version', '17'], check=True, stdout=subprocess.DEVNULL)
    binary = iree.compiler.tools.compile_file('power.mlir', target_backends=['llvm-cpu'])
    context = iree.runtime.SystemContext(config=iree.runtime.Config('local-sync'))
    module = iree.runtime.VmModule.copy_buffer(context.instance, binary)
    context.add_vm_module(module)
    return getattr(context.modules, module.name)['power'](NUMBERS).to_host()


def outputs(exponents):
    """Return what onnxruntime and IREE compute."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in 'xy')
    constant = numpy_helper.from_array(numpy.array(exponents, numpy.float32), 'exponents')
    graph = helper.make_graph([helper.make_node('Pow', ['x', 'exponents'], ['y'])], 'power', [x], [y], initializer=[constant])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid('', 17)], ir_version=8), 'power.onnx')
    exact = onnxruntime.InferenceSession('power.onnx').run(None, {'x': NUMBERS})[0]
    return [' '.join(f'{value:g}' for value in found) for found in (exact, by_iree())]


seen = *outputs([3, 2, 3]), outputs([3, 3, 3])[1]
print('-2, -2, 2 to the power of 3, 2, 3: onnxruntime {}, IREE {}; all of 3 by IREE {}'.format(*seen))
raise SystemExit('nan' not in seen[1] or 'nan' in seen[0])
P
