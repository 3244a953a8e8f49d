"""Errors as one line, and the error of a lost device."""

import textwrap

import torch


class _LostDeviceError(RuntimeError):
    pass


# torch before 2.8 raises a plain RuntimeError, which may be any other error too.
AcceleratorError: type[RuntimeError] = getattr(torch, 'AcceleratorError', _LostDeviceError)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def shorten(text: str, width: int) -> str:
    """Return a text as one line of at most `width` characters, cut between words."""
    return textwrap.shorten(text, width, placeholder=' ...', break_on_hyphens=False)
