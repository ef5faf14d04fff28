"""The pieces of a self-contained HTML page: no script, no request; for screen, phone and paper."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

from matplotlib.figure import Figure

from hf_dpkfc.diagnostics.plots import to_svg


def page(title: str, messages: Sequence[str], body: str) -> str:
    """The whole page; its policy forbids the browser to ask anybody for anything."""
    return _PAGE.format(
        title=html.escape(title), messages=messages_box(messages), body=body, style=_STYLE
    )


def messages_box(messages: Sequence[str]) -> str:
    """What the reader must know first; nothing where there is nothing."""
    if not messages:
        return ""
    items = "".join(f"<li>{html.escape(message)}</li>" for message in dict.fromkeys(messages))
    return f"<aside><strong>Not in this report, or to be known</strong><ul>{items}</ul></aside>"


def image(figure: Figure, description: str) -> str:
    """A figure as a picture of its own, so that no two of them share names."""
    encoded = base64.b64encode(to_svg(figure).encode()).decode()
    source = f"data:image/svg+xml;base64,{encoded}"
    return f'<figure><img src="{source}" alt="{html.escape(description)}"></figure>'


def grid(*images: str) -> str:
    """Figures side by side where there is room."""
    return f'<div class="grid">{"".join(images)}</div>'


def table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """A table that scrolls sideways on its own where it is too wide."""
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    head = f"<thead><tr>{cells}</tr></thead>" if header else ""
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide" tabindex="0"><table>{head}<tbody>{body}</tbody></table></div>'


def paragraph(text: str) -> str:
    """Plain text."""
    return f"<p>{html.escape(text)}</p>"


_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
  margin: 0 auto; max-width: 72rem; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 2px solid #0072B2; }
p { max-width: 44rem; overflow-wrap: anywhere; }
aside { border-left: 4px solid #E69F00; background: #fdf6e7; padding: .6rem 1rem; }
aside ul { margin: .3rem 0 0; padding-left: 1.2rem; }
.grid { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); }
figure { margin: 0; }
img { width: 100%; max-width: 36rem; height: auto; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .4rem; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
.grid td { text-align: left; vertical-align: top; }
footer { margin-top: 2rem; font-size: .85rem; color: #555; }
@media (max-width: 40rem) {
  section > .wide :is(th, td):first-child {
    min-width: 34vw; max-width: 34vw; overflow-wrap: anywhere; }
}
@media print {
  body { font-size: 10pt; max-width: none; padding: 0; }
  figure, aside, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  .grid { grid-template-columns: 1fr 1fr; }
  .wide { overflow: visible; }
  table { font-size: 6.5pt; }
  th, td { padding: .1rem .3rem; }
  td:first-child { overflow-wrap: anywhere; }
}
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{messages}
{body}
<footer>Everything here is computed from probes, from the privacy ledger and from evaluation
records; nothing from training records. Evaluation records aren't covered by the guarantee.</footer>
</body>
</html>
"""
