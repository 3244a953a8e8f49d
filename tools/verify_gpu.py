"""Compare the Triton kernels with the torch forms on the GPU, in value and in every gradient, and record the result.

python -m tools.verify_gpu
python -m tools.verify_gpu --operators conv full --dtypes bfloat16 --thorough --json FILE
python -m tools.verify_gpu --compile 8.0 9.0 12.0

Each operator is compared with its torch form in float64, at a small odd shape and at the shapes of models, in each type
(half types also with the float32 bias of autocast), with each tile size of its tuner, on normal inputs and on keys and
biases that underflow. Without a record for the kind of device, the first use of an operator makes only the small
comparison. This command makes all of them in advance and replaces the record. A kernel that disagrees is not used.

--thorough adds further shapes (one sequence, odd sizes, long sequences), where a kernel that disagrees is not used
either, and checks that a second call gives the same bits, and so do a captured CUDA graph and
torch.compile(fullgraph=True); of these nothing is recorded.
--compile only compiles, at the shapes of models, for GPUs of these compute capabilities; it needs no GPU.
--dry-run does all but graphs on tiny shapes on a CPU, in Triton's interpreter; it needs TRITON_INTERPRET=1.

The exit status is 0 if all agree, 1 if any does not, and 2 after an error, such as no GPU that Triton supports.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aft_vision_cli.commandline import CommandParser, run_command
from tools.arguments import DTYPES

CAPABILITIES = ('8.0', '8.6', '8.9', '9.0', '10.0', '12.0')
# (B, grid, D, channels of a head, window) of vision models, and of text.
IMAGE, TEXT = (8, (14, 14), 384), (2, (1, 3072), 256)
SHAPES = {
    'full': [(8, (1, 197), 384, 1, 1), (2, (1, 577), 384, 1, 1)],
    'simple': [(*IMAGE, 1, 1)],
    'conv': [(*IMAGE, 1, 11), (*IMAGE, 24, 11), (2, (14, 14), 384, 1, 11)],
    'onehot': [(*IMAGE, 1, 11), (*IMAGE, 24, 11)],
    'axial': [(*IMAGE, 1, 14), (*IMAGE, 24, 14), (2, (48, 64), 384, 24, 14)],
    'local_causal': [(*TEXT, 1, 32), (*TEXT, 1, 256)],
    'simple_causal': [(*TEXT, 1, 1)],
}
# One sequence, sizes that nothing divides, and long sequences.
MORE_SHAPES = {
    'full': [(1, (1, 197), 192, 1, 1), (3, (1, 131), 50, 1, 1), (2, (1, 2048), 64, 1, 1)],
    'simple': [(1, (14, 14), 192, 1, 1), (3, (9, 15), 50, 1, 1), (2, (128, 256), 64, 1, 1)],
    'conv': [(1, (14, 14), 192, 1, 11), (3, (9, 15), 50, 5, 7), (2, (48, 64), 32, 1, 11), (9, (48, 64), 32, 1, 11)],
    'onehot': [(1, (14, 14), 192, 1, 11), (3, (9, 15), 50, 5, 7), (2, (48, 64), 32, 1, 11)],
    'axial': [(1, (14, 14), 192, 6, 14), (3, (9, 15), 50, 5, 7), (2, (32, 32), 64, 1, 14), (2, (3, 300), 32, 32, 300)],
    'local_causal': [(1, (1, 1024), 256, 1, 32), (3, (1, 333), 50, 1, 77), (2, (1, 16384), 64, 1, 256)],
    'simple_causal': [(1, (1, 1024), 256, 1, 1), (3, (1, 333), 50, 1, 1), (2, (1, 65536), 64, 1, 1)],
}
# Those of a dry run.
TINY = [(1, (2, 3), 2, 1, 3)]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('--operators', nargs='+', choices=SHAPES, default=[*SHAPES], help='(default: all)')
    parser.add_argument('--dtypes', nargs='+', choices=DTYPES, default=[*DTYPES], help='type of q, k, v (default: all)')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write what was found after each check')
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument('--thorough', action='store_true', help='further shapes, repetition, graphs and compilation')
    kind.add_argument('--compile', nargs='+', choices=CAPABILITIES, metavar='CAPABILITY', help='; '.join(CAPABILITIES))
    parser.add_argument('--choices', type=int, metavar='N', help='sizes of tiles that --compile takes (default: all)')
    parser.add_argument('--dry-run', action='store_true', help="tiny shapes on a CPU, in Triton's interpreter")
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

import torch
from torch import Tensor

from aft_vision import ops
from aft_vision.errors import first_line
from aft_vision.files import write_json
from aft_vision.ops.common.errors import AcceleratorError
from aft_vision.ops.declaration import OPERATIONS, Operation
from tools.processes import interrupted_by_sigterm

FLOAT64, FURTHER_SHAPES = 'float64', 'further shapes'
# Checks whose failure is recorded, so that the kernel is not used.
RECORDED = (FLOAT64, FURTHER_SHAPES)
# The failure of a check in one line, or None.
Check = Callable[[], str | None]


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each operator, type and check.

    Raises:
        ValueError: no kernel runs on this machine.
        RuntimeError: a kernel made the GPU unusable for this process.
        SystemExit: a kernel does not agree; the code is 1.
    """
    args = parse_args(argv)
    device = torch.device('cpu' if args.dry_run or args.compile else 'cuda')
    reason = None if args.compile else find_obstacle(device)
    if reason is not None:
        raise ValueError(f'nothing was verified: {reason}')
    from aft_vision.ops.common import verify

    if device.type == 'cuda':
        device = torch.device('cuda', torch.cuda.current_device())
    rows: list[dict[str, Any]] = []
    # A comparison that is stopped leaves the record as it was.
    with interrupted_by_sigterm():
        for name, dtype in itertools.product(args.operators, args.dtypes):
            count = len(find_operation(name).biases)
            for bias in [dtype, 'float32'] if count and dtype != 'float32' else [dtype]:
                label = dtype if bias == dtype else f'{dtype}, {bias} bias'
                checks = compilations if args.compile else comparisons
                types = find_types(dtype, bias, count)
                for what, check in checks(name, types, device, args).items():
                    result, error = run_check(check)
                    rows.append({'operator': name, 'type': label, 'check': what, **result})
                    show(rows, args.json)
                    if isinstance(error, AcceleratorError):
                        raise RuntimeError(
                            'the GPU is lost to this process; verify the others by --operators'
                        ) from error
    if args.json is not None:
        write_rows(rows, args.json, complete=True)
    if not args.compile:
        print(f'recorded for {verify.device_name(device)} in {verify.record_path(device)}')
    if any(row['failure'] for row in rows):
        raise SystemExit(1)


