"""Autoregressive models of tokens on the AFT blocks: likelihood, and sessions of decoding (AFT Sec. 5.1, 5.2)."""

import math
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm
from timm.models import checkpoint
from torch import Tensor, nn

from aft_vision.layers.causal import CausalBlock
from aft_vision.models.session import DecoderState, Session, check_given, may_look

Nats = TypeVar('Nats', Tensor, float)


def bits(nats: Nats) -> Nats:
    """Bits from nats: per sub-pixel they are bits per dimension, per byte bits per character."""
    return nats / math.log(2)


class AFTDecoder(nn.Module):
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
        dropout: rate after the embeddings, the mixers and in the MLPs.
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
        if may_look(tokens):
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

    def session(self, batch: int) -> Session:
        """Start to decode a batch of sequences; the model may not change while the session lives.

        Args:
            batch: number of sequences B.

        Raises:
            ValueError: the model is in training mode.
        """
        # AFT's sums are float32 whatever the model's type below it.
        dtype = torch.float64 if self.pos_embed.dtype == torch.float64 else torch.float32
        layers = tuple(block.init_state(batch, dtype, self.device) for block in self.blocks)
        return Session(self, DecoderState(torch.zeros((), dtype=torch.int64, device=self.device), layers))

    def sample(
        self, num_samples: int = 1, length: int | None = None, prompt: Tensor | None = None, **rules: Any
    ) -> Tensor:
        """Draw sequences, each from a prompt.

        Args:
            num_samples: drawings of each prompt; of no prompt without one.
            length: tokens of the result, prompt included; None is the context.
            prompt: (P, n) or (n,) int64, how the sequences begin.
            rules: of `Session.complete`: temperature, top_k, top_p, seed, generator, progress.

        Returns:
            (num_samples, length), or (P * num_samples, length) with those of one prompt next to each other.

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
        """Draw the tokens of sequences that are not given, first to last, in evaluation mode.

        A drawn token sees all before it, drawn or given, and none of the given ones after it.

        Args:
            tokens: (P, T) int64; what stands in open places does not matter.
            given: (P, T) or (T,) bool, True where a token stays.
            num_samples: drawings of each sequence.
            rules: of `Session.complete`: temperature, top_k, top_p, seed, generator, progress.

        Returns:
            (P * num_samples, T), those of one sequence next to each other.

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
        # All drawings of one sequence see the same before the first open place; what follows the last one is not read.
        first, last = int(is_open[0]), int(is_open[-1]) + 1
        was_training = self.training
        self.eval()
        try:
            session = self.session(len(tokens))
            session.prefill(tokens[:, :first])
            session = session.reorder(index) if num_samples > 1 else session
            completed[:, first:last] = session.complete(completed[:, first:last], given[index, first:last], **rules)
        finally:
            self.train(was_training)
        return completed


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
