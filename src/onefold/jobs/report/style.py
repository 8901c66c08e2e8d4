"""How the pages look, in light and in dark, on a telephone and on a wide screen."""

from __future__ import annotations

__all__ = ["COLOURS", "SHADES", "STYLE"]

COLOURS = 7
"""Number of colours for lines and bars; the style names them ``--c0``, ``--c1`` and so on."""

SHADES = 10
"""Number of shades of a cell that counts what is right (``r1`` and so on) or wrong (``w1``)."""

_DARKEST = 0.55
"""Opacity of the last shade, on which text is still read with ease."""


def _opacity(shade: int) -> float:
    return shade / SHADES * _DARKEST


def _shades() -> str:
    """One rule for each shade."""
    return "".join(
        f".{word[0]}{shade} {{ background: rgba(var(--{word}-shade), {_opacity(shade):.3f}); }}"
        for word in ("right", "wrong")
        for shade in range(1, SHADES + 1)
    )


_RULES = """
:root {
  color-scheme: light dark;
  --paper: #f6f7f9; --card: #ffffff; --ink: #1d232b; --faint: #5b6673; --rule: #dbe0e6;
  --right: #146c43; --wrong: #a8321f; --link: #1a5fb4;
  --right-shade: 37, 120, 190; --wrong-shade: 214, 104, 30;
  --c0: #2166b0; --c1: #c8590c; --c2: #1d7f56; --c3: #8a4bb0; --c4: #b5304f; --c5: #7d6608;
  --c6: #66707c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --card: #1d2127; --ink: #e6e9ed; --faint: #a2acb8; --rule: #363d47;
    --right: #6ccf9b; --wrong: #ff9b85; --link: #8dbdf5;
    --c0: #73b1f0; --c1: #f2a065; --c2: #5fc796; --c3: #c79be6; --c4: #f08aa3; --c5: #d3bb56;
    --c6: #a3adb8;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 1320px; margin: 0 auto; padding: 24px 20px 64px; }
h1 { margin: 0; font-size: 1.9rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 44px 0 12px; font-size: 1.3rem; line-height: 1.3; }
h3 { margin: 24px 0 8px; font-size: 1.05rem; }
p { margin: 6px 0 12px; max-width: 75ch; overflow-wrap: anywhere; }
a { color: var(--link); }
.sub, .note, caption, dt, figcaption small { color: var(--faint); }
.note { font-size: 0.92rem; }
code { font-family: ui-monospace, "SF Mono", Consolas, monospace; font-size: 0.92em; }
dl, dd, figure, ul { margin: 0; padding: 0; }
.card, .charts figure, .figures > div, .sample, .row {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
}
.card { padding: 16px; }
.figures {
  display: grid; gap: 12px; margin: 20px 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 165px), 1fr));
}
.figures > div { padding: 12px 16px; }
.figures dd { font-size: 1.5rem; font-weight: 600; line-height: 1.3; overflow-wrap: anywhere; }
.figures small { display: block; font-size: 0.85rem; font-weight: 400; color: var(--faint); }
.facts {
  display: grid; gap: 8px 28px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 260px), 1fr));
}
.facts dd { overflow-wrap: anywhere; }
dt { font-size: 0.85rem; }
.charts {
  display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 390px), 1fr));
}
.charts figure { padding: 14px 14px 12px; min-width: 0; }
.charts figcaption { font-weight: 600; margin-bottom: 6px; overflow-wrap: anywhere; }
.chart { display: block; width: 100%; height: auto; color: var(--ink); }
.chart * { stroke-linejoin: round; stroke-linecap: butt; }
.legend {
  display: flex; flex-wrap: wrap; gap: 2px 18px; list-style: none; margin-top: 6px;
  font-size: 0.88rem;
}
.legend li { overflow-wrap: anywhere; }
.legend svg { width: 30px; height: 10px; margin-right: 6px; vertical-align: middle; }
.scroll { overflow: auto; max-width: 100%; max-height: 78vh; }
.scroll:focus-visible, summary:focus-visible { outline: 2px solid var(--link); }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: 0 0 8px; }
th, td {
  padding: 5px 12px 5px 0; border-bottom: 1px solid var(--rule); text-align: left;
  vertical-align: top;
}
th { font-weight: 600; }
th.number, td.number { text-align: right; white-space: nowrap; padding: 5px 0 5px 14px; }
table:not(.confusion) :is(th, td):not(.number) { overflow-wrap: anywhere; min-width: 12.5ch; }
.bars { display: grid; gap: 10px; margin: 4px 0 10px; }
.bars ~ .scroll { margin-top: 20px; }
.bar { display: flex; height: 28px; border-radius: 6px; overflow: hidden; }
.bar span {
  min-width: 0; overflow: hidden; text-align: center; font-size: 0.8rem; line-height: 28px;
  color: var(--card); white-space: nowrap; border-right: 1px solid var(--card);
}
.bar span:last-child { border-right: 0; }
.samples {
  display: grid; gap: 12px;
  grid-template-columns: repeat(auto-fill, minmax(min(46%, 150px), 1fr));
}
.sentences, .rows { display: grid; gap: 12px; }
.sentences {
  align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr));
}
.rows { grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); }
.sample { padding: 10px; border-top-width: 4px; font-size: 0.9rem; min-width: 0; }
.sample.right { border-top-color: var(--right); }
.sample.wrong { border-top: 4px dashed var(--wrong); }
.sample img, .row img {
  display: block; width: 100%; height: auto; border-radius: 4px; background: var(--paper);
}
.sample img { aspect-ratio: 1; object-fit: contain; margin-bottom: 6px; }
.few-pixels { image-rendering: pixelated; }
.missing {
  display: grid; place-items: center; aspect-ratio: 1; border: 1px dashed var(--rule);
  border-radius: 4px; color: var(--faint); font-size: 0.85rem; text-align: center;
  margin-bottom: 6px;
}
.sample div, .sample small { overflow-wrap: anywhere; }
.sample small { display: block; color: var(--faint); font-size: 0.8rem; }
.verdict { font-weight: 600; }
.right > .verdict { color: var(--right); }
.wrong > .verdict { color: var(--wrong); }
blockquote { margin: 0 0 6px; white-space: pre-wrap; overflow-wrap: anywhere; }
.row { padding: 10px; font-size: 0.9rem; min-width: 0; }
.triple { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 8px; }
.triple div { text-align: center; color: var(--faint); font-size: 0.82rem; }
.row figcaption { margin-top: 6px; overflow-wrap: anywhere; }
.confusion { border-collapse: separate; border-spacing: 0; }
.confusion th, .confusion td {
  border: 0; padding: 6px 10px; text-align: center; white-space: nowrap; vertical-align: middle;
}
.confusion th { background: var(--card); position: sticky; font-weight: 500; }
.confusion thead th { top: 0; z-index: 1; vertical-align: bottom; }
.confusion tbody th, .confusion thead th:first-child { left: 0; text-align: right; }
.confusion thead th:first-child { z-index: 2; }
.confusion th span {
  display: inline-block; max-width: 14em; max-height: 14em; overflow: hidden;
  text-overflow: ellipsis; vertical-align: middle;
}
.confusion td small { display: block; color: inherit; }
.many.confusion { font-size: 0.78rem; }
.many.confusion td, .many.confusion tbody th { padding: 1px 4px; }
.many.confusion thead th:not(:first-child) { padding: 4px 1px; }
.many.confusion thead th:not(:first-child) span {
  writing-mode: vertical-rl; transform: rotate(180deg);
}
.many.confusion th span { max-width: 9em; max-height: 11em; }
details { margin: 12px 0; }
summary { cursor: pointer; font-weight: 600; }
details > .scroll, details > ul { margin-top: 10px; }
.left-out { list-style: none; font-size: 0.92rem; overflow-wrap: anywhere; }
@media (max-width: 500px) {
  main { padding: 16px 12px 48px; }
  .card { padding: 12px; }
}
@media print { .scroll { max-height: none; } }
"""

STYLE = _RULES + _shades()
