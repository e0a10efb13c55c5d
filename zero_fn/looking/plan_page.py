"""A plan as one HTML page that needs no network: the table,
and a bar of the device's memory for each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from zero_fn.planning.configurations import Configuration

__all__ = ["page_of"]

_COLOURS = {"at rest": "#4878a8", "in flight": "#e0a040", "activations": "#68a868"}
_WIDTH, _HEIGHT, _MOST_BARS = 900, 22, 24

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse } td, th { padding: 2px 8px; text-align: right } tr:nth-child(even) { background: #f4f4f4 }
td:nth-child(-n+3), th:nth-child(-n+3) { text-align: left } svg { max-width: 100%; font-size: 12px }
.key { display: inline-block; width: 1em; height: 1em; margin: 0 4px 0 12px }
"""  # noqa: E501


def page_of(
    title: str,
    notes: Sequence[str],
    rows: Sequence[Sequence[str]],
    shown: Sequence[Configuration],
    memory: int,
) -> str:
    """The page.

    `rows`: the table of those that are shown, with its header. `memory`: bytes of a device.
    """
    head, *body = rows
    described = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    lines = [f'<!doctype html><html lang="en">{described}<h1>{escape(title)}</h1>']
    lines += [*(f"<p>{escape(note)}</p>" for note in notes), "<h2>Memory of a device, GB</h2><p>"]
    lines += [
        f'<span class="key" style="background:{colour}"></span>{kind}'
        for kind, colour in _COLOURS.items()
    ]
    lines += ["</p>", *_bars(shown[:_MOST_BARS], memory), "<h2>Configurations</h2><table>"]
    lines.append("<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>")
    lines += [
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body
    ]
    return "\n".join([*lines, "</table></html>\n"])


def _bars(shown: Sequence[Configuration], memory: int) -> Iterator[str]:
    longest, height = max(memory, *(row.nbytes for row in shown)), _HEIGHT * len(shown)
    end = _WIDTH * memory / longest
    yield f'<svg viewBox="0 0 {_WIDTH + 500} {height}">'
    yield (
        f'<line x1="{end:.1f}" x2="{end:.1f}" y1="0" y2="{height}" stroke="#a33" '
        'stroke-dasharray="4"></line>'
    )
    for number, row in enumerate(shown):
        left, top = 0.0, _HEIGHT * number
        parts = (
            row.proposal.nbytes - row.proposal.in_flight,
            row.proposal.in_flight,
            row.activations,
        )
        for nbytes, (kind, colour) in zip(parts, _COLOURS.items(), strict=True):
            width = _WIDTH * nbytes / longest
            box = f'x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_HEIGHT - 4}"'
            yield (
                f'<rect {box} fill="{colour}"><title>{kind}: {nbytes / 1e9:,.1f} GB</title></rect>'
            )
            left += width
        away = "" if row.proposal.away == "nothing" else f"; {row.proposal.away}"
        words = f"{row.mesh_text}: {row.proposal.transform}{away}" + (
            "; recomputes" if row.recompute else ""
        )
        yield (
            f'<text x="{left + 6:.1f}" y="{top + 14}">{row.nbytes / 1e9:,.1f}  '
            f"{escape(words)}</text>"
        )
    yield "</svg>"
