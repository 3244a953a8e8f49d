"""Messages of errors as one line."""

import textwrap


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def shorten(text: str, width: int) -> str:
    """Return a text as one line of at most `width` characters, cut between words."""
    return textwrap.shorten(text, width, placeholder=' ...', break_on_hyphens=False)
