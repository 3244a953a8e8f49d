"""Drawing tokens from a decoder: which ones may be drawn, and a sampler that can be stopped, saved and resumed."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from aft_vision.models.decoder_state import DecoderState
from aft_vision.models.sampling_run import read_state, write_state

if TYPE_CHECKING:
    from aft_vision.models.autoregressive import AFTDecoder


def filter_logits(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Logits of the distribution that is drawn from: minus infinity for tokens that are left out.

    The rules are applied one after the other, as in `transformers`: temperature, top-k, top-p.

    Args:
        logits: (..., V).
        temperature: divides the logits; 0 leaves the likeliest token alone.
        top_k: keep this many of the likeliest tokens, and those as likely as the last of them.
        top_p: keep the fewest of the likeliest tokens whose probabilities add up to this, in (0, 1].

    Returns:
        (..., V), 0 for the likeliest; float32, or float64 if logits are.

    Raises:
        ValueError: an argument is out of range.
    """
    check_rules(temperature, top_k, top_p)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, float('-inf')).scatter(-1, best, 0.0)
    # The largest less itself, so that no temperature makes infinities of several.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < least, float('-inf'))
    if top_p is not None and top_p < 1:
        ordered, places = logits.sort(stable=True, dim=-1, descending=True)
        chances = ordered.softmax(-1)
        # What lies before a token, so that the one that reaches top_p stays.
        left_out = chances.cumsum(-1) - chances >= top_p
        left_out[..., 0] = False
        logits = logits.masked_fill(torch.zeros_like(left_out).scatter(-1, places, left_out), float('-inf'))
    return logits


