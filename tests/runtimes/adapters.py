"""One function a runtime: it loads a file, runs images and returns logits. Each runs in an environment of its own.

    python adapters.py RUNTIME FILE IMAGES.npy LOGITS.npy

A function takes the file, the images and a folder for what it converts, and returns the logits, or None if the runtime
only converts here, and the file that the runtime reads. Only numpy and the runtime are imported.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np


def onnxruntime(file: Path, images: np.ndarray, folder: Path) -> tuple[Any, Path]:
    import onnxruntime as runtime

    session = runtime.InferenceSession(str(file), providers=['CPUExecutionProvider'])
    return session.run(None, {'images': images})[0], file


def opencv(file: Path, images: np.ndarray, folder: Path) -> tuple[Any, Path]:
    import cv2

    net = cv2.dnn.readNetFromONNX(str(file))
    net.setInput(images)
    return net.forward(), file


def openvino(file: Path, images: np.ndarray, folder: Path) -> tuple[Any, Path]:
    import openvino as ov

    # On processors with bfloat16 a model is otherwise computed in it.
    compiled = ov.Core().compile_model(str(file), 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})
    return compiled(images)[0], file


def tract(file: Path, images: np.ndarray, folder: Path) -> tuple[Any, Path]:
    import tract as runtime

    model = runtime.onnx().load(str(file))
    model.set_input_fact(0, f'{",".join(map(str, images.shape))},f32')
    return model.into_model().into_runnable().run([images])[0].to_numpy(), file


def iree(file: Path, images: np.ndarray, folder: Path) -> tuple[Any, Path]:
    import iree.compiler as compiler
    import iree.runtime as runtime

    imported, module = folder / 'model.mlir', folder / 'model.vmfb'
    tool = Path(sys.executable).with_name('iree-import-onnx')
    subprocess.run([tool, file, '-o', imported], check=True)
    options = ['--iree-llvmcpu-target-cpu=host']
    compiler.compile_file(str(imported), target_backends=['llvm-cpu'], extra_args=options, output_file=str(module))
    loaded = runtime.load_vm_flatbuffer_file(str(module), driver='local-task')
    (name,) = (name for name in loaded.vm_module.function_names if not name.startswith('__') and '$' not in name)
    return loaded[name](images).to_host(), module


def mnn(file: Path, images: np.ndarray, folder: Path) -> tuple[Any, Path]:
    import MNN

    converted = folder / 'model.mnn'
    tool = Path(sys.executable).with_name('mnnconvert')
    command = [tool, '-f', 'ONNX', '--modelFile', file, '--MNNModel', converted, '--bizCode', 'aft']
    subprocess.run(command, check=True)
    net = MNN.nn.load_module_from_file(str(converted), ['images'], ['logits'])
    given = MNN.expr.const(images, list(images.shape), MNN.expr.NCHW, MNN.expr.float)
    # Images come in blocks of channels inside.
    return MNN.expr.convert(net.forward([given])[0], MNN.expr.NCHW).read(), converted


def ncnn(file: Path, images: np.ndarray, folder: Path) -> tuple[Any, Path]:
    import ncnn as runtime

    trace = Path(shutil.copy(file, folder / 'model.pt'))
    tool = Path(sys.executable).with_name('pnnx')
    subprocess.run([tool, trace, f'inputshape={list(images.shape)}'.replace(' ', ''), 'fp16=0'], cwd=folder, check=True)
    net = runtime.Net()
    net.opt.use_fp16_storage = False
    # They return a status, and a net without layers stops the process.
    for status in (net.load_param(str(folder / 'model.ncnn.param')), net.load_model(str(folder / 'model.ncnn.bin'))):
        if status:
            raise RuntimeError(f'ncnn does not load what pnnx wrote: status {status}')
    logits = []
    # ncnn has no axis of a batch.
    for image in images:
        extractor = net.create_extractor()
        extractor.input('in0', runtime.Mat(image).clone())
        status, output = extractor.extract('out0')
        if status:
            raise RuntimeError(f'ncnn does not run what pnnx wrote: status {status}')
        logits.append(np.array(output).reshape(-1))
    return np.stack(logits), folder / 'model.ncnn.bin'


def tinygrad(file: Path, images: np.ndarray, folder: Path) -> tuple[Any, Path]:
    # It compiles with clang, which ziglang has.
    compiler = folder / 'clang'
    compiler.write_text(f'#!/bin/sh\nexec {sys.executable} -m ziglang clang "$@"\n')
    compiler.chmod(0o755)
    os.environ |= {'CC': str(compiler), 'DEV': 'CPU'}
    from tinygrad import Tensor
    from tinygrad.nn.onnx import OnnxRunner

    return OnnxRunner(str(file))({'images': Tensor(images)})['logits'].numpy(), file


def rten(file: Path, images: np.ndarray, folder: Path) -> tuple[Any, Path]:
    converted = folder / 'model.rten'
    subprocess.run([Path(sys.executable).with_name('rten-convert'), file, converted], check=True)
    return None, converted


def tvm(file: Path, images: np.ndarray, folder: Path) -> tuple[Any, Path]:
    import onnx
    import tvm as compiler
    from tvm import relax
    from tvm.relax.frontend.onnx import from_onnx

    module = from_onnx(onnx.load(file), keep_params_in_input=False)
    library = folder / 'model.so'
    executable = compiler.compile(relax.get_pipeline('zero')(module), target='llvm')
    executable.export_library(str(library))
    machine = relax.VirtualMachine(executable, compiler.cpu())
    output = machine['main'](compiler.runtime.tensor(images, compiler.cpu()))
    return (output if hasattr(output, 'numpy') else output[0]).numpy(), library


def coreml(file: Path, images: np.ndarray, folder: Path) -> tuple[Any, Path]:
    import coremltools
    import torch

    program = torch.export.load(file).run_decompositions({})
    model = coremltools.convert(program, compute_precision=coremltools.precision.FLOAT32)
    model.save(str(folder / 'model.mlpackage'))
    # Apple's systems alone run it.
    return None, folder / 'model.mlpackage'


def litert_torch(file: Path, images: np.ndarray, folder: Path) -> tuple[Any, Path]:
    import litert_torch as converter
    import torch

    example = torch.from_numpy(images)
    model = converter.convert(torch.export.load(file).module(), (example,))
    model.export(str(folder / 'model.tflite'))
    return model(example), folder / 'model.tflite'


def onnx2tf(file: Path, images: np.ndarray, folder: Path) -> tuple[Any, Path]:
    from ai_edge_litert.interpreter import Interpreter

    # It overwrites the file.
    given = Path(shutil.copy(file, folder / 'model.onnx'))
    tool = Path(sys.executable).with_name('onnx2tf')
    command = [tool, '-i', given, '-o', folder / 'out', '-ois', f'images:{",".join(map(str, images.shape))}']
    subprocess.run(command, check=True)
    (converted,) = (folder / 'out').glob('*_float32.tflite')
    interpreter = Interpreter(str(converted))
    interpreter.allocate_tensors()
    (about,), (output,) = interpreter.get_input_details(), interpreter.get_output_details()
    last = tuple(about['shape'][1:]) == (*images.shape[2:], images.shape[1])
    interpreter.set_tensor(about['index'], images.transpose(0, 2, 3, 1) if last else images)
    interpreter.invoke()
    return interpreter.get_tensor(output['index']), converted


def executorch(file: Path, images: np.ndarray, folder: Path) -> tuple[Any, Path]:
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass
    from executorch.runtime import Runtime

    program = constant_prop_pass(torch.export.load(file))
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
    converted = folder / 'model.pte'
    converted.write_bytes(lowered.buffer)
    # From a file: bytes must outlive what is loaded from them.
    method = Runtime.get().load_program(converted).load_method('forward')
    return method.execute([torch.from_numpy(images)])[0].numpy(), converted


def onnxruntime_web(file: Path, images: np.ndarray, folder: Path) -> tuple[Any, Path]:
    images.tofile(folder / 'images.bin')
    script = """
        const ort = require('onnxruntime-web'), fs = require('fs');
        const [file, folder, shape] = process.argv.slice(1);
        (async () => {
            ort.env.wasm.numThreads = 1;
            const session = await ort.InferenceSession.create(fs.readFileSync(file), {executionProviders: ['wasm']});
            const data = new Float32Array(new Uint8Array(fs.readFileSync(folder + '/images.bin')).buffer);
            const {logits} = await session.run({images: new ort.Tensor('float32', data, JSON.parse(shape))});
            fs.writeFileSync(folder + '/logits.bin', new Uint8Array(logits.data.buffer));
        })().catch(error => { console.error(error.message); process.exit(1); });
    """
    command = ['node', '-e', script, str(file), str(folder), json.dumps(images.shape)]
    subprocess.run(command, cwd=sys.prefix, check=True)
    return np.fromfile(folder / 'logits.bin', np.float32).reshape(len(images), -1), file


def size(path: Path) -> int:
    """Return the bytes of a file or a folder."""
    return sum(x.stat().st_size for x in ([path] if path.is_file() else path.rglob('*')) if x.is_file())


def main() -> None:
    """Write the logits, and print the size of the file that the runtime reads."""
    name, file, images, logits = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        found, read = globals()[name](Path(file), np.load(images), Path(folder))
        if found is not None:
            np.save(logits, np.asarray(found))
        print(f'\nbytes: {size(read)}')


if __name__ == '__main__':
    main()
