"""Export to torch.export and ONNX, with folded weights and dynamic sizes if possible."""

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from timm.data import resolve_input_data_config
from timm.layers import Mlp
from timm.utils import reparameterize_model
from torch import nn

from aft_vision.data.class_names import class_names
from aft_vision.export.verify import Check, InputShape, Size, channels, grid_steps, onnx_runner, smallest_size, verify
from aft_vision.files import replacing
from aft_vision.layers import TokenMixer, token_mixers
from aft_vision.layers.frozen import FlatLinear
from aft_vision.models import AFTVisionTransformer
from aft_vision.sizes import check_image_size, check_resizable, default_size, resize_model, takes_any_size

INPUT, OUTPUT = 'images', 'logits'
# Largest allowed difference of an exported file from PyTorch, relative to the largest logit.
TOLERANCE = 1e-5
# Largest weights of one ONNX file in bytes: protocol buffers are limited to 2 GiB.
MAX_ONNX_BYTES = 2**31 - 2**27


def choose_shape(
    model: nn.Module,
    size: Size | None = None,
    fixed_size: bool = False,
    batch: int | None = None,
    lowering: str = 'conv',
) -> InputShape:
    """Choose the shape of an export, and check that the model supports it.

    Args:
        size: (H, W) in pixels; None means the model's default.
        fixed_size: Fix the size even if the model takes any.
        batch: Fixed batch size; None allows any.
        lowering: Of AFT-conv to torch operations, 'conv' or 'matmul'.

    Raises:
        ValueError: the model does not support the size or lowering, or the lowering needs a fixed size.
    """
    size = default_size(model) if size is None else size
    any_size = takes_any_size(model)
    # A program for any size takes whole patches.
    check_image_size(model, size, pads=fixed_size or not any_size)
    if batch is not None and batch < 1:
        raise ValueError(f'expected a batch of at least 1 image, got {batch}')
    if lowering != 'conv' and not any(lowering in mixer.lowerings for mixer in token_mixers(model)):
        raise ValueError(f'expected an AFT-conv for lowering={lowering!r}, got a {type(model).__name__} without one')
    if lowering == 'matmul' and not fixed_size:
        raise ValueError("lowering='matmul' has matrices of one size: expected a fixed size, got a dynamic one")
    check_resizable(model, size)
    return InputShape(size, fixed_size or not any_size, batch)


def fold(model: nn.Module, shape: InputShape, lowering: str = 'conv', aten: bool = True) -> nn.Module:
    """Copy the model to the CPU in float32 and eval mode for export, with what depends only on parameters as constants.

    Args:
        lowering: Of AFT-conv to torch operations, 'conv' or 'matmul'.
        aten: Use plain aten operations; False keeps the custom operators.
    """
    model = resize_model(copy.deepcopy(model).cpu().float().eval(), shape.size)
    if not aten:
        return reparameterize_model(model, inplace=True)
    grid: Size | None = None
    if isinstance(model, AFTVisionTransformer) and model.passes_grid:
        grid = model.patch_embed.dynamic_feat_size(shape.size)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, TokenMixer):
                setattr(parent, name, child.freeze(grid, lowering))
            elif isinstance(parent, Mlp) and isinstance(child, nn.Linear):
                setattr(parent, name, FlatLinear(child))
    return model


