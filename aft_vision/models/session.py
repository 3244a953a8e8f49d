"""Decoding sessions: steps, prompts, sampling and completion with the state of one batch of sequences."""

from collections.abc import Iterable
from operator import index as as_int
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from aft_vision import ops
from aft_vision.layers.causal import compile_decoder

# Up to this many given tokens in a row are faster one by one than in parallel, which rereads the whole window.
STEPPED_TOKENS = 8


class DecoderState(NamedTuple):
    """The state of a decoder after the tokens processed so far; steps update it in place.

    Attributes:
        position: () int64, inputs processed: the start and the tokens.
        layers: the state of each block.
    """

    position: Tensor
    layers: tuple[Any, ...]

    @property
    def batch(self) -> int:
        """Return the number of sequences B."""
        return self.layers[0][0].shape[0]

    # Tensors that are made in inference mode could not be updated outside it.
    @torch.inference_mode(False)
    def reorder(self, index: Tensor) -> 'DecoderState':
        """Return a state with the batch rows selected by index (N,); rows may repeat."""
        return DecoderState(self.position.clone(), tuple(ops.reorder_state(layer, index) for layer in self.layers))

    @torch.inference_mode(False)
    def clone(self) -> 'DecoderState':
        """Return a copy that steps of the original do not change."""
        return DecoderState(self.position.clone(), tuple(ops.clone_state(layer) for layer in self.layers))

    def num_bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(x.nbytes for x in (self.position, *(x for layer in self.layers for x in layer)))


