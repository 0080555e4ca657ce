"""The page of a demo: one HTML file next to its images, without scripts and external resources."""

from __future__ import annotations

import html
from pathlib import Path

from inweave.demo.story import Chapter, Story
from inweave.files.writing import write_text
from inweave.version import __version__

_STYLE = """
:root { --ink: #1f2328; --faint: #6e7781; --line: #d8dee4; --paper: #ffffff; --ground: #f6f8fa; --thread: #b35900; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
header { padding: 56px 24px 28px; text-align: center; }
h1 { margin: 0; font-size: 44px; letter-spacing: -0.02em; }
h1 span { color: var(--thread); }
header p { color: var(--faint); margin: 8px auto 0; max-width: 40em; }
dl { display: flex; flex-wrap: wrap; gap: 12px; justify-content: center; margin: 24px 0 0; }
dl div { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 8px 18px; }
dt { color: var(--faint); font-size: 13px; }
dd { margin: 0; font-weight: 600; }
main { max-width: 1000px; margin: 0 auto; padding: 0 20px 60px; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 14px; margin: 22px 0;
          padding: 24px 28px; }
h2 { margin: 0 0 6px; font-size: 22px; }
section p { margin: 0 0 14px; color: var(--faint); max-width: 60em; }
img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
svg { display: block; width: 100%; height: auto; margin-top: 10px; }
details { margin-top: 14px; }
summary { cursor: pointer; color: var(--faint); font-size: 14px; }
pre { background: var(--ground); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px;
      overflow-x: auto; font-size: 13px; line-height: 1.6; margin: 8px 0 0; }
footer { text-align: center; color: var(--faint); font-size: 13px; padding-bottom: 40px; }
"""


def write_page(story: Story) -> Path:
    """Write `index.html` into the story's folder."""
    facts = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in story.facts.items())
    sections = "".join(_section(chapter, story) for chapter in story.chapters)
    text = f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>inweave: the demo</title><style>{_STYLE}</style></head>
<body>
<header><h1>in<span>weave</span></h1>
<p>The base model is the warp, an adapter is the weft. Everything below was made on this machine with the model
inside the package; nothing was downloaded.</p><dl>{facts}</dl></header>
<main>{sections}</main>
<footer>inweave {html.escape(__version__)}. Art: Noto Emoji (Apache 2.0) and Fluent Emoji (MIT);
see the package's notices.</footer>
</body></html>
"""
    path = story.folder / "index.html"
    return write_text(path, text)


def _section(chapter: Chapter, story: Story) -> str:
    commands = html.escape("\n".join(chapter.commands))
    curve = loss_curve(story.losses) if chapter.image == "training.png" and story.losses else ""
    return f"""<section><h2>{html.escape(chapter.title)}</h2><p>{html.escape(chapter.text)}</p>
<img src="{chapter.image}" alt="{html.escape(chapter.title)}">{curve}
<details open><summary>commands</summary><pre>{commands}</pre></details></section>
"""


def loss_curve(losses: list[float], width: int = 900, height: int = 220) -> str:
    """Return an SVG of the loss of every step, faint, and of its exponential moving average."""
    smooth, mean = [], losses[0]
    for loss in losses:
        mean = 0.95 * mean + 0.05 * loss
        smooth.append(mean)
    top, left, bottom = max(losses) * 1.05, 46, height - 28
    last = max(len(losses) - 1, 1)

    def points(values: list[float]) -> str:
        return " ".join(
            f"{left + (width - left - 10) * i / last:.1f},{bottom - (bottom - 10) * v / top:.1f}"
            for i, v in enumerate(values)
        )

    marks = "".join(
        f'<text x="{left - 8}" y="{bottom - (bottom - 10) * share + 4:.0f}" text-anchor="end">{top * share:.2f}</text>'
        f'<line x1="{left}" x2="{width - 10}" y1="{bottom - (bottom - 10) * share:.0f}" '
        f'y2="{bottom - (bottom - 10) * share:.0f}" stroke="#d8dee4"/>'
        for share in (0.0, 0.5, 1.0)
    )
    return f"""<svg viewBox="0 0 {width} {height}" role="img" aria-label="loss over {len(losses)} steps"
 font-family="system-ui, sans-serif" font-size="12" fill="#6e7781">{marks}
<polyline points="{points(losses)}" fill="none" stroke="#b35900" stroke-opacity="0.25"/>
<polyline points="{points(smooth)}" fill="none" stroke="#b35900" stroke-width="2.5"/>
<text x="{left}" y="{height - 8}">step 1</text>
<text x="{width - 10}" y="{height - 8}" text-anchor="end">step {len(losses)}</text>
<text x="{width / 2}" y="{height - 8}" text-anchor="middle">loss</text></svg>"""
