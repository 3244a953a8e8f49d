"""What was measured side by side as columns of text."""

from collections.abc import Sequence
from typing import Any


def format_comparison(rows: Sequence[dict[str, Any]], indent: str = '') -> str:
    """The rows as text: the eager columns, and the compiled ones where there are any."""
    compiled = any(row['compiled'] for row in rows)
    width = max(len(row['name']) for row in rows)
    rated = any('images_per_second' in row['eager'] for row in rows)
    keeps = any('saved_bytes' in row['eager'] for row in rows)
    columns = f'{"ms":>9} {"ratio":>6} {"quartiles":>13} {"peak MiB":>8}'
    head = f'{indent}{"":8} {"":{width}} {columns}' + f' {"kept MiB":>8}' * keeps + f' {"images/s":>8}' * rated
    lines = [head + (f' | compiled {columns} {"compile s":>9}' if compiled else '')]
    for row in rows:
        if 'error' in row['eager']:
            lines.append(f'{indent}{row["direction"]:8} {row["name"]:{width}} failed: {row["eager"]["error"][:100]}')
            continue
        saved = row['eager'].get('saved_bytes')
        kept = '' if saved is None else f'{saved / 2**20:8.1f}'
        line = f'{indent}{row["direction"]:8} {row["name"]:{width}} {format_times(row["eager"])}'
        line += f' {kept:>8}' if keeps else ''
        line += f' {row["eager"]["images_per_second"]:8.1f}' if rated else ''
        if compiled:
            line += f' |          {format_compiled(row["compiled"])}'
        lines.append(line.rstrip())
    return '\n'.join(lines)


def format_times(figures: dict[str, Any]) -> str:
    """What `time_calls` gives, as columns."""
    ratio, quartiles = '-', '-'
    if figures['ratio'] is not None:
        low, high = figures['ratio_quartiles']
        ratio, quartiles = f'{figures["ratio"]:.2f}', f'{low:.2f} - {high:.2f}'
    return f'{figures["milliseconds"]:9.2f} {ratio:>6} {quartiles:>13} {figures["peak_bytes"] / 2**20:8.1f}'


def format_compiled(figures: dict[str, Any] | None) -> str:
    """What `time_compiled` gives, as columns, or why there is nothing."""
    if figures is None:
        return f'{"-":>9}'
    if 'error' in figures:
        return f'failed: {figures["error"][:100]}'
    return f'{format_times(figures)} {figures["compile_seconds"]:9.1f}'
