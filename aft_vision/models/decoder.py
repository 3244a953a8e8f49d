"""Autoregressive models of tokens on AFT blocks: likelihood and decoding sessions (AFT Sec. 5.1, 5.2)."""

import inspect
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm
from timm.models import checkpoint
from torch import Tensor, nn

from aft_vision.layers.base import CAUSAL_MIXERS, TokenMixer, split_arguments, undecayed
from aft_vision.layers.causal import CausalBlock
from aft_vision.models.session import DecoderState, Session, can_check_values, check_given
from aft_vision.modes import in_evaluation

Nats = TypeVar('Nats', Tensor, float)


def bits(nats: Nats) -> Nats:
    """Convert nats to bits: bits per dimension for a sub-pixel, bits per character for a byte."""
    return nats / math.log(2)


class AFTDecoder(nn.Module):
    """A decoder-only model of token sequences: embeddings, pre-norm AFT blocks, final norm, head.

    Args:
        context: T, the maximum number of tokens.
        vocab_size: V.
        dim: channels C.
        depth: number of blocks.
        mixer: 'local', 'simple', 'full' (AFT Eq. 4, 5, 2, causal), 'attention' (dot-product), or the name of a causal
            mixer that `aft_vision.layers.register_mixer` registered.
        mixer_args: arguments of the mixer's class by name. Each is also an argument of the model.
        window: s of 'local': the token and the s - 1 tokens before it have position biases.
        num_heads: heads of 'attention'.
        mlp_ratio: hidden width of the MLP divided by C.
        bias_dim: width d' of the factors of 'local' and 'full' (AFT Eq. 7).
        factorize_bias: False stores the whole (T, T) bias of 'local' and 'full' (Table 3).
        out_proj: False leaves out the output projection of the mixer (Table 3 counts none).
        query_gate: False leaves out AFT's query and its sigmoid.
        qkv_bias: biases on queries, keys and values.
        dropout: rate after the embeddings, the mixers and in the MLPs.
        tie_embedding: True uses the token embedding as the head.
        kwargs: of the mixer.

    Raises:
        TypeError: an argument is unknown, not supported by the mixer, or missing.
        ValueError: a size is out of range, or the mixer is unknown.
    """

    def __init__(
        self,
        context: int,
        vocab_size: int = 256,
        dim: int = 256,
        depth: int = 24,
        mixer: str = 'local',
        mixer_args: Mapping[str, Any] | None = None,
        mlp_ratio: float = 4.0,
        out_proj: bool = True,
        query_gate: bool = True,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        tie_embedding: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        chosen, others = split_arguments(mixer, kwargs, mixer_args, CAUSAL_MIXERS)
        if others:
            own = [*inspect.signature(type(self)).parameters, *inspect.signature(AFTDecoder).parameters]
            taken = dict.fromkeys([*own, *CAUSAL_MIXERS[mixer].arguments()])
            names = ', '.join(name for name in taken if name != 'kwargs')
            raise TypeError(f'{type(self).__name__} has no {", ".join(others)}; it takes {names}')
        super().__init__()
        for name, value in dict(context=context, vocab_size=vocab_size, dim=dim, depth=depth).items():
            if value < 1:
                raise ValueError(f'{name} must be at least 1, got {value}')
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        # Set by `create_decoder`: the kind of tokens, and the arguments that rebuild the model.
        self.task: str | None = None
        self.model_args: dict[str, Any] | None = None
        self.context, self.vocab_size, self.grad_checkpointing = context, vocab_size, False
        self.token_embed = nn.Embedding(vocab_size, dim, **dd)
        self.start_embed = nn.Parameter(torch.empty(dim, **dd))
        self.pos_embed = nn.Parameter(torch.empty(context, dim, **dd))
        self.embed_drop = nn.Dropout(dropout)
        block_args: dict[str, Any] = dict(mlp_ratio=mlp_ratio, proj_drop=dropout, out_proj=out_proj, **chosen)
        if 'num_tokens' in CAUSAL_MIXERS[mixer].parameters_of_init():
            block_args['num_tokens'] = context
        self.blocks: Any = nn.ModuleList(
            CausalBlock(dim, mixer, query_gate=query_gate, qkv_bias=qkv_bias, **block_args, **dd) for _ in range(depth)
        )
        self.norm = LayerNorm(dim, **dd)
        self.head = nn.Linear(dim, vocab_size, bias=False, **dd)
        if tie_embedding:
            self.head.weight = self.token_embed.weight
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise all parameters as GPT-2 does: standard deviation 0.02, less for outputs to the residual stream.

        What a mixer initialises by its own `init_weights` comes last, and stays.
        """
        of_mixers: set[nn.Module] = set()
        for name, module in self.named_modules():
            if isinstance(module, TokenMixer):
                module.reset_parameters()
                self._draw_linear_layers(name, module)
                module.init_weights()
                of_mixers.update(module.modules())
            elif module in of_mixers:
                pass
            elif isinstance(module, nn.Linear):
                self._draw_linear_layers(name, module)
            elif hasattr(module, 'reset_parameters'):
                module.reset_parameters()
        for parameter in (self.token_embed.weight, self.start_embed, self.pos_embed):
            nn.init.normal_(parameter, std=0.02)

    def _draw_linear_layers(self, prefix: str, module: nn.Module) -> None:
        # Of a module, or the module itself.
        for name, layer in module.named_modules(prefix=prefix):
            if isinstance(layer, nn.Linear):
                adds = name.endswith(('attn.proj', 'mlp.fc2'))
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * len(self.blocks)) if adds else 0.02)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.pos_embed.device

    def no_weight_decay(self) -> set[str]:
        """Return all parameters but the weights of linear layers, and of these a tied head and what a mixer names."""
        linear = {id(module.weight) for module in self.modules() if isinstance(module, nn.Linear)}
        linear.discard(id(self.token_embed.weight))
        return {name for name, parameter in self.named_parameters() if id(parameter) not in linear} | undecayed(self)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return parameter groups by depth, as timm's models do."""
        return dict(
            stem=r'^(?:token_embed|start_embed|pos_embed)',
            blocks=r'^blocks\.(\d+)' if coarse else [(r'^blocks\.(\d+)', None), (r'^norm', (99999,))],
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks in the backward pass instead of storing their activations."""
        self.grad_checkpointing = enable

    def check_tokens(self, tokens: Tensor) -> Tensor:
        """Return the tokens, (B, T) or of another shape, if the model supports them.

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
        """Compute logits (B, T, V) of tokens (B, T) int64; the logits at t see only the tokens before t.

        Raises:
            ValueError: tokens are not (B, T) with T from 1 to the context, or, on a CPU, are outside the vocabulary.
        """
        if tokens.ndim != 2 or not 1 <= tokens.shape[1] <= self.context:
            raise ValueError(
                f'tokens must have shape (B, T) with T from 1 to {self.context}, got {tuple(tokens.shape)}'
            )
        if can_check_values(tokens):
            self.check_tokens(tokens)
        x = self.token_embed(tokens[:, :-1])
        x = torch.cat([self.start_embed.expand(tokens.shape[0], 1, -1), x], 1)
        x = self.embed_drop(x + self.pos_embed[: tokens.shape[1]])
        for block in self.blocks:
            x = checkpoint(block, x) if self.grad_checkpointing else block(x)
        return self.head(self.norm(x))

    def nll(self, tokens: Tensor) -> Tensor:
        """Compute the negative log-likelihood of each token given the tokens before it, (B, T) float32, in nats."""
        return F.cross_entropy(self(tokens).float().transpose(1, 2), tokens.long(), reduction='none')

    # A state that is made in inference mode could not be updated outside it.
    @torch.inference_mode(False)
    def session(self, batch: int) -> Session:
        """Start decoding a batch of sequences; the model must not change while the session is in use.

        Args:
            batch: number of sequences B.

        Raises:
            ValueError: the model is in training mode.
        """
        # AFT's sums are at least float32, also in half-precision models.
        dtype = torch.float64 if self.pos_embed.dtype == torch.float64 else torch.float32
        layers = tuple(block.init_state(batch, dtype, self.device) for block in self.blocks)
        return Session(self, DecoderState(torch.zeros((), dtype=torch.int64, device=self.device), layers))

    def sample(
        self, num_samples: int = 1, length: int | None = None, prompt: Tensor | None = None, **rules: Any
    ) -> Tensor:
        """Sample sequences, each from a prompt.

        Args:
            num_samples: samples per prompt, or in total without a prompt.
            length: tokens of the result, including the prompt; None means the context.
            prompt: (P, n) or (n,) int64, the first tokens.
            rules: passed to `Session.complete`: temperature, top_k, top_p, seed, generator, progress.

        Returns:
            (num_samples, length), or (P * num_samples, length) with the samples of one prompt in consecutive rows.

        Raises:
            ValueError: an argument is out of range.
        """
        length = self.context if length is None else length
        if prompt is None:
            prompt = torch.zeros(1, 0, dtype=torch.int64)
        prompt = self.check_tokens(prompt if prompt.ndim == 2 else prompt.unsqueeze(0))
        if not prompt.shape[1] <= length <= self.context or length < 1:
            raise ValueError(
                f'length must be from {max(1, prompt.shape[1])}, the tokens of the prompt, to {self.context}, the '
                f'positions of the model, got {length}'
            )
        tokens = F.pad(prompt, (0, length - prompt.shape[1]))
        return self.complete(tokens, torch.arange(length) < prompt.shape[1], num_samples, **rules)

    @torch.no_grad()
    def complete(self, tokens: Tensor, given: Tensor, num_samples: int = 1, **rules: Any) -> Tensor:
        """Sample the tokens of sequences that are not given, in order and in evaluation mode.

        A sampled token sees all tokens before it, sampled or given, and no given token after it.

        Args:
            tokens: (P, T) int64; values at positions that are not given are ignored.
            given: (P, T) or (T,) bool, True where a token stays.
            num_samples: samples per sequence.
            rules: passed to `Session.complete`: temperature, top_k, top_p, seed, generator, progress.

        Returns:
            (P * num_samples, T), the samples of one sequence in consecutive rows.

        Raises:
            ValueError: an argument is out of range.
        """
        if num_samples < 1:
            raise ValueError(f'num_samples must be at least 1, got {num_samples}')
        check_given(given, tokens)
        given = given.expand(tokens.shape).to(self.device)
        tokens = self.check_tokens(tokens.to(self.device).masked_fill(~given, 0))
        is_open = (~given).any(0).nonzero().flatten()
        index = torch.arange(len(tokens), device=self.device).repeat_interleave(num_samples)
        completed = tokens[index]
        if not len(is_open):
            return completed
        # All samples of a sequence share the tokens before the first open position; tokens after the last one are not
        # read.
        first, last = int(is_open[0]), int(is_open[-1]) + 1
        with in_evaluation(self):
            session = self.session(len(tokens))
            session.prefill(tokens[:, :first])
            session = session.reorder(index) if num_samples > 1 else session
            completed[:, first:last] = session.complete(completed[:, first:last], given[index, first:last], **rules)
        return completed
