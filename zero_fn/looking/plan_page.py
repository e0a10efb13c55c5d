"""A plan as one HTML page that needs no network: the table, and a bar of the device's memory for each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from zero_fn.looking.configurations import Configuration

__all__ = ["page_of"]

_COLOURS = {"at rest": "#4878a8", "in flight": "#e0a040", "activations": "#68a868"}
_WIDTH, _HEIGHT, _MOST_BARS = 900, 22, 24

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse } td, th { padding: 2px 8px; text-align: right } tr:nth-child(even) { background: #f4f4f4 }
td:nth-child(-n+3), th:nth-child(-n+3) { text-align: left } svg { max-width: 100%; font-size: 12px }
.key { display: inline-block; width: 1em; height: 1em; margin: 0 4px 0 12px }
"""


def page_of(
    title: str, notes: Sequence[str], rows: Sequence[Sequence[str]], configurations: Sequence[Configuration]
) -> str:
    """The page. `rows`: the table with its header."""
    head, *body = rows
    described = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    lines = [f'<!doctype html><html lang="en">{described}<h1>{escape(title)}</h1>']
    lines += [*(f"<p>{escape(note)}</p>" for note in notes), "<h2>Memory of a device, GB</h2><p>"]
    lines += [f'<span class="key" style="background:{colour}"></span>{kind}' for kind, colour in _COLOURS.items()]
    lines += ["</p>", *_bars(configurations[:_MOST_BARS]), "<h2>Configurations</h2><table>"]
    lines.append("<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>")
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body]
    return "\n".join([*lines, "</table></html>\n"])


def _bars(configurations: Sequence[Configuration]) -> Iterator[str]:
    longest = max(row.nbytes for row in configurations)
    yield f'<svg viewBox="0 0 {_WIDTH + 500} {_HEIGHT * len(configurations)}">'
    for number, row in enumerate(configurations):
        left, top = 0.0, _HEIGHT * number
        parts = row.proposal.nbytes - row.proposal.in_flight, row.proposal.in_flight, row.activations
        for nbytes, (kind, colour) in zip(parts, _COLOURS.items(), strict=True):
            width = _WIDTH * nbytes / longest
            box = f'x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_HEIGHT - 4}"'
            yield f'<rect {box} fill="{colour}"><title>{kind}: {nbytes / 1e9:,.1f} GB</title></rect>'
            left += width
        words = f"{row.proposal.transform}, {row.proposal.away} elsewhere" + (", recomputes" if row.recompute else "")
        fits = "" if row.proposal.fits else ": does not fit"
        yield f'<text x="{left + 6:.1f}" y="{top + 14}">{row.nbytes / 1e9:,.1f}  {escape(words)}{fits}</text>'
    yield "</svg>"