class Session:
    """A decoding session for one batch of sequences, made by `AFTDecoder.session`.

    The session reads the parameters of the blocks and the head once; the embeddings and `prefill` read the live model.
    Nothing is checked per token: do not change the model or move the state while the session is in use.
    In float32 on a CPU, outside autocast, the blocks and the head are compiled to one call per token. Otherwise, and
    for modules with hooks or of other types, the modules are called.

    Args:
        model: an `AFTDecoder` in evaluation mode.
        state: the state to start from; updated in place.
        logits: (B, V) of the next token, for a state that has taken tokens; `sample` and `complete` draw from them.

    Attributes:
        logits: (B, V) of the next token; None before the first step and when no position is left.

    Raises:
        ValueError: the model is in training mode.
    """

    def __init__(self, model: Any, state: DecoderState, logits: Tensor | None = None) -> None:
        if model.training:
            raise ValueError('expected a model in evaluation mode for decoding, got one in training mode (call eval())')
        self.model, self.state, self.logits = model, state, logits
        self._compiled = compile_decoder(model.blocks, model.norm, model.head, state.layers)

    @torch.no_grad()
    def step(self, token: Tensor | None) -> Tensor:
        """Take one token and predict the next.

        Args:
            token: (B,) int64; None only at the start of the sequence, which is checked unless it is compiled.

        Returns:
            logits (B, V) of the next token, without gradients.

        Raises:
            ValueError: the token is not (B,), or None after the start.
            IndexError: on a CPU, the token is outside the vocabulary, or no position is left.
        """
        model, state = self.model, self.state
        # The compiled blocks read as many rows as the state has.
        if token is not None and tuple(token.shape) != (state.batch,):
            raise ValueError(f'token must have shape ({state.batch},) to match the state, got {tuple(token.shape)}')
        if token is None and not torch.compiler.is_compiling() and state.position.item():
            raise ValueError('expected a token after the start of the sequence, got None')
        x = model.start_embed.expand(state.batch, -1) if token is None else model.token_embed(token)
        x = model.embed_drop(x + model.pos_embed.index_select(0, state.position.view(1)))
        if torch.compiler.is_compiling() or self._compiled is None:
            for block, layer in zip(model.blocks, state.layers, strict=True):
                x = block.step(x, layer)
            logits = model.head(model.norm(x))
        else:
            logits = self._compiled(x)
        state.position.add_(1)
        self.logits = logits
        return logits

    @torch.no_grad()
    def prefill(self, tokens: Tensor, all_logits: bool = False) -> Tensor:
        """Take several tokens in parallel, equivalent to as many steps; begin the sequence if it has not begun.

        Args:
            tokens: (B, n) int64; n may be 0 at the start.
            all_logits: return the logits after every token, not only the last.

        Returns:
            logits (B, V) of the next token; with all_logits (B, n, V), or (B, n + 1, V) if the call began the sequence.
            They have no gradients.

        Raises:
            ValueError: tokens are not (B, n), are outside the vocabulary, or are more than the positions left.
        """
        model, state = self.model, self.state
        start = int(state.position)
        inputs = tokens.shape[-1] + (start == 0)
        if tokens.ndim != 2 or len(tokens) != state.batch or inputs == 0:
            n = 'n' if start == 0 else 'n >= 1'
            raise ValueError(f'tokens must have shape ({state.batch}, {n}), got {tuple(tokens.shape)}')
        if start + inputs > model.context:
            raise ValueError(
                f'expected a prompt of at most {max(model.context - max(start, 1), 0)} tokens, which leaves one of the '
                f'{model.context} positions to predict, got {tokens.shape[1]}'
            )
        x = model.token_embed(model.check_tokens(tokens))
        if start == 0:
            x = torch.cat([model.start_embed.expand(len(x), 1, -1), x], 1)
        x = model.embed_drop(x + model.pos_embed[start : start + inputs])
        for block, layer in zip(model.blocks, state.layers, strict=True):
            x = block.prefill(x, layer)
        state.position.add_(inputs)
        logits = model.head(model.norm(x if all_logits else x[:, -1:]))
        self.logits = logits[:, -1]
        return logits if all_logits else self.logits

    def sample(self, count: int, **rules: Any) -> Tensor:
        """Sample the next tokens.

        Args:
            count: number of tokens.
            rules: passed to `complete`.

        Returns:
            (B, count) int64.

        Raises:
            ValueError: an argument is out of range.
        """
        tokens = torch.zeros(self.state.batch, count, dtype=torch.int64, device=self.state.position.device)
        return self.complete(tokens, torch.zeros(count, dtype=torch.bool), **rules)

    @torch.no_grad()
    def complete(
        self,
        tokens: Tensor,
        given: Tensor,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | Iterable[int] | None = None,
        generator: torch.Generator | None = None,
        progress: bool = False,
    ) -> Tensor:
        """Take the next tokens, and sample those that are not given.

        Runs of tokens that are given in every sequence are processed in parallel, all others one at a time.

        Args:
            tokens: (B, n) int64; values at positions that are not given are ignored.
            given: (B, n) or (n,) bool, True where a token stays.
            temperature, top_k, top_p: as in `filter_logits`.
            seed: one seed per sequence, or the seed of the first, from which the others count up.
            generator: random numbers for all sequences instead of seeds; None means torch's default generator.
            progress: show a progress bar with tokens/s over all sequences on standard error.

        Returns:
            (B, n) int64.

        Raises:
            ValueError: a shape, a token or an argument is out of range, or the logits are NaN.
        """
        check_rules(temperature, top_k, top_p)
        batch, count = self._check_open(tokens, given)
        # Noise belongs to a position of the sequence, whatever runs of the batch were processed in parallel.
        start = 0 if seed is None else max(int(self.state.position) - 1, 0)
        noise = uniform_noise(batch, start + count, seed, generator)[:, start:].to(tokens.device)
        given = given.to(tokens.device).expand(tokens.shape)
        tokens = self.model.check_tokens(tokens.masked_fill(~given, 0))
        positions, taken = (~given).any(0).nonzero().flatten().tolist(), 0
        with tqdm(total=len(positions) * batch, unit=' tokens', disable=None if progress else True) as bar:
            for position in positions:
                logits = self._take(tokens[:, taken:position])
                drawn = draw(filter_logits(logits, temperature, top_k, top_p), noise[:, position])
                tokens[:, position] = torch.where(given[:, position], tokens[:, position], drawn)
                taken = position
                bar.update(batch)
        # After the last token of the context there is no position to predict.
        rest = tokens[:, taken : taken + self.model.context - max(int(self.state.position), 1)]
        if rest.shape[1]:
            self._take(rest)
        if taken + rest.shape[1] < count:
            self.state.position.add_(1)
            self.logits = None
        return tokens

    def clone(self) -> 'Session':
        """Return a new session that continues from a copy of the state."""
        return Session(self.model, self.state.clone(), None if self.logits is None else self.logits.clone())

    def reorder(self, index: Tensor) -> 'Session':
        """Return a new session with the sequences selected by index (N,), which may repeat, as in beam search."""
        return Session(self.model, self.state.reorder(index), None if self.logits is None else self.logits[index])

    def _take(self, tokens: Tensor) -> Tensor:
        # Process tokens (B, n), n may be 0, and return the logits after them.
        if int(self.state.position) == 0 or tokens.shape[1] > STEPPED_TOKENS:
            return self.prefill(tokens)
        for position in range(tokens.shape[1]):
            self.step(tokens[:, position])
        assert self.logits is not None
        return self.logits

    def _check_open(self, tokens: Tensor, given: Tensor) -> tuple[int, int]:
        # Check the shape and number of the next tokens.
        check_given(given, tokens)
        batch, count = tokens.shape
        if batch != self.state.batch:
            raise ValueError(f'tokens must have shape ({self.state.batch}, n), got {tuple(tokens.shape)}')
        position = int(self.state.position)
        left = self.model.context - max(position - 1, 0)
        if count > left:
            raise ValueError(f'expected at most {left} tokens, the positions that are left, got {count}')
        if position and self.logits is None:
            raise ValueError(
                'expected the logits of the next token, got a session on a used state without them: take '
                'session.clone() in place of Session(model, state), or step first'
            )
        return batch, count


