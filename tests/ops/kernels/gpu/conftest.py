"""What the tests of the kernels share."""

from types import SimpleNamespace

import pytest
import torch

from aft_vision.ops.kernels.gpu import launch


@pytest.fixture
def triton_device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where Triton kernels run during a test: on a CUDA device, else on the CPU in Triton's interpreter."""
    pytest.importorskip('triton')
    if torch.cuda.is_available():
        if torch.cuda.get_device_capability() < launch.CAPABILITY:
            pytest.skip(f'Triton needs a GPU of capability {launch.CAPABILITY}')
        return 'cuda'
    from triton import language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv('TRITON_INTERPRET', '1')
    # Functions of Triton's own, such as tl.sum: timm may have imported them before, as functions to compile.
    for module in (tl, tl.standard):
        for name, function in list(vars(module).items()):
            if isinstance(function, JITFunction):
                monkeypatch.setattr(module, name, interpreter.InterpretedFunction(function.fn))
    # It replaces the language by its own at every call of a function inside a kernel, in 2 ms: once a launch is enough.
    replace_language = interpreter._patch_lang
    everything = SimpleNamespace(__globals__={'tl': tl, 'core': tl.core})
    monkeypatch.setattr(interpreter, '_patch_lang', lambda function: replace_language(everything))
    monkeypatch.setattr(interpreter.InterpretedFunction, '__call__', lambda self, *x, **y: self.rewrite()(*x, **y))
    return 'cpu'
