"""The parts of a self-contained HTML page, without scripts, external style sheets and requests."""

import base64
import struct
from collections.abc import Mapping, Sequence
from html import escape
from string import Template

from aft_vision.visualize.figure import DPI

# Page pixels per inch of a figure; the PNG has a higher resolution.
PIXELS_PER_INCH = 100

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --page: #fff; --text: #1b1f24; --quiet: #57606a; --line: #d0d7de; --panel: #f6f8fa; --link: #0550ae; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171c; --text: #e6e9ee; --quiet: #a3abb5; --line: #3a424c; --panel: #1d2229; --link: #79b8ff; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
header, main { max-width: 1220px; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 1.5rem; }
main { padding-bottom: 3rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 2rem 0 .5rem; overflow-wrap: anywhere; }
p, figcaption { max-width: 75ch; margin: .5rem 0; }
a { color: var(--link); }
nav a { display: block; max-width: 24ch; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; list-style: none; margin: .5rem 0; padding: 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.25rem; margin: .75rem 0; }
dt, figcaption, caption { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1rem 0; }
figcaption { font-size: .9rem; }
.scroll { overflow-x: auto; }
figure .scroll { background: #fff; border: 1px solid var(--line); border-radius: 6px; }
img { display: block; max-width: none; height: auto; }
table { border-collapse: collapse; margin: .75rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-size: .9rem; padding-bottom: .25rem; }
th, td { padding: .2rem .75rem; text-align: right; border-bottom: 1px solid var(--line); }
th { background: var(--panel); font-weight: 600; }
th:first-child { text-align: left; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
</style>
</head>
<body>
<header>
<h1>$title</h1>
<nav aria-label="Sections"><ul>
$links
</ul></nav>
</header>
<main>
$sections
</main>
</body>
</html>
""")


def render_page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """Build a whole page.

    Args:
        title: Plain text.
        sections: Title (plain text) and content (HTML) of each.
    """
    links, parts = [], []
    for number, (name, content) in enumerate(sections, start=1):
        links.append(f'<li><a href="#section-{number}">{escape(name)}</a></li>')
        parts.append(f'<section id="section-{number}">\n<h2>{escape(name)}</h2>\n{content}\n</section>')
    return PAGE.substitute(title=escape(title), links='\n'.join(links), sections='\n'.join(parts))


def paragraph(text: str) -> str:
    """Build a paragraph of text."""
    return f'<p>{escape(text)}</p>'


def picture(png: bytes, alt: str, caption: str = '') -> str:
    """Build an embedded picture of a figure; a wide one scrolls separately.

    Args:
        png: PNG from `figure_png`.
        alt: Description for readers who cannot see it.
        caption: Text below it.
    """
    width, height = (round(side * PIXELS_PER_INCH / DPI) for side in struct.unpack('>II', png[16:24]))
    data = base64.b64encode(png).decode()
    below = f'<figcaption>{escape(caption)}</figcaption>' if caption else ''
    return (
        f'<figure><div class="scroll" tabindex="0" role="region" aria-label="{escape(alt)}">'
        f'<img src="data:image/png;base64,{data}" alt="{escape(alt)}" width="{width}" height="{height}"></div>'
        f'{below}</figure>'
    )


def definitions(facts: Mapping[str, str]) -> str:
    """Build a list of names and values."""
    return '<dl>' + ''.join(f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in facts.items()) + '</dl>'


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Build a table whose first column names the rows."""
    head = ''.join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = ''.join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>\n'
        for row in rows
    )
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption>\n'
        f'<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'
    )