def can_check_values(x: Tensor) -> bool:
    """Return whether values can be checked cheaply: an accelerator would synchronise, and a graph cannot."""
    return x.device.type == 'cpu' and not torch.compiler.is_compiling()


def uniform_noise(
    batch: int, count: int, seed: int | Iterable[int] | None, generator: torch.Generator | None
) -> Tensor:
    """Return uniform noise in [0, 1) for each token, (B, n) float64; a sequence's noise depends only on its seed."""
    if seed is None:
        device = None if generator is None else generator.device
        return torch.rand(batch, count, dtype=torch.float64, generator=generator, device=device)
    if generator is not None:
        raise ValueError('expected a generator or a seed, got both')
    # Integers of numpy are as good as Python's.
    seeds = [as_int(each) for each in (seed if isinstance(seed, Iterable) else range(seed, seed + batch))]
    if len(seeds) != batch:
        raise ValueError(f'expected a seed for each of {batch} sequences, got {len(seeds)}')
    generators = [torch.Generator().manual_seed(each) for each in seeds]
    return torch.stack([torch.rand(count, dtype=torch.float64, generator=each) for each in generators])


def draw(logits: Tensor, noise: Tensor) -> Tensor:
    """Return tokens (B,) by inverting the cumulative distribution of logits (B, V) at noise (B,)."""
    sums = logits.double().softmax(-1).cumsum(-1)
    if can_check_values(sums) and not bool(sums[:, -1].isfinite().all()):
        raise ValueError('expected logits that are numbers, got NaN (are the weights finite?)')
    return torch.searchsorted(sums, (noise * sums[:, -1]).unsqueeze(1), right=True).squeeze(1)


def check_given(given: Tensor, tokens: Tensor) -> None:
    """Raise a ValueError unless tokens are (P, T) and given is a mask of them."""
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise ValueError(f'tokens must have shape (P, T), neither of them 0, got {tuple(tokens.shape)}')
    if given.dtype != torch.bool or tuple(given.shape) not in (tuple(tokens.shape), tuple(tokens.shape[1:])):
        raise ValueError(
            f'given must be a bool tensor of shape {tuple(tokens.shape)} or {tuple(tokens.shape[1:])}, True where a '
            f'token stays, got {given.dtype} of shape {tuple(given.shape)}'
        )


def filter_logits(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Return the logits of the sampling distribution, minus infinity for excluded tokens.

    The rules apply in the order of `transformers`: temperature, top-k, top-p. They must be what `check_rules` accepts,
    which is called once, where sampling begins.

    Args:
        logits: (..., V).
        temperature: divides the logits; 0 keeps only the most likely token.
        top_k: keep this many of the most likely tokens, and any ties with the last of them.
        top_p: keep the smallest set of most likely tokens with this total probability, in (0, 1].

    Returns:
        (..., V), 0 for the most likely token; float32, or float64 if logits are.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    # A smaller one may be 0 in the type of the logits.
    if temperature < torch.finfo(logits.dtype).tiny:
        best = logits.argmax(-1, keepdim=True)
        greedy = torch.full_like(logits, float('-inf')).scatter(-1, best, 0.0)
        # As with any other temperature.
        return greedy.masked_fill(logits.isnan().any(-1, keepdim=True), float('nan'))
    # Shift the maximum to 0, so that a small temperature cannot overflow several logits.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < least, float('-inf'))
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(stable=True, dim=-1, descending=True)
        chances = ordered.softmax(-1)
        # The total before each token, so that the token that reaches top_p is kept.
        left_out = chances.cumsum(-1) - chances >= top_p
        left_out[..., 0] = False
        logits = logits.masked_fill(torch.zeros_like(left_out).scatter(-1, order, left_out), float('-inf'))
    return logits


def check_rules(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise a ValueError unless the arguments of `filter_logits` are in range."""
    if not 0 <= temperature < float('inf'):
        raise ValueError(f'temperature must be at least 0, got {temperature}')
    if top_k is not None and top_k < 1:
        raise ValueError(f'top_k must be at least 1, got {top_k}')
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f'top_p must be in (0, 1], got {top_p}')