def export_pt2(
    model: nn.Module,
    path: str | Path,
    shape: InputShape | None = None,
    *,
    aten: bool = False,
    lowering: str = 'conv',
    tolerance: float = TOLERANCE,
) -> list[Check]:
    """Write a program of torch.export in float32, which `torch.export.load(path).module()` runs.

    Args:
        model: A classifier of timm or of this package.
        path: Ends in .pt2.
        shape: From `choose_shape`; None makes everything dynamic that can be.
        aten: Use plain aten operations: loading the file needs no `import aft_vision`, and the numeric range is limited
            as in `aft_vision.ops.aten`. Otherwise the file contains the custom operators.
        lowering: Of AFT-conv with aten=True to torch operations, 'conv' or 'matmul'.
        tolerance: Limit of the difference from PyTorch, see `Check`.

    Returns:
        The comparisons that were made before the file got its name.

    Raises:
        ValueError: the arguments contradict each other, or the file differs from the model by more than the tolerance.
    """
    if lowering != 'conv' and not aten:
        raise ValueError(f'lowering={lowering!r} is made of aten operations: expected aten=True, got aten=False')
    shape = shape or choose_shape(model)
    smallest = smallest_size(model)
    if not shape.fixed_size and any(side < end for side, end in zip(shape.size, smallest, strict=True)):
        raise ValueError(
            f'expected at least {smallest} pixels for a .pt2 of any size, got {shape.size}: '
            'choose a larger size, fixed_size=True, or no .pt2'
        )
    with replacing(path) as temporary:
        torch.export.save(trace(fold(model, shape, lowering, aten), shape), temporary)
        program = torch.export.load(temporary).module()
        return verify(model, shape, program, tolerance)