def check_rules(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise a ValueError unless the arguments of `filter_logits` are in range."""
    if not 0 <= temperature < float('inf'):
        raise ValueError(f'temperature must be at least 0, got {temperature}')
    if top_k is not None and top_k < 1:
        raise ValueError(f'top_k must be at least 1, got {top_k}')
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f'top_p must be in (0, 1], got {top_p}')


# So many given tokens in a row take less time one by one than at once, where the whole window is read again.
STEPPED_TOKENS = 8
# What the state of a sampler has.
STATE_KEYS = ('weights', 'rules', 'num_samples', 'tokens', 'given', 'position', 'generator', 'logits', 'state')


class Sampler:
    """Fills in the open tokens of sequences, first to last, each drawn given all before it.

    Runs of tokens that are given in every sequence are taken in parallel, all others one at a time. It can be stopped
    between two tokens, saved, and resumed on the same device, with the result of an uninterrupted one.

    Args:
        model: in evaluation mode while it is used.
        tokens: (P, T) int64; what stands in open places does not matter.
        given: (P, T) or (T,) bool, True where a token stays.
        num_samples: drawings of each sequence; those of one stand next to each other in the result.
        temperature, top_k, top_p: as in `filter_logits`.
        generator: of random numbers, on the device of the model; None is torch's own.
        seed: makes a generator; excludes `generator`.

    Attributes:
        tokens: (P * num_samples, T), final up to `position`.
        position: number of tokens that are final.

    Raises:
        ValueError: a shape, a token or an argument is out of range.
    """

    def __init__(
        self,
        model: 'AFTDecoder',
        tokens: Tensor,
        given: Tensor,
        *,
        num_samples: int = 1,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
    ) -> None:
        check_rules(temperature, top_k, top_p)
        if num_samples < 1:
            raise ValueError(f'num_samples must be at least 1, got {num_samples}')
        if generator is not None and seed is not None:
            raise ValueError('expected a generator or a seed, got both')
        device = model.device
        given = _check_given(given, tokens).to(device)
        tokens = model.check_tokens(tokens.to(device).masked_fill(~given, 0))
        self.model, self.num_samples = model, num_samples
        self.rules: dict[str, Any] = {'temperature': temperature, 'top_k': top_k, 'top_p': top_p}
        if seed is not None:
            generator = torch.Generator(device).manual_seed(seed)
        self.generator = generator
        self.given = given.repeat_interleave(num_samples, 0)
        self.tokens = tokens.repeat_interleave(num_samples, 0)
        self.position = 0
        self._open = (~given).any(0).cpu()
        self._state: DecoderState | None = None
        self._logits: Tensor | None = None

    @property
    def is_done(self) -> bool:
        """Whether every token is final."""
        return self.position == self.tokens.shape[1]

    @torch.no_grad()
    def run(
        self,
        count: int | None = None,
        progress: bool = False,
        after_token: Callable[[], bool] | None = None,
    ) -> Tensor:
        """Draw tokens until all are final.

        Args:
            count: stop after this many positions have been drawn.
            progress: show a progress bar with tokens/s over all sequences on standard error.
            after_token: called after each position; a true result stops.

        Returns:
            (P * num_samples, T); after a stop, what is behind `position` is not yet drawn.
        """
        places = self._open.nonzero().flatten().tolist()
        left = [place for place in places if place >= self.position]
        was_training = self.model.training
        self.model.eval()
        batch = len(self.tokens)
        done = (len(places) - len(left)) * batch
        bar = tqdm(total=len(places) * batch, initial=done, unit=' tokens', disable=None if progress else True)
        try:
            with bar:
                for drawn, place in enumerate(left):
                    if drawn == count:
                        return self.tokens
                    self._draw(place)
                    bar.update(batch)
                    if after_token is not None and after_token() and drawn + 1 < len(left):
                        return self.tokens
        finally:
            self.model.train(was_training)
        self.position = self.tokens.shape[1]
        return self.tokens

    def state_dict(self) -> dict[str, Any]:
        """All that `resume` needs, as tensors and plain values, with a fingerprint of the weights."""
        generator = self.generator or _default_generator(self.model.device)
        return {
            'weights': fingerprint(self.model),
            'rules': self.rules,
            'num_samples': self.num_samples,
            'tokens': self.tokens.clone(),
            'given': self.given,
            'position': self.position,
            'generator': generator.get_state(),
            'logits': self._logits,
            'state': None if self._state is None else self._state.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a sampler with the same arguments was stopped.

        Raises:
            ValueError: it had other weights, given tokens or arguments.
        """
        device = self.model.device
        given, tokens = state['given'].to(device), state['tokens'].to(device)
        own = {'weights': fingerprint(self.model), 'rules': self.rules, 'num_samples': self.num_samples}
        for name, value in own.items():
            if state[name] != value:
                raise ValueError(f'expected the state of sampling with {name} {value}, got one with {state[name]}')
        if given.shape != self.given.shape:
            raise ValueError(
                f'expected the state of {tuple(self.given.shape)} tokens, got that of {tuple(given.shape)}'
            )
        if not torch.equal(given, self.given) or not torch.equal(tokens[given], self.tokens[given]):
            raise ValueError('expected the state of sampling with the same given tokens, got that of others')
        self.tokens, self.position = tokens.clone(), state['position']
        generator = self.generator or _default_generator(device)
        generator.set_state(state['generator'].cpu())
        self._logits = None if state['logits'] is None else state['logits'].to(device)
        self._state = None if state['state'] is None else DecoderState.from_dict(state['state'], device)

    def save(self, path: str | Path) -> None:
        """Write `state_dict()` to a file, whole or not at all."""
        write_state(self.state_dict(), path)

    def resume(self, path: str | Path) -> None:
        """Go on where `save` was called.

        Raises:
            ValueError: the file is no such state, or one of other weights, given tokens or arguments.
        """
        self.load_state_dict(read_state(path, STATE_KEYS))

    def _draw(self, place: int) -> None:
        self._feed(place)
        assert self._logits is not None
        chances = filter_logits(self._logits, **self.rules).softmax(-1)
        drawn = torch.multinomial(chances, 1, generator=self.generator).squeeze(1)
        self.tokens[:, place] = torch.where(self.given[:, place], self.tokens[:, place], drawn)
        self.position = place + 1

    def _feed(self, stop: int) -> None:
        # Take the tokens before `stop` into the state.
        if self._state is None:
            # All drawings of one sequence have seen the same so far.
            state = self.model.init_state(len(self.tokens) // self.num_samples)
            logits, state = self.model.prefill(self.tokens[:: self.num_samples, :stop], state)
            index = torch.arange(len(logits), device=logits.device).repeat_interleave(self.num_samples)
            self._logits = logits[index]
            self._state = state.reorder(index) if self.num_samples > 1 else state
            return
        start = int(self._state.position) - 1
        if stop - start > STEPPED_TOKENS:
            self._logits, self._state = self.model.prefill(self.tokens[:, start:stop], self._state)
        else:
            for place in range(start, stop):
                self._logits, self._state = self.model.step(self.tokens[:, place], self._state)


def fingerprint(model: nn.Module) -> str:
    """A hash of the names, types and values of a model's weights."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(f'{name} {value.dtype} {tuple(value.shape)}'.encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _default_generator(device: torch.device) -> torch.Generator:
    return torch.default_generator if device.type == 'cpu' else torch.cuda.default_generators[device.index or 0]


def _check_given(given: Tensor, tokens: Tensor) -> Tensor:
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise ValueError(f'tokens must have shape (P, T), neither of them 0, got {tuple(tokens.shape)}')
    if given.dtype != torch.bool or tuple(given.shape) not in (tuple(tokens.shape), tuple(tokens.shape[1:])):
        raise ValueError(
            f'given must be a bool tensor of shape {tuple(tokens.shape)} or {tuple(tokens.shape[1:])}, True where a '
            f'token stays, got {given.dtype} of shape {tuple(given.shape)}'
        )
    return given.expand(tokens.shape)
