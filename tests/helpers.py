"""Inputs, comparison with the float64 reference in value and in every gradient, folders of images, and runs."""

import csv
import hashlib
import importlib.util
import math
import os
import signal
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import metadata
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from aft_vision import cores
from aft_vision.data import Augmentation, Source
from aft_vision.data.datasets import open_eval_split, open_train_split
from aft_vision.ops.declaration import OPERATIONS, Shape

CLOTHING = Path(__file__).parent / 'assets' / 'clothing'
# Relative to the norm of the reference tensor: (value, gradient).
BOUNDS = {
    torch.float64: (1e-10, 1e-9),
    torch.float32: (1e-5, 1e-4),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (4e-3, 4e-3),
}
NASTY_BOUND = 1e-4
BIASES = {bias for operation in OPERATIONS.values() for bias in operation.biases}
NO_AUGMENTATION = Augmentation(
    scale=(1.0, 1.0),
    hflip=0.0,
    color_jitter=0.0,
    auto_augment=None,
    repeats=1,
    random_erasing=0.0,
    mixup=0.0,
    cutmix=0.0,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(*shape, generator=generator(seed), dtype=torch.float64) * scale).to(dtype)


def make_qkv(B: int = 2, T: int = 12, D: int = 8, heads: int | None = None, seed: int = 0) -> tuple[Tensor, ...]:
    """q (B, T, D), k (B, T, heads or D) and v (B, T, D) in float64, rounded to what float16 and bfloat16 hold."""
    widths = (D, heads or D, D)
    parts = (randn(B, T, n, seed=seed + i) for i, n in enumerate(widths))
    return tuple(x.to(torch.bfloat16).to(torch.float64) for x in parts)


