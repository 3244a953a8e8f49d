"""What every decoder draws: sequences, and completions of given ones."""

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_vision.models.sampling import Sampler

if TYPE_CHECKING:
    from aft_vision.models.autoregressive import AFTDecoder


class GenerationMixin:
    """Sampling methods of an `AFTDecoder`, on its `init_state`, `prefill` and `step`."""

    def sample(
        self,
        num_samples: int = 1,
        length: int | None = None,
        prompt: Tensor | None = None,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        progress: bool = False,
    ) -> Tensor:
        """Sequences drawn from the model.

        Args:
            num_samples: drawings, of each prompt if there are some.
            length: tokens of the result, prompt included; None is the context.
            prompt: (P, n) or (n,) int64, how the sequences begin.
            temperature, top_k, top_p: as in `filter_logits`.
            generator: of random numbers, on the device of the model; None is torch's own.
            seed: makes a generator; excludes `generator`.
            progress: show a progress bar with tokens/s on standard error.

        Returns:
            (num_samples, length), or (P * num_samples, length) with those of one prompt next to each other.

        Raises:
            ValueError: an argument is out of range.
        """
        sampler = self.sampler(
            num_samples,
            length,
            prompt,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            generator=generator,
            seed=seed,
        )
        return sampler.run(progress=progress)

    def sampler(
        self,
        num_samples: int = 1,
        length: int | None = None,
        prompt: Tensor | None = None,
        **kwargs: Any,
    ) -> Sampler:
        """What `sample` runs, to be stopped, saved and resumed.

        Args:
            num_samples, length, prompt: as in `sample`.
            kwargs: of `Sampler`.

        Raises:
            ValueError: an argument is out of range.
        """
        model = cast('AFTDecoder', self)
        length = model.context if length is None else length
        if prompt is None:
            prompt = torch.zeros(1, 0, dtype=torch.int64)
        prompt = model.check_tokens(prompt if prompt.ndim == 2 else prompt.unsqueeze(0))
        if not prompt.shape[1] <= length <= model.context or length < 1:
            raise ValueError(
                f'length must be from {max(1, prompt.shape[1])}, the tokens of the prompt, to {model.context}, the '
                f'positions of the model, got {length}'
            )
        tokens = F.pad(prompt, (0, length - prompt.shape[1]))
        return Sampler(model, tokens, torch.arange(length) < prompt.shape[1], num_samples=num_samples, **kwargs)

    def complete(
        self,
        tokens: Tensor,
        mask: Tensor,
        num_samples: int = 1,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        progress: bool = False,
    ) -> Tensor:
        """Sequences with the tokens that are not given drawn from the model, first to last.

        A drawn token sees all before it, drawn or given, and none of the given ones behind it.

        Args:
            tokens: (P, T) int64; what stands where mask is False does not matter.
            mask: (P, T) or (T,) bool, True where a token is given.
            num_samples: drawings of each sequence.
            temperature, top_k, top_p, generator, seed, progress: as in `sample`.

        Returns:
            (P * num_samples, T), those of one sequence next to each other.

        Raises:
            ValueError: an argument is out of range.
        """
        rules: dict[str, Any] = dict(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator, seed=seed)
        return Sampler(cast('AFTDecoder', self), tokens, mask, num_samples=num_samples, **rules).run(progress=progress)
