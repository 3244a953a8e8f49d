"""Autoregressive models of tokens on the AFT blocks: likelihood, decoding, sampling (AFT Sec. 5.1, 5.2)."""

import math
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm
from timm.models import checkpoint
from torch import Tensor, nn

from aft_vision.layers.causal import CausalBlock
from aft_vision.models.decoder_state import DecoderState
from aft_vision.models.generation import GenerationMixin

Nats = TypeVar('Nats', Tensor, float)


def bits(nats: Nats) -> Nats:
    """Bits from nats: per sub-pixel they are bits per dimension, per byte bits per character."""
    return nats / math.log(2)


class AFTDecoder(GenerationMixin, nn.Module):
    """A decoder-only model of token sequences: embeddings, pre-norm AFT blocks, final norm, head.

    Args:
        context: T, tokens of the longest sequence.
        vocab_size: V.
        dim: channels C.
        depth: number of blocks.
        mixer: 'local', 'simple', 'full' (AFT Eq. 4, 5, 2, causal), or 'attention' (dot-product).
        window: s of 'local': the token itself and s - 1 before it have position biases.
        num_heads: of 'attention'.
        mlp_ratio: hidden width of the MLP over C.
        bias_dim: width d' of the factors of 'local' and 'full' (AFT Eq. 7).
        factorize_bias: False stores the whole (T, T) bias of 'local' and 'full' (Table 3).
        out_proj: False leaves out the projection behind the mixer (Table 3 counts none).
        query_gate: False leaves out AFT's query and its sigmoid.
        qkv_bias: biases on queries, keys and values.
        dropout: rate behind the embeddings, the mixers and in the MLPs.
        tie_embedding: True takes the token embedding as the head.

    Raises:
        ValueError: a size is out of range, the mixer is unknown, or it has no such argument.
    """

    def __init__(
        self,
        context: int,
        vocab_size: int = 256,
        dim: int = 256,
        depth: int = 24,
        mixer: str = 'local',
        window: int | None = None,
        num_heads: int | None = None,
        mlp_ratio: float = 4.0,
        bias_dim: int | None = None,
        factorize_bias: bool | None = None,
        out_proj: bool = True,
        query_gate: bool = True,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        tie_embedding: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in dict(context=context, vocab_size=vocab_size, dim=dim, depth=depth).items():
            if value < 1:
                raise ValueError(f'{name} must be at least 1, got {value}')
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        # Set by `create_decoder`: what the tokens are, and what makes the model again.
        self.task: str | None = None
        self.model_args: dict[str, Any] | None = None
        self.context, self.vocab_size, self.grad_checkpointing = context, vocab_size, False
        self.token_embed = nn.Embedding(vocab_size, dim, **dd)
        self.start_embed = nn.Parameter(torch.empty(dim, **dd))
        self.pos_embed = nn.Parameter(torch.empty(context, dim, **dd))
        self.embed_drop = nn.Dropout(dropout)
        mixer_args = _mixer_arguments(
            mixer, context, window=window, num_heads=num_heads, bias_dim=bias_dim, factorize_bias=factorize_bias
        )
        block_args: dict[str, Any] = dict(mlp_ratio=mlp_ratio, proj_drop=dropout, out_proj=out_proj, **mixer_args)
        self.blocks: Any = nn.ModuleList(
            CausalBlock(dim, mixer, query_gate=query_gate, qkv_bias=qkv_bias, **block_args, **dd) for _ in range(depth)
        )
        self.norm = LayerNorm(dim, **dd)
        self.head = nn.Linear(dim, vocab_size, bias=False, **dd)
        if tie_embedding:
            self.head.weight = self.token_embed.weight
        self.init_weights()

    def init_weights(self) -> None:
        """Draw all parameters anew, as GPT-2 does: deviation 0.02, less on what adds to the residual stream."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                adds = name.endswith(('attn.proj', 'mlp.fc2'))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * len(self.blocks)) if adds else 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif hasattr(module, 'reset_parameters'):
                module.reset_parameters()
        for parameter in (self.token_embed.weight, self.start_embed, self.pos_embed):
            nn.init.normal_(parameter, std=0.02)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.pos_embed.device

    def no_weight_decay(self) -> set[str]:
        """Names of all parameters but the weights of linear layers; a head that is the embedding does not decay."""
        linear = {id(module.weight) for module in self.modules() if isinstance(module, nn.Linear)}
        linear.discard(id(self.token_embed.weight))
        return {name for name, parameter in self.named_parameters() if id(parameter) not in linear}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameter groups by depth, as timm's models have them."""
        return dict(
            stem=r'^(?:token_embed|start_embed|pos_embed)',
            blocks=r'^blocks\.(\d+)' if coarse else [(r'^blocks\.(\d+)', None), (r'^norm', (99999,))],
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute the blocks again in the backward instead of keeping what they need."""
        self.grad_checkpointing = enable

    def check_tokens(self, tokens: Tensor) -> Tensor:
        """The tokens, (B, T) or of another shape, if the model can take them.

        Raises:
            ValueError: they are not integers, are too many for the position table, or are outside the vocabulary.
        """
        if tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f'tokens must be int64, got {tokens.dtype}')
        if tokens.ndim == 2 and tokens.shape[1] > self.context:
            raise ValueError(
                f'expected at most {self.context} tokens, the positions of the model, got {tokens.shape[1]}'
            )
        if tokens.numel():
            low, high = (int(x) for x in tokens.aminmax())
            if low < 0 or high >= self.vocab_size:
                raise ValueError(f'tokens must be from 0 to {self.vocab_size - 1}, got {low if low < 0 else high}')
        return tokens

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of tokens (B, T) int64: those at t see the tokens before t alone.

        Raises:
            ValueError: tokens are not (B, T) with T from 1 to the context, or, on a CPU, are outside the vocabulary.
        """
        if tokens.ndim != 2 or not 1 <= tokens.shape[1] <= self.context:
            raise ValueError(
                f'tokens must have shape (B, T) with T from 1 to {self.context}, got {tuple(tokens.shape)}'
            )
        if _may_look(tokens):
            self.check_tokens(tokens)
        x = self.token_embed(tokens[:, :-1])
        x = torch.cat([self.start_embed.expand(tokens.shape[0], 1, -1), x], 1)
        x = self.embed_drop(x + self.pos_embed[: tokens.shape[1]])
        for block in self.blocks:
            x = checkpoint(block, x) if self.grad_checkpointing else block(x)
        return self.head(self.norm(x))

    def nll(self, tokens: Tensor) -> Tensor:
        """Negative log-likelihood of each token given those before it, (B, T) float32, in nats."""
        return F.cross_entropy(self(tokens).float().transpose(1, 2), tokens.long(), reduction='none')

    def init_state(
        self, batch: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> DecoderState:
        """The state before the first token, of constant size whatever comes; steps update it in place.

        Args:
            batch: number of sequences B.
            dtype: of AFT's sums, float32 or float64; None is float64 for a float64 model, else float32.
            device: None is that of the model.
        """
        place = self.device if device is None else torch.device(device)
        if dtype is None:
            dtype = torch.float64 if self.pos_embed.dtype == torch.float64 else torch.float32
        layers = tuple(block.init_state(batch, dtype, place) for block in self.blocks)
        return DecoderState(torch.zeros((), dtype=torch.int64, device=place), layers)

    @torch.no_grad()
    def step(self, token: Tensor | None, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Take one token and predict the next.

        Args:
            token: (B,) int64; None at the start of the sequence, and there alone.
            state: of what came before; updated in place.

        Returns:
            logits (B, V) of the next token, and the state. Nothing is differentiated.

        Raises:
            ValueError: on a CPU, the token is outside the vocabulary, or there is no position left.
        """
        if _may_look(state.position):
            self._check_step(token, state)
        x = self.start_embed.expand(_batch(state), -1) if token is None else self.token_embed(token)
        x = self.embed_drop(x + self.pos_embed.index_select(0, state.position.view(1)))
        layers = []
        for block, layer in zip(self.blocks, state.layers, strict=True):
            x, layer = block.step(x, layer)
            layers.append(layer)
        state.position.add_(1)
        return self.head(self.norm(x)), DecoderState(state.position, tuple(layers))

    @torch.no_grad()
    def prefill(self, tokens: Tensor, state: DecoderState, all_logits: bool = False) -> tuple[Tensor, DecoderState]:
        """Take several tokens at once, as many steps would, the start of the sequence first if it has not been taken.

        Args:
            tokens: (B, n) int64; n may be 0 at the start.
            state: of what came before; updated in place.
            all_logits: also return the logits before the last.

        Returns:
            logits (B, V) of the token after these, and the state; with all_logits (B, n, V), one more if the start was
            taken. Nothing is differentiated.

        Raises:
            ValueError: tokens are not (B, n), are outside the vocabulary, or there are too few positions left.
        """
        start = int(state.position)
        inputs = tokens.shape[-1] + (start == 0)
        if tokens.ndim != 2 or len(tokens) != _batch(state) or inputs == 0:
            raise ValueError(f'tokens must have shape ({_batch(state)}, n), got {tuple(tokens.shape)}')
        if start + inputs > self.context:
            raise ValueError(
                f'expected a prompt of at most {self.context - max(start, 1)} tokens, which leaves one of the '
                f'{self.context} positions to predict, got {tokens.shape[1]}'
            )
        x = self.token_embed(self.check_tokens(tokens))
        if start == 0:
            x = torch.cat([self.start_embed.expand(len(x), 1, -1), x], 1)
        x = self.embed_drop(x + self.pos_embed[start : start + inputs])
        layers = []
        for block, layer in zip(self.blocks, state.layers, strict=True):
            x, layer = block.prefill(x, layer)
            layers.append(layer)
        state.position.add_(inputs)
        x = self.norm(x if all_logits else x[:, -1])
        return self.head(x), DecoderState(state.position, tuple(layers))

    def _check_step(self, token: Tensor | None, state: DecoderState) -> None:
        position = int(state.position)
        if position >= self.context:
            raise ValueError(f'expected at most {self.context} steps, the positions of the model, got one more')
        if (token is None) != (position == 0):
            raise ValueError(
                f'token must be None in the first step and there alone, got {token} in step {position + 1}'
            )
        if token is None:
            return
        if tuple(token.shape) != (_batch(state),):
            raise ValueError(f'token must have shape ({_batch(state)},) to match the state, got {tuple(token.shape)}')
        self.check_tokens(token)


def _may_look(x: Tensor) -> bool:
    # Whether values can be checked at no cost: on an accelerator it would synchronise, in a graph it cannot be.
    return x.device.type == 'cpu' and not torch.compiler.is_compiling()


def _batch(state: DecoderState) -> int:
    return state.layers[0][0].shape[0]


def _mixer_arguments(mixer: str, context: int, **chosen: Any) -> dict[str, Any]:
    taken = {
        'local': ('window', 'bias_dim', 'factorize_bias'),
        'full': ('bias_dim', 'factorize_bias'),
        'simple': (),
        'attention': ('num_heads',),
    }
    if mixer not in taken:
        raise ValueError(f'mixer must be one of {", ".join(taken)}, got {mixer!r}')
    given = {name: value for name, value in chosen.items() if value is not None}
    strange = sorted(given.keys() - set(taken[mixer]))
    if strange:
        raise ValueError(f'mixer={mixer!r} has no {", ".join(strange)}; it takes {", ".join(taken[mixer]) or "none"}')
    for name in ('window', 'num_heads'):
        if name in taken[mixer] and name not in given:
            raise ValueError(f'mixer={mixer!r} needs {name}')
    if 'window' in given:
        given['window_size'] = given.pop('window')
    return given if mixer == 'simple' else {'num_tokens': context, **given}
