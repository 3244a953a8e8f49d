"""Drawing tokens from a decoder: which ones may be drawn, and a sampler that can be stopped, saved and resumed."""

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from aft_vision.models.decoder_state import DecoderState

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
        bar = tqdm(total=len(places) * batch, initial=done, unit=' tokens', disable=not progress)
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
        _write(self.state_dict(), path)

    def resume(self, path: str | Path) -> None:
        """Go on where `save` was called.

        Raises:
            ValueError: the file is no such state, or one of other weights, given tokens or arguments.
        """
        self.load_state_dict(_read(path, STATE_KEYS))

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
        if stop - start == 1:
            self._logits, self._state = self.model.step(self.tokens[:, start], self._state)
        elif stop > start:
            self._logits, self._state = self.model.prefill(self.tokens[:, start:stop], self._state)


def run_batches(
    samplers: Sequence[Callable[[], Sampler]],
    state_file: str | Path | None = None,
    about: Mapping[str, Any] | None = None,
    *,
    progress: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    save_every_s: float = 60.0,
) -> list[Tensor] | None:
    """Run samplers one after the other, resuming from a file, where it exists, what was interrupted.

    Args:
        samplers: each makes one, with random numbers of its own; made when its turn comes.
        state_file: what is finished and the state of the present sampler, written when stopped and while running.
        about: plain values that decide the result, kept in the file and compared with those in it.
        progress: show a progress bar for each.
        should_stop: asked after each position.
        save_every_s: seconds between two writes while running.

    Returns:
        The tokens of each, or None if stopped. The file stays: whoever has used the result may remove it.

    Raises:
        ValueError: the file is not of these samplers.
    """
    about = {'count': len(samplers), **(about or {})}
    finished, present = _read_run(state_file, about)
    saved_at = time.monotonic()

    def save(sampler: Sampler | None) -> None:
        if state_file is not None:
            state = None if sampler is None else sampler.state_dict()
            _write({'about': about, 'finished': finished, 'present': state}, state_file)

    for create in samplers[len(finished) :]:
        sampler = create()
        if present is not None:
            sampler.load_state_dict(present)
            present = None

        def after_token(sampler: Sampler = sampler) -> bool:
            nonlocal saved_at
            if time.monotonic() - saved_at > save_every_s:
                save(sampler)
                saved_at = time.monotonic()
            return should_stop()

        sampler.run(progress=progress, after_token=after_token)
        if not sampler.is_done:
            save(sampler)
            return None
        finished.append(sampler.tokens.cpu())
        save(None)
    return finished


def _read_run(state_file: str | Path | None, about: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Any] | None]:
    # What is finished, and the state of the sampler that was stopped.
    if state_file is None or not Path(state_file).exists():
        return [], None
    data = _read(state_file, ('about', 'finished', 'present'))
    for name in sorted(about.keys() | data['about'].keys()):
        expected, found = about.get(name), data['about'].get(name)
        if found != expected:
            raise ValueError(f'expected the state of a run with {name} {expected} in {state_file}, got {found}')
    return data['finished'], data['present']


def _write(data: dict[str, Any], path: str | Path) -> None:
    # Whole or not at all.
    path = Path(path)
    part = path.with_name(path.name + '.part')
    torch.save(data, part)
    os.replace(part, path)


def _read(path: str | Path, keys: Sequence[str]) -> dict[str, Any]:
    try:
        data = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:
        raise ValueError(f'expected the state of sampling in {path}, got a file that cannot be read') from error
    missing = sorted(set(keys) - set(data if isinstance(data, dict) else ()))
    if missing:
        raise ValueError(f'expected the state of sampling in {path}, got a file without {", ".join(missing)}')
    return data


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