def comparisons(
    name: str, types: tuple[torch.dtype, ...], device: torch.device, args: argparse.Namespace
) -> dict[str, Check]:
    """Return the checks that run an operator, by name."""
    from aft_vision.ops.common import verify

    shapes, further = (
        [verify.Shape(*x) for x in (TINY if args.dry_run else all_[name])] for all_ in (SHAPES, MORE_SHAPES)
    )
    operation = find_operation(name)
    compared = shapes if args.dry_run else [verify.SMALL, *shapes]
    found: dict[str, Check] = {FLOAT64: lambda: verify.verify(operation, types, device, *compared)}
    if not args.thorough:
        return found

    function = getattr(ops, f'aft_{name}')

    def repeat(again: Callable[[Callable[..., Tensor], list[Any]], list[Tensor]]) -> str | None:
        inputs = verify.draw_inputs(operation, shapes[0], types, device)
        leaves = [_leaf(x) for x in inputs]

        def operate(*values: Any) -> Tensor:
            return function(**dict(zip(inputs._fields, values, strict=True)), backend='triton')

        pairs = zip(verify.PARTS, step(operate, leaves), again(operate, leaves), strict=False)
        changed = [part for part, x, other in pairs if not torch.equal(x, other)]
        return f'other bits in {", ".join(changed)}' if changed else None

    def check_further() -> str | None:
        failure = verify.find_failure(operation, types, device, *further, choices=1)
        if failure is not None:
            verify.record_failure(operation, types, device, failure)
        return failure

    found |= {
        FURTHER_SHAPES: check_further,
        'a second call': lambda: repeat(step),
        'torch.compile': lambda: repeat(lambda operate, leaves: step(compiled(operate, device), leaves)),
    }
    return found | ({'CUDA graph': lambda: repeat(replay)} if device.type == 'cuda' else {})