def make_inputs(
    name: str,
    tokens: int | tuple[int, int],
    D: int = 6,
    s: int | tuple[int, int] = 5,
    heads: int | None = None,
    B: int = 2,
) -> dict[str, Any]:
    """Inputs of an operation in float64, in its own order.

    tokens: a length, or a grid (H, W).
    s: the window of `Shape`, or those for rows and columns.
    heads: the channels of k on a grid, as many as D by default; only operations on a grid have them.
    """
    operation, (window, column_window) = OPERATIONS[name], s if isinstance(s, tuple) else (s, None)
    grid = (1, tokens) if isinstance(tokens, int) else tokens
    shape = Shape(B, grid, D, D // (heads or D), window, column_window)
    draws = generator(7)
    own = operation.draw(shape, lambda *sizes: torch.randn(*sizes, generator=draws, dtype=torch.float64))
    qkv = make_qkv(B, shape.tokens, D, operation.key_channels(shape))
    return dict(zip('qkv', qkv, strict=True)) | own


def operands(name: str, inputs: dict[str, Any]) -> tuple[Any, ...]:
    """All inputs of an operator in the order of its schema, those that are not given as they are by default."""
    return OPERATIONS[name].inputs(**inputs)


def make_mask(B: int, T: int) -> Tensor:
    """Some tokens count in each row, none in the second."""
    mask = torch.rand(B, T, generator=generator(3)) > 0.4
    mask[:, 0] = True
    mask[1:2] = False
    return mask


def change(name: str, inputs: dict[str, Any], others: str) -> dict[str, Any]:
    """The inputs 'masked', with 'no gate', 'window alone', or several of these."""
    found = dict(inputs)
    if 'masked' in others:
        mask = found['mask'] = make_mask(*inputs['v'].shape[:2])
        if OPERATIONS[name].causal:
            # The first targets see nothing.
            mask[:, 0] = False
    if 'no gate' in others:
        found['q'] = None
    if 'window alone' in others:
        found['global_context'] = False
    return found


def single(inputs: dict[str, Any], dtype: torch.dtype = torch.float32, device: str = 'cpu') -> dict[str, Any]:
    """The inputs with floating-point tensors as leaves in single precision, or in another."""
    return {name: _leaf(x, dtype, device) for name, x in inputs.items()}


def plain(inputs: dict[str, Any], dtype: torch.dtype = torch.float32, device: str = 'cpu') -> dict[str, Any]:
    """The inputs in single precision, or in another, without gradients."""
    return {name: _detached(x) for name, x in single(inputs, dtype, device).items()}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """A context in which torch has so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def nasty_keys(k: Tensor) -> dict[str, Tensor]:
    """Keys at the edge of the range, made from ordinary ones (B, T, D)."""
    tokens = k.shape[1]
    high, first, last = k.clone(), k.clone(), k.clone()
    high[:, tokens // 2], first[:, 0], last[:, -1] = 90.0, -120.0, 200.0
    ramp = torch.linspace(0, 300, tokens, dtype=k.dtype)[None, :, None]
    return {
        'one_at_90': high,
        'first_at_-120': first,
        'last_at_200': last,
        'all_at_-120': torch.full_like(k, -120.0),
        'all_equal': torch.full_like(k, 3.25),
        'plus_minus_1e4': torch.where(k > 0, 1e4, -1e4).to(k) + k,
        'normal_30': k * 30,
        'climbing': ramp + k,
        'falling': ramp.flip(1) + k,
    }


def nasty_biases(bias: Tensor) -> dict[str, Tensor]:
    """Position biases at the edge of the range, in the shape of an ordinary one."""
    spread = torch.rand(bias.shape, generator=generator(5), dtype=bias.dtype) - 0.5
    return {
        'zero': torch.zeros_like(bias),
        'within_50': 100 * spread,
        'all_-20': torch.full_like(bias, -20.0),
        'plus_minus_80': torch.where(bias > 0, 80.0, -80.0).to(bias),
    }


NASTY_KEYS = list(nasty_keys(torch.zeros(1, 3, 1)))
NASTY_BIASES = list(nasty_biases(torch.zeros(1)))


def make_nasty(inputs: dict[str, Any], keys: str = 'ordinary', bias: str | float = 'ordinary') -> dict[str, Any]:
    """The inputs with keys and position biases at the edge of the range, or with a number for every bias."""
    found = dict(inputs)
    if keys != 'ordinary':
        found['k'] = nasty_keys(inputs['k'])[keys]
    for name, x in inputs.items():
        if name in BIASES and bias != 'ordinary':
            found[name] = nasty_biases(x)[bias] if isinstance(bias, str) else torch.full_like(x, bias)
    return found


def assert_close(got: Tensor, expected: Tensor, bound: float, name: str = 'tensor', floor: float = 0.0) -> None:
    """Norm-wise relative error within bound, and no element off by 10 times that of the largest magnitude.

    floor: the norm that errors are measured against where that of `expected` is smaller.
    """
    assert got.shape == expected.shape, f'{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}'
    assert torch.isfinite(got).all(), f'{name}: not finite'
    difference = (got.double() - expected.double()).abs()
    norm, peak = max(expected.double().norm().item(), floor), max(expected.double().abs().max().item(), floor)
    if norm == 0:
        assert not difference.any(), f'{name}: expected zeros, got up to {difference.max().item():.2e}'
        return
    relative = difference.norm().item() / norm
    assert relative <= bound, f'{name}: relative error {relative:.2e} above {bound:.0e}'
    worst = difference.max().item() / peak
    assert worst <= 10 * bound, f'{name}: an element is off by {worst:.2e} of the largest, above {10 * bound:.0e}'


def assert_matches_reference(
    op: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    nasty: bool = False,
    device: str = 'cpu',
    bounds: tuple[float, float] | None = None,
    roundings: int = 0,
) -> None:
    """op in dtype equals reference in float64, in value and in the gradient of every floating-point input.

    nasty: inputs at the edge of the range, with the bound for them. There the weights may all but choose one source:
    the gradients of keys and biases are then differences of equal terms as large as the gradient of v, and their
    errors are measured against that.
    device: where op runs; the reference runs on the CPU.
    bounds: of the value and of the gradients, where they are not those of dtype.
    roundings: to dtype on the way to the gradient of k, a head for each channel. It is the difference of two terms, v
        dv and a rest, which may cancel; independent errors of up to eps / 2 of a term add up to that times
        sqrt(roundings) of both in norm, however small the difference is.
    """
    bound, gradient_bound = (max(NASTY_BOUND, x) if nasty else x for x in bounds or BOUNDS[dtype])
    low = single(inputs, dtype, device)
    # The reference sees the very numbers that op sees, after rounding.
    high = single(low, torch.float64)
    y, expected = op(**low), reference(**high)
    assert y.dtype == dtype
    assert_close(y.cpu(), expected, bound, 'output')
    weight = randn(*expected.shape, seed=99).to(dtype)
    leaves = [name for name, x in high.items() if isinstance(x, Tensor) and x.requires_grad]
    wanted = torch.autograd.grad(
        expected, [high[name] for name in leaves], weight.double(), allow_unused=True, materialize_grads=True
    )
    found = torch.autograd.grad(y, [low[name] for name in leaves], weight.to(device))
    floor = wanted[leaves.index('v')].norm().item() if nasty else 0.0
    for name, got, want in zip(leaves, found, wanted, strict=True):
        assert got.dtype == low[name].dtype
        least = floor
        if roundings and name == 'k':
            term = high['v'].detach() * wanted[leaves.index('v')]
            size = torch.finfo(dtype).eps / 2 * math.sqrt(roundings) * (term.abs() + (want - term).abs()).norm().item()
            least = max(floor, size / gradient_bound)
        assert_close(got.cpu(), want, gradient_bound, f'grad {name}', least)


def assert_masked_tokens_have_no_effect(
    op: Callable[..., Tensor],
    inputs: dict[str, Any],
    mask: Tensor,
    device: str = 'cpu',
    dtype: torch.dtype = torch.float32,
) -> None:
    """Whatever stands in k and v where the mask is False, NaN too: the same to the bit, and no gradient goes there."""
    found = []
    for fills in ((0.0, 0.0), (float('inf'), float('nan'))):
        hidden = {name: inputs[name].masked_fill(~mask[..., None], x) for name, x in zip('kv', fills, strict=True)}
        low = single(inputs | hidden, dtype, device)
        y = op(**low, mask=mask.to(device))
        leaves = [x for x in low.values() if isinstance(x, Tensor) and x.requires_grad]
        grads = torch.autograd.grad(y, leaves, randn(*y.shape, seed=99, dtype=dtype).to(device))
        found.append([x.cpu() for x in (y, *grads)])
        hidden_grads = [grad for x, grad in zip(leaves, grads, strict=True) if x is low['k'] or x is low['v']]
        assert not any(grad.cpu()[~mask].any() for grad in hidden_grads)
    assert found[0][0].isfinite().all()
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def assert_keys_of_minus_infinity_are_masked(
    op: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    device: str = 'cpu',
) -> None:
    """Without a mask: what has no other key, a sequence or one channel, is 0 and gets no gradient, as in reference."""
    k = inputs['k'].clone()
    k[-1], k[0, :, 0], k[0, :2, -1] = (float('-inf'),) * 3
    assert_matches_reference(op, reference, inputs | {'k': k}, dtype, device=device)
    y = op(**single(inputs | {'k': k}, dtype, device))
    assert not y[-1].any()


def kernels_run(function: Callable[[], object]) -> set[str]:
    """The names of the compiled kernels that a call ran, as a profile shows them."""
    with torch.profiler.profile() as profile:
        function()
    names = {event.name for event in profile.events()}
    return {name for name in names if name.startswith('aft_vision::') and not name.startswith('aft_vision::aft_')}


def assert_passes_opcheck(name: str, inputs: dict[str, Any], backend: str = 'auto', device: str = 'cpu') -> None:
    """torch's checks of schema, fakes and autograd, on contiguous and on transposed inputs, forward and backward."""
    low = single(inputs, device=device)
    operator = getattr(torch.ops.aft_vision, name).default
    # The registered autograd and the traced graph are those of the operator, whatever its form.
    own = {} if backend == 'auto' else {'test_utils': ('test_schema', 'test_faketensor')}
    torch.library.opcheck(operator, (*operands(name, low), True, backend), **own)
    turned = {key: x.detach().mT.contiguous().mT if key in 'qkv' else _detached(x) for key, x in low.items()}
    arguments = operands(name, turned)
    y, saved = operator(*arguments, True, backend)
    torch.library.opcheck(operator, (*arguments, True, backend), test_utils=('test_schema', 'test_faketensor'))
    grad = randn(*y.mT.shape, seed=3, dtype=torch.float32).to(device).mT
    backward = getattr(torch.ops.aft_vision, f'{name}_backward').default
    for need_bias in (True, False):
        torch.library.opcheck(
            backward, (grad, y, saved, *arguments, need_bias, backend), test_utils=('test_schema', 'test_faketensor')
        )


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _leaf(x: Any, dtype: torch.dtype, device: str) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().to(device, dtype).requires_grad_()
    return x.to(device) if isinstance(x, Tensor) else x


def photographs(count: int, size: tuple[int, int]) -> list[Image.Image]:
    """The first photographs of the clothing data set, class after class, resized to (width, height)."""
    folders = sorted((CLOTHING / 'train').iterdir())
    files = chain.from_iterable(zip(*(sorted(folder.iterdir()) for folder in folders), strict=True))
    return [Image.open(path).convert('RGB').resize(size) for path in islice(files, count)]


def make_folder(root: Path, splits: dict[str, list[str]], images: int = 2, size: tuple[int, int] = (40, 30)) -> Path:
    """An ImageFolder whose class i has the grey value 20 * i."""
    for split, classes in splits.items():
        for index, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(images):
                Image.new('RGB', size, (20 * index,) * 3).save(folder / f'{number}.png')
    return root


def link_photographs(folder: Path, train: int, validation: int, classes: int = 10) -> Path:
    """A data set of the first photographs of the first classes of clothing: so many of each class in each split."""
    for split, count in (('train', train), ('validation', validation)):
        for source in sorted((CLOTHING / split).iterdir())[:classes]:
            (folder / split / source.name).mkdir(parents=True)
            for path in sorted(source.iterdir())[:count]:
                (folder / split / source.name / path.name).symlink_to(path)
    return folder


@cache
def load_script(path: str) -> Any:
    """A script of the checkout that is in no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(__file__).parents[1] / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def require_ffcv() -> None:
    """Skip a test, or a module of tests, without FFCV; it is not imported, because that gives torch a single thread."""
    if importlib.util.find_spec('ffcv') is None:
        reason = "needs FFCV: pip install 'aft-vision[ffcv]' and Debian's libraries"
        pytest.skip(reason, allow_module_level=True)


def make_beton(folder: Path, source: Path = CLOTHING, options: Any = None, workers: int = 0) -> Path:
    """Both splits of a folder of images as FFCV files."""
    from aft_vision.data.ffcv.writer import write_beton

    places = {'train': open_train_split(Source(dir=str(source))), 'val': open_eval_split(Source(dir=str(source)))}
    for name, split in places.items():
        write_beton(split, folder / f'{name}.beton', options, workers, progress=False)
    return folder


def digest(checkpoint: Path) -> str:
    """A hash of all that is trained, its average and the optimizer."""
    content = torch.load(checkpoint, weights_only=True)
    values = {f'{kind}.{name}': x for kind in ('state_dict', 'ema_state_dict') for name, x in content[kind].items()}
    moments = content['optimizer']['state']
    values |= {f'{i}.{name}': x for i, state in moments.items() for name, x in state.items()}
    for kind in ('task_state', 'ema_task_state'):
        for part, tensors in content[kind].items():
            values |= {f'{kind}.{part}.{name}': x for name, x in tensors.items()}
    hashed = hashlib.sha256()
    for name in sorted(values):
        hashed.update(name.encode() + values[name].numpy().tobytes())
    return hashed.hexdigest()


def save_model(path: Path, name: str, model: torch.nn.Module, kwargs: dict[str, Any], **more: Any) -> Path:
    """Write a checkpoint of a model as the trainers do."""
    torch.save({'model_name': name, 'model_kwargs': kwargs, 'state_dict': model.state_dict(), **more}, path)
    return path


def losses(run_dir: Path) -> list[dict[str, str]]:
    """The rows of the log, without what depends on the clock and the machine."""
    with (run_dir / 'summary.csv').open() as file:
        kept = 'epoch train_loss train_lr eval_loss eval_top1 eval_ema_top1 eval_bits eval_ema_bits'.split()
        return [{name: row[name] for name in kept if name in row} for row in csv.DictReader(file)]


class BusyMachine:
    """A system of two cores whose clock, cores and processes are set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = self.busy = self.own = 0.0
        monkeypatch.setattr(cores, '_sample', lambda: cores._Sample(self.clock, self.busy, self.own))
        monkeypatch.setattr(cores, '_cores', lambda: {0, 1})
        monkeypatch.setattr(cores.time, 'sleep', self.sleep)
        self.others = 0.0

    def sleep(self, seconds: float) -> None:
        """Others work meanwhile, on so many cores."""
        self.clock += seconds
        self.busy += self.others * seconds


def pretend_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let standard error, which is captured, say that it is a terminal: progress bars go nowhere else."""
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, update: int, number: int = signal.SIGTERM) -> None:
    """Send a signal to this process in that update of this run."""
    from train import engine

    original = engine.train_step

    def step(state, parts):
        loss = original(state, parts)
        if state.progress.updates == update:
            os.kill(os.getpid(), number)
        return loss

    monkeypatch.setattr(engine, 'train_step', step)


def stop_in(
    monkeypatch: pytest.MonkeyPatch, update: int, run: Callable[..., object], *args: Any, number: int = signal.SIGTERM
) -> object:
    """Stop a run by a signal in that update, and return its exit code."""
    with monkeypatch.context() as patch:
        interrupt_at(patch, update, number)
        with pytest.raises(SystemExit) as stopped:
            run(*args)
    return stopped.value.code


def interrupt_text_at(monkeypatch: pytest.MonkeyPatch, update: int, number: int | None = None) -> None:
    """Raise a KeyboardInterrupt in that update of a text run, as if it were killed, or send a signal."""
    from train.fastformer import trainer

    original = trainer.EpochMeter.on_step_end

    def on_step_end(self, args, state, control, **kwargs):
        original(self, args, state, control, **kwargs)
        if state.global_step == update:
            if number is None:
                raise KeyboardInterrupt
            signal.raise_signal(number)

    monkeypatch.setattr(trainer.EpochMeter, 'on_step_end', on_step_end)


def leave_curves_undrawn(patch: pytest.MonkeyPatch) -> None:
    """Let the trainers leave an empty file in the place of the picture of their curves."""
    undrawn = SimpleNamespace(savefig=lambda path, dpi: path.touch())
    for function in ('train.imagenet.draw_history', 'train.sequence.draw_bits'):
        patch.setattr(function, lambda rows, words: undrawn)


def draw_coarsely(patch: pytest.MonkeyPatch) -> None:
    """Give pictures a ninth of their pixels, which take most of the time of a page."""
    for module in ('figure', 'page'):
        patch.setattr(f'aft_vision.visualize.{module}.DPI', 50)


def unpack_data(name: str, folder: Path) -> Path:
    """Unpack an archive of AFT_DATA into a folder, and give the folder."""
    with tarfile.open(Path(os.environ['AFT_DATA']) / name) as archive:
        # An argument of extractall in Python 3.11.4 and later alone.
        archive.extraction_filter = getattr(tarfile, 'data_filter', lambda member, path: member)
        archive.extractall(folder)
    return folder


def unpack_ratings(folder: Path, count: int) -> Path:
    """Unpack the real clicks and ratings into a folder, and give that of the first ratings of MovieLens-100k."""
    ratings = unpack_data('ctr_samples.tar.xz', folder) / 'ctr' / 'ml-100k'
    lines = (ratings / 'ml-100k.inter').read_text().splitlines(keepends=True)
    (ratings / 'ml-100k.inter').write_text(''.join(lines[: count + 1]))
    return ratings


def torch_version() -> tuple[int, int]:
    """Return the two first numbers of torch's version."""
    major, minor = torch.__version__.split('.')[:2]
    return int(major), int(minor)


# docs/guide/install.md: where an older one compiles the training of a model at several sizes.
fixes_trained_sizes = pytest.mark.skipif(torch_version() < (2, 14), reason='needs torch 2.14')


def interpret_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's kernels run on the CPU, in Triton's interpreter."""
    from triton import language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv('TRITON_INTERPRET', '1')
    # Functions of Triton's own, such as tl.sum: timm may have imported them before, as functions to compile.
    for module in (tl, tl.standard):
        for name, function in list(vars(module).items()):
            if isinstance(function, JITFunction):
                monkeypatch.setattr(module, name, interpreter.InterpretedFunction(function.fn))
    # It replaces the language by its own at every launch and call of a function inside a kernel, in 2 ms: once will do.
    scope = SimpleNamespace(set_attr=partial(monkeypatch.setattr, raising=False), restore=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, '_LangPatchScope', lambda: scope)
        interpreter._patch_lang(SimpleNamespace(__globals__={'tl': tl, 'core': tl.core}))
    monkeypatch.setattr(interpreter, '_patch_lang', lambda function: scope)
    monkeypatch.setattr(interpreter.InterpretedFunction, '__call__', lambda self, *x, **y: self.rewrite()(*x, **y))
    # A third of its time goes to checks of overflow, of which nothing is made outside its mode for debugging.
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, 'options', options)
    # It makes a table of all types to look up one, in a sixth of its time. Types of pointers have no hash.
    known = cache(interpreter._get_np_dtype)
    pointer = interpreter._get_np_dtype(tl.pointer_type(tl.float32))
    monkeypatch.setattr(
        interpreter, '_get_np_dtype', lambda x: pointer if isinstance(x.scalar, tl.pointer_type) else known(x.scalar)
    )
    _share_sizes(monkeypatch)


def _share_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton wrap the sizes of tensors and types once each, which otherwise takes half of the time."""
    from triton.language import core, semantic

    make_tensor, make_type = core.tensor.__init__, core.block_type.__init__
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    tensors: dict[tuple[Any, ...], dict[str, Any]] = {}
    types: dict[tuple[Any, ...], dict[str, Any]] = {}

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape,) if type.is_block() else ()
        if key not in tensors:
            make_tensor(self, handle, type)
            tensors[key] = {'shape': self.shape, 'numel': self.numel}
        self.__dict__.update(tensors[key], handle=handle, type=type, dtype=type.scalar)

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(x.value if isinstance(x, core.constexpr) else x for x in shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        self.__dict__.update(types[key], element_ty=element_ty)

    def sizes(x: Any) -> list[int]:
        return [*x.type.shape] if x.type.is_block() else []

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if sizes(lhs) == sizes(rhs) else broadcast(self, lhs, rhs)

    monkeypatch.setattr(core.tensor, '__init__', tensor)
    monkeypatch.setattr(core.block_type, '__init__', block_type)
    monkeypatch.setattr(semantic.TritonSemantic, 'broadcast_impl_value', broadcast_impl_value)


def link_packages(folder: Path, names: Sequence[str]) -> None:
    """Link these installed packages and all that they need into a folder, for `python -I -S`, which sees no others."""
    requirements = pytest.importorskip('packaging.requirements')
    ahead, done = list(names), set()
    while ahead:
        name = ahead.pop()
        if name in done:
            continue
        done.add(name)
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        needed = [requirements.Requirement(line) for line in package.requires or []]
        ahead += [x.name for x in needed if x.marker is None or x.marker.evaluate({'extra': ''})]
        for top in {file.parts[0] for file in package.files or []} - {'..', '__pycache__'}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(package.locate_file(top))))
