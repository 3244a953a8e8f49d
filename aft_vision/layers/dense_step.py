"""What is around the mixer of a block, for one token: compiled, where its modules are those that are compiled."""

from collections.abc import Callable
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from timm.layers import LayerNorm, Mlp
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from aft_vision import ops

if TYPE_CHECKING:
    from aft_vision.layers.causal import CausalBlock

Path = tuple[str, ...]
# Where the modules are in a block, and of which types they must be; an empty tuple is any type.
MODULES: dict[Path, tuple[type[nn.Module], ...]] = {
    ('norm1',): (LayerNorm,),
    ('attn',): (),
    ('attn', 'qkv'): (nn.Linear,),
    ('attn', 'proj'): (nn.Linear, nn.Identity),
    ('attn', 'proj_drop'): (nn.Dropout,),
    ('ls1',): (nn.Identity,),
    ('norm2',): (LayerNorm,),
    ('mlp',): (Mlp,),
    ('mlp', 'fc1'): (nn.Linear,),
    ('mlp', 'act'): (nn.GELU,),
    ('mlp', 'drop1'): (nn.Dropout,),
    ('mlp', 'norm'): (nn.Identity,),
    ('mlp', 'fc2'): (nn.Linear,),
    ('mlp', 'drop2'): (nn.Dropout,),
    ('ls2',): (nn.Identity,),
}
# Attributes of theirs that decide what they do.
SETTINGS = ('eps', 'approximate', 'p')
NUM_BYTES = attrgetter('nbytes')


class DenseStep:
    """The compiled linear layers of a block, as long as the block is as it was when they were looked up.

    Modules, parameters and hooks of a block may be exchanged or moved at any time. A copy of the block has none yet.

    Args:
        block: the block.
        mixer_step: the function that `step` of its mixer must be: that of a subclass may do more than `block_step`.
    """

    def __init__(self, block: 'CausalBlock', mixer_step: Callable[..., Any]) -> None:
        found = {path: _find(block, path) for path in MODULES}
        fits = all(type(found[path]) in kinds for path, kinds in MODULES.items() if kinds)
        modules = [module for module in found.values() if module is not None]
        self._block = _compile(found) if fits else None
        # What is to be the same object.
        places: list[tuple[dict[str, Any], str]] = []
        for path in MODULES:
            parent = _find(block, path[:-1])
            if parent is not None:
                places.append((parent._modules, path[-1]))
        for module in modules:
            places += [(vars(module), name) for name in SETTINGS if name in vars(module)]
            places += [(module._parameters, name) for name in module._parameters]
        self._parameters = [x for module in modules for x in module._parameters.values() if x is not None]
        self._matrices = [x for x in self._parameters if x.dim() > 1]
        self._vectors = [x for x in self._parameters if x.dim() <= 1]
        self._dicts, self._names = [place for place, _ in places], [name for _, name in places]
        # Held, so that nothing else can get their identities.
        self._held = [place.get(name) for place, name in places]
        self._seen = self._look()
        self._mixer, self._mixer_step = found['attn',], mixer_step
        self._hooks = [hooks for x in modules for hooks in (x._forward_hooks, x._forward_pre_hooks)]
        self._hooks += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self._attributes = [vars(module) for module in modules]
        self._drops = [module for module in modules if isinstance(module, nn.Dropout) and module.p > 0]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def is_current(self) -> bool:
        """Whether the block is as it was."""
        return self._look() == self._seen

    def kernels(self) -> Any | None:
        """The compiled layers, if they do what the modules would do."""
        if any(self._hooks) or any(drop.training for drop in self._drops):
            return None
        # An object's own function takes the place of that of its class.
        if any(map(dict.__contains__, self._attributes, repeat('forward'))):
            return None
        step = getattr(self._mixer, 'step', None)
        return self._block if getattr(step, '__func__', None) is self._mixer_step else None

    def _look(self) -> list[Any]:
        # Behind the objects what an assignment to their `.data` changes; this is looked at in every step.
        objects, addresses = map(id, map(dict.get, self._dicts, self._names)), map(Tensor.data_ptr, self._parameters)
        layouts = [(x.shape, x.stride(), x.dtype) for x in self._matrices]
        return [*objects, *addresses, *layouts, *map(NUM_BYTES, self._vectors)]


def _find(module: nn.Module | None, path: Path) -> nn.Module | None:
    for name in path:
        module = None if module is None else module._modules.get(name)
    return module


def _compile(modules: dict[Path, Any]) -> Any | None:
    norm1, qkv, proj, norm2 = (modules[x] for x in (('norm1',), ('attn', 'qkv'), ('attn', 'proj'), ('norm2',)))
    fc1, act, fc2 = (modules['mlp', name] for name in ('fc1', 'act', 'fc2'))
    norms = [(norm.weight, norm.bias, norm.eps) for norm in (norm1, norm2)]
    if act.approximate != 'none' or any(x is None for norm in norms for x in norm):
        return None
    return ops.dense_block(
        ops.Dense(qkv.weight, qkv.bias, *norms[0]),
        ops.Dense(proj.weight, proj.bias) if isinstance(proj, nn.Linear) else None,
        ops.Dense(fc1.weight, fc1.bias, *norms[1], gelu=True),
        ops.Dense(fc2.weight, fc2.bias),
    )
