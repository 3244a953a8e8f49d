"""Messages of errors."""

import textwrap

# The end of an error about an unknown name, which a module of others may register.
IMPORT_HINT = 'import the module that registers it, in a command by --import MODULE_OR_FILE'


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def shorten(text: str, width: int) -> str:
    """Return a text as one line of at most `width` characters, cut between words."""
    return textwrap.shorten(text, width, placeholder=' ...', break_on_hyphens=False)