def export_onnx(
    model: nn.Module,
    path: str | Path,
    shape: InputShape | None = None,
    *,
    lowering: str = 'conv',
    opset: int = 20,
    tolerance: float = TOLERANCE,
) -> list[Check]:
    """Write an ONNX file of plain operators in float32.

    Its input is `images`, (batch, 3, height, width), its output `logits`.
    If height and width are dynamic, the first node fails unless they are multiples of the patch size.

    Args:
        model: A classifier of timm or of this package.
        path: Ends in .onnx.
        shape: From `choose_shape`; None makes everything dynamic that can be.
        lowering: Of AFT-conv, 'conv' for any grid, or 'matmul' for one: a constant (T, T) matrix per head.
        opset: Version of the operator set, 18 to 25.
        tolerance: Limit of the difference from PyTorch in onnxruntime, see `Check`.

    Returns:
        The comparisons that were made before the file got its name.

    Raises:
        ImportError: the `export` extra is not installed.
        ValueError: the arguments contradict each other, torch does not write the operator set, or the file differs from
            the model by more than the tolerance.
    """
    require_onnx()
    shape = shape or choose_shape(model, lowering=lowering)
    folded = fold(model, shape, lowering)
    size = sum(x.numel() * x.element_size() for x in folded.state_dict().values())
    if size > MAX_ONNX_BYTES:
        raise ValueError(f'expected weights of at most {MAX_ONNX_BYTES / 2**20:.0f} MiB, got {size / 2**20:.0f} MiB')
    program = torch.onnx.export(
        trace(folded, shape),
        input_names=[INPUT],
        output_names=[OUTPUT],
        opset_version=opset,
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    # For one that it does not know, torch writes another.
    written = program.model.opset_imports['']
    if written != opset:
        raise ValueError(
            f'expected an operator set that torch writes, got opset={opset}, for which it writes {written}'
        )
    _fold_constants(program.model)
    described = describe_input(model, shape.size)
    program.model.metadata_props.update({name: json.dumps(value) for name, value in described.items()})
    _describe_axes(program.model, model, shape)
    with replacing(path) as temporary:
        program.save(temporary)
        return verify(model, shape, onnx_runner(temporary), tolerance)


def trace(model: nn.Module, shape: InputShape) -> torch.export.ExportedProgram:
    """Export the graph of a folded model with the dynamic sizes of a shape."""
    patch, min_steps = grid_steps(model)
    height, width = shape.size
    sizes: dict[int, Any] = {}
    if shape.batch is None:
        sizes[0] = torch.export.Dim('batch', min=1)
    if not shape.fixed_size:
        # torch.export specialises on a square example.
        sizes[2] = patch[0] * torch.export.Dim('rows', min=min_steps)
        sizes[3] = patch[1] * torch.export.Dim('columns', min=min_steps)
        height, width = max(height, min_steps * patch[0]), max(width, min_steps * patch[1]) + patch[1]
    example = torch.zeros(shape.batch or 2, channels(model), height, width)
    with torch.no_grad():
        program = torch.export.export(model, (example,), dynamic_shapes=(sizes,) if sizes else None)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            # References to source files, with paths of this machine.
            node.meta.pop('stack_trace', None)
    return program


def _fold_constants(program: Any) -> None:
    """Compute what depends on constants only, also large: converters such as onnx2tf expect the taps as constants."""
    from onnxscript import optimizer

    limits = dict(input_size_limit=MAX_ONNX_BYTES, output_size_limit=MAX_ONNX_BYTES)
    optimizer.fold_constants(program, onnx_shape_inference=False, **limits)
    optimizer.remove_unused_nodes(program)


def _describe_axes(program: Any, model: nn.Module, shape: InputShape) -> None:
    """Name the dynamic axes of an ONNX program, reject sizes that are not multiples, and drop paths of this machine.

    Other values have a recorded shape only if all of it is known.
    """
    import onnx_ir as ir

    graph = program.graph
    for node in graph.all_nodes():
        node.metadata_props.pop('pkg.torch.onnx.stack_trace', None)
    (images,), (logits,) = graph.inputs, graph.outputs
    batch = 'batch' if shape.batch is None else shape.batch
    sides = shape.size if shape.fixed_size else ('height', 'width')
    images.shape = ir.Shape([batch, channels(model), *sides])
    logits.shape = ir.Shape([batch, *logits.shape[1:]])
    for value in (x for node in graph.all_nodes() for x in node.outputs):
        # torch calls the sizes of the rest otherwise, s77 for the batch, and a strict runtime would find two names.
        if value is not logits and value.shape is not None and value.shape.is_dynamic():
            value.shape = value.type = None
    patch: Any = getattr(getattr(model, 'patch_embed', None), 'patch_size', (1, 1))
    if shape.fixed_size or tuple(patch) == (1, 1):
        return
    # A partial patch would be cut off silently; this reshape of the image to whole patches fails instead.
    step, kept = (ir.tensor(x, name=f'{INPUT}_{name}') for x, name in ((list(patch), 'patch'), ([0, 0], 'kept')))
    constant: Any
    for constant in (step, kept):
        graph.register_initializer(
            ir.Value(name=constant.name, const_value=constant, shape=constant.shape, type=ir.TensorType(constant.dtype))
        )
    step, kept = (graph.initializers[x.name] for x in (step, kept))
    size = ir.node('Shape', [images], attributes={'start': 2})
    patches = ir.node('Div', [size.outputs[0], step])
    whole = ir.node('Mul', [patches.outputs[0], step])
    # For a side below one patch: 0 would mean the side itself.
    positive = ir.node('Max', [whole.outputs[0], step])
    target = ir.node('Concat', [kept, positive.outputs[0]], attributes={'axis': 0})
    name = f'height_and_width_must_be_multiples_of_{patch[0]}_and_{patch[1]}'
    checked = ir.node('Reshape', [images, target.outputs[0]], name=name)
    ir.convenience.replace_all_uses_with(images, checked.outputs[0])
    for node in (size, checked):
        node.replace_input_with(0, images)
    graph.insert_before(graph[0], [size, patches, whole, positive, target, checked])


def require_onnx() -> None:
    """Raise an ImportError that names the extra unless ONNX files can be written and run."""
    missing = [name for name in ('onnx', 'onnxscript', 'onnxruntime') if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"ONNX needs {', '.join(missing)}: pip install 'aft-vision[export]'")


def describe_input(model: nn.Module, size: Size) -> dict[str, Any]:
    """Return what prepares images of a size for a model, and the names of its classes, for a reader without timm."""
    config = resolve_input_data_config(model)
    described = {name: config[name] for name in ('mean', 'std', 'interpolation', 'crop_pct', 'crop_mode')}
    return {'input_size': (channels(model), *size), **described, 'label_names': class_names(model)}
