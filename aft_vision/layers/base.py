"""The base of all token mixers, their registry, and how a model builds them."""

import copy
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from aft_vision.errors import IMPORT_HINT
from aft_vision.layers.frozen import LOWERINGS
from aft_vision.layers.fused import fuse_linear
from aft_vision.layers.position_bias import FusedModule

# Arguments that models give every mixer that takes them, with the values that leave other mixers as they are.
SHARED: dict[str, Any] = dict(
    query_gate=True, qkv_bias=True, proj_bias=True, out_proj=True, proj_drop=0.0, device=None, dtype=None
)


class TokenMixer(nn.Module):
    """A layer that mixes tokens: `mixer(x, grid, mask)` returns (B, T, C) of tokens x (B, T, C).

    grid is (H, W) in tokens or None, mask (B, T) bool, True where a token counts, or None. A class declares all that
    models, training, pictures and exports ask of its mixers; `register_mixer` makes its name one that models take.

    Attributes:
        name: `mixer=NAME` of the models.
        on_grid: mixes a grid of any size, without class token and position embedding, and may have several heads.
        bias_names: its parameters that are position biases, as patterns.
        lowerings: those of `freeze` among which an export chooses.
        causal: masks the future: a mixer of sequences, not of images.
        given: arguments that models, or the class itself, give its constructors: a user does not choose them.
        key_dim: channels of the keys, which pictures of keys and attention read by `project_qkv`; 0 without keys.
    """

    name: ClassVar[str]
    on_grid: ClassVar[bool] = False
    bias_names: ClassVar[tuple[str, ...]] = ()
    lowerings: ClassVar[tuple[str, ...]] = ()
    causal: ClassVar[bool] = False
    given: ClassVar[tuple[str, ...]] = ('num_tokens', 'grid')
    key_dim: int = 0

    def init_weights(self) -> None:
        """Initialise what is the mixer's own; models call it after they drew the weights of all linear layers."""

    def reset_parameters(self) -> None:
        """Initialise all parameters: layers as torch does, then as `init_weights` does."""
        modules: Any = self.modules()
        for module in modules:
            if module is not self and hasattr(module, 'reset_parameters'):
                module.reset_parameters()
        self.init_weights()

    def no_weight_decay(self) -> set[str]:
        """Return names or patterns of the parameters without weight decay: by default those of position biases."""
        return set(self.bias_names)

    @torch.jit.ignore
    def fuse(self) -> 'TokenMixer':
        """Precompute for inference what depends only on position biases, and fuse the linear layers.

        Returns:
            The mixer itself, as `timm.utils.reparameterize_model` expects.
        """
        for module in self.children():
            if isinstance(module, FusedModule):
                module.fuse()
        fuse_linear(self)
        return self

    @classmethod
    @functools.cache
    def parameters_of_init(cls) -> dict[str, Any]:
        """Return the arguments of the class and its bases, in the order of the bases, with their types."""
        found: dict[str, Any] = {}
        for base in reversed(cls.__mro__[: cls.__mro__.index(nn.Module)]):
            init: Any = vars(base).get('__init__')
            if init is not None:
                hints, own = typing.get_type_hints(init), inspect.signature(init).parameters
                named = [
                    name
                    for name, x in own.items()
                    if name != 'self' and x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)
                ]
                found |= {name: hints.get(name, Any) for name in named}
        return found

    @classmethod
    def arguments(cls) -> dict[str, Any]:
        """Return the arguments that a user of a model chooses and that not every mixer has, with their types."""
        given = {'dim', 'key_dim', *SHARED, *cls.given}
        return {name: hint for name, hint in cls.parameters_of_init().items() if name not in given}

    @classmethod
    def depends_on_positions(cls) -> bool:
        """Return whether a token's place matters, and with it the grid; otherwise tokens may be left out."""
        return cls.on_grid or bool(cls.bias_names) or 'num_tokens' in cls.parameters_of_init()

    @torch.jit.ignore
    def set_grid(self, grid: tuple[int, int]) -> None:
        """Resample the position bias permanently to another grid (H, W), if it has one of a fixed grid.

        Raises:
            ValueError: it has parameters for a number of tokens, and its class does not resample them.
        """
        if 'num_tokens' in self.parameters_of_init():
            raise ValueError(
                f'mixer={self.name!r} has parameters for a number of tokens: for another size '
                f'{type(self).__name__} must define set_grid(), which resamples them'
            )

    def resample(self, name: str, value: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a parameter of a checkpoint of another grid for this one.

        Args:
            name: of the parameter in the mixer.
            rows: resamples a tensor (T, n) with one row per token.
        """
        return value

    def learned_bias(self) -> Tensor | None:
        """Return the position biases w (h, ...) as training shapes them, differentiable; None if there are none."""
        return None

    def evaluated_bias(self) -> Tensor | None:
        """Return the position biases w (h, ...) of evaluation, at the mixer's own grid; None if there are none."""
        return self.learned_bias()

    def dense_bias(self, grid: tuple[int, int] | None, targets: Tensor, tokens: int) -> Tensor:
        """Return rows of the position bias as the whole (T, T) matrix of AFT Eq. 2.

        Args:
            grid: (H, W) of the tokens after the prefix; None for a sequence.
            targets: (Q,), including prefix tokens.
            tokens: number of sources S.

        Returns:
            (h, Q, S), or (1, Q, S) if all channels share a bias; minus infinity if a source has no weight.
        """
        like = next(self.parameters(), torch.empty(0))
        return like.new_zeros(1, len(targets), tokens, device=targets.device)

    @torch.no_grad()
    def freeze(self, grid: tuple[int, int] | None, lowering: str = 'conv') -> nn.Module:
        """Build an exportable copy of the mixer for evaluation, with constant position weights.

        The mixer is copied: it does not change, and shares no parameter with the result.

        Args:
            grid: (H, W) in tokens, for a lowering that depends on it; None means the mixer's own grid, if it has one.
            lowering: of AFT-conv to torch operations, 'conv' for any grid or 'matmul' for this grid.

        Raises:
            ValueError: the lowering is unknown, the mixer is causal, or 'matmul' has no grid.
        """
        if lowering not in LOWERINGS:
            raise ValueError(f'lowering must be one of {", ".join(LOWERINGS)}, got {lowering!r}')
        if self.causal:
            raise ValueError(
                f'expected a mixer over an image, got a causal {type(self).__name__}, which has no aten form'
            )
        return copy.deepcopy(self)._freeze(grid, lowering)

    def _freeze(self, grid: tuple[int, int] | None, lowering: str) -> nn.Module:
        # Of a copy. One without position weights needs no other class.
        return self

    def project_qkv(self, x: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return q (B, T, C) or None, k (B, T, key_dim) and v (B, T, C) of tokens (B, T, dim)."""
        raise TypeError(f'{type(self).__name__} has key_dim = {self.key_dim}: it must define project_qkv()')


# Mixers of images, and of sequences, by their names.
MIXERS: dict[str, type[TokenMixer]] = {}
CAUSAL_MIXERS: dict[str, type[TokenMixer]] = {}
Kind = TypeVar('Kind', bound=type[TokenMixer])


def register_mixer(kind: Kind) -> Kind:
    """Register a class of mixers, so that models take `mixer=NAME` and the arguments of its constructor.

    Raises:
        ValueError: another class has its name, or it has position biases that pictures and reports cannot read.
    """
    shown = [
        name for name in ('learned_bias', 'evaluated_bias') if getattr(kind, name) is not getattr(TokenMixer, name)
    ]
    if kind.bias_names and (not shown or kind.dense_bias is TokenMixer.dense_bias):
        raise ValueError(
            f'{kind.__name__} has position biases, {", ".join(kind.bias_names)}: it must define learned_bias() and '
            'dense_bias(), which pictures and reports read'
        )
    known = (CAUSAL_MIXERS if kind.causal else MIXERS).setdefault(kind.name, kind)
    if known is not kind:
        raise ValueError(f'the mixer {kind.name!r} is registered: {known.__name__}; choose another name')
    return kind


Mixer = TypeVar('Mixer', bound=TokenMixer)


def find_mixer(name: str, mixers: Mapping[str, type[TokenMixer]] = MIXERS) -> type[TokenMixer]:
    """Return the class of a registered mixer.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in mixers:
        raise ValueError(f'mixer must be one of {", ".join(mixers)}, got {name!r}; {IMPORT_HINT}')
    return mixers[name]


def mixer_arguments(kinds: Iterable[type[TokenMixer]]) -> dict[str, Any]:
    """Return the arguments that some classes of mixers have, with their types; None leaves one out."""
    found: dict[str, Any] = {}
    for kind in kinds:
        for name, hint in kind.arguments().items():
            found[name] = found.get(name) | hint
    return found


def split_arguments(
    name: str,
    flat: Mapping[str, Any],
    mixer_args: Mapping[str, Any] | None,
    mixers: Mapping[str, type[TokenMixer]] = MIXERS,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the arguments of a model into those of its mixer, without those that are None, and all others.

    Args:
        name: of the mixer.
        flat: arguments of the model.
        mixer_args: further ones of the mixer, which replace those.
        mixers: those of images, or of sequences.

    Raises:
        TypeError: the mixer has no such argument, or mixer_args is not a mapping.
    """
    if mixer_args is not None and not isinstance(mixer_args, Mapping):
        raise TypeError(f'mixer_args must be a mapping of arguments to values, got {mixer_args!r}')
    taken, known = find_mixer(name, mixers).arguments(), mixer_arguments(mixers.values())
    own = {**{each: value for each, value in flat.items() if each in known}, **(mixer_args or {})}
    chosen = {each: value for each, value in own.items() if value is not None}
    strange = sorted(chosen.keys() - taken.keys())
    if strange:
        raise TypeError(f'mixer={name!r} has no {", ".join(strange)}; it takes {", ".join(taken) or "none"}')
    return chosen, {each: value for each, value in flat.items() if each not in known}


def flat_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model with those of `mixer_args` among them."""
    flat = {name: value for name, value in arguments.items() if name != 'mixer_args'}
    return {**flat, **(arguments.get('mixer_args') or {})}


def create_mixer(name: str, dim: int, **kwargs: Any) -> TokenMixer:
    """Build a mixer by name.

    Args:
        name: 'full', 'local', 'simple', 'conv', 'onehot', 'axial', or that of a registered class.
        dim: channels C.
        kwargs: of the mixer.

    Raises:
        ValueError: the name is unknown.
        TypeError: the mixer has no such argument.
    """
    return build_mixer(find_mixer(name), dim, **kwargs)


def build_mixer(kind: type[TokenMixer], dim: int, **kwargs: Any) -> TokenMixer:
    """Build a mixer of a class.

    Raises:
        TypeError: the mixer has no such argument, or needs another.
    """
    label, taken = getattr(kind, 'name', kind.__name__), kind.parameters_of_init()
    lacking = [name for name in kwargs if name in SHARED and name not in taken]
    changed = [name for name in lacking if kwargs[name] != SHARED[name]]
    if changed:
        raise TypeError(f'mixer={label!r} has no {", ".join(changed)}: leave out {changed[0]}={kwargs[changed[0]]!r}')
    return kind(dim, **{name: value for name, value in kwargs.items() if name not in lacking})


def mixers_of(model: nn.Module, kind: type[Mixer]) -> list[Mixer]:
    """Return the mixers of a class in a model, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, kind)]


def token_mixers(model: nn.Module) -> list[TokenMixer]:
    """Return all mixers of a model in the order of its layers, without attention."""
    return mixers_of(model, TokenMixer)


# Its earlier name.
aft_mixers = token_mixers


def undecayed(model: nn.Module, blocks: str = 'blocks.*') -> set[str]:
    """Return patterns of the parameters that the mixers of a model exempt from weight decay."""
    return {f'{blocks}.attn.{name}' for mixer in token_mixers(model) for name in mixer.no_weight_decay()}