def step(operate: Callable[..., Tensor], leaves: list[Any]) -> list[Tensor]:
    """Return the result of an operator, and the gradients of what it has gradients of."""
    y = operate(*leaves)
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, torch.ones_like(y))]


def replay(operate: Callable[..., Tensor], leaves: list[Any]) -> list[Tensor]:
    """Return the same from a CUDA graph, whose results are overwritten before it is replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(operate, leaves)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(operate, leaves)
    for x in found:
        x.fill_(float('nan'))
    graph.replay()
    torch.cuda.synchronize()
    return found


def compiled(operate: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """Return the operator under torch.compile, whole; on a CPU without generated code, which takes a compiler."""
    torch.compiler.reset()
    return torch.compile(
        operate, fullgraph=True, dynamic=False, backend='inductor' if device.type == 'cuda' else 'aot_eager'
    )


def compilations(
    name: str, types: tuple[torch.dtype, ...], device: torch.device, args: argparse.Namespace
) -> dict[str, Check]:
    """Return the checks that compile an operator for each capability, by name."""
    from aft_vision.ops.common import targets, verify

    shapes = [verify.Shape(*shape) for shape in SHAPES[name]]

    def check(capability: str) -> str | None:
        found = targets.compile_kernels(find_operation(name), types, capability, *shapes, choices=args.choices)
        print(f'{found.binaries} binaries of {len(found.kernels)} kernels, {found.too_large} too large')
        return found.failure

    return {f'capability {x}': lambda x=x: check(x) for x in args.compile}  # type: ignore[misc]


def run_check(check: Check) -> tuple[dict[str, Any], Exception | None]:
    """Return the `failure` of a check and its `seconds`, and its error, which is a failure too, or None."""
    start, raised = time.perf_counter(), None
    try:
        failure = check()
    # Whatever it is: the other checks are made all the same.
    except Exception as error:
        failure, raised = first_line(error), error
    return {'failure': failure, 'seconds': time.perf_counter() - start}, raised


def show(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Print the last row, and write all of them."""
    row = rows[-1]
    result = 'compiles' if row['check'].startswith('capability') else 'agrees'
    if row['failure'] is not None:
        result = f'{"not used" if row["check"] in RECORDED else "fails"}: {row["failure"]}'
    print(f'{row["operator"]:14} {row["type"]:23} {row["check"]:16} {row["seconds"]:6.1f} s  {result}', flush=True)
    if path is not None:
        write_rows(rows, path, complete=False)


def write_rows(rows: list[dict[str, Any]], path: Path, complete: bool) -> None:
    """Write the rows as JSON, and whether they are all."""
    write_json(path, {'complete': complete, 'rows': rows})


def find_operation(name: str) -> Operation:
    """Return the operation of a name without its first part."""
    return OPERATIONS[f'aft_{name}']


def find_types(dtype: str, bias: str, biases: int) -> tuple[torch.dtype, ...]:
    """Return the types of q, k, v and the biases: one for all if they are the same."""
    return tuple(getattr(torch, x) for x in ([dtype] if bias == dtype else [dtype] * 3 + [bias] * biases))


def find_obstacle(device: torch.device) -> str | None:
    """Return why no kernel runs on this machine, or None."""
    from aft_vision.ops.common import launch

    if device.type == 'cpu':
        return None if launch.supports(device) else 'expected Triton (pip install triton) and TRITON_INTERPRET=1'
    if not torch.cuda.is_available():
        return 'there is no GPU that torch can use'
    if not launch.supports(torch.device('cuda', torch.cuda.current_device())):
        return f'expected Triton (pip install triton) and a GPU of capability {launch.CAPABILITY} or later'
    return launch.failure(torch.device('cuda', torch.cuda.current_device()))


def _leaf(x: Any) -> Any:
    return x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x


if __name__ == '__main__':
    run_command(main)
