"""The page of the demo: every chapter with its image and commands, the loss as a curve, no markup from texts."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("diffusers")

from inweave.demo.page import loss_curve, write_page
from inweave.demo.story import Chapter, Story

SVG = "{http://www.w3.org/2000/svg}"


def test_the_page_has_every_chapter_and_fact(tmp_path: Path) -> None:
    chapters = [
        Chapter("Before <b>", "text & more", "base.png", ['inweave generate "a < b"']),
        Chapter("Training", "a style", "training.png", ["inweave train", "inweave inspect x"]),
    ]
    story = Story(tmp_path, chapters, [0.5, 0.25], {"total": "3 s"})
    page = write_page(story).read_text("utf-8")
    assert page.count("<section>") == 2 and page.count("<svg") == 1, "the curve is in the chapter of the training"
    assert "Before &lt;b&gt;" in page and "text &amp; more" in page and "a &lt; b" in page
    assert '<img src="base.png"' in page and "<dt>total</dt><dd>3 s</dd>" in page
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")


def test_the_curve_has_a_point_per_step_and_an_average() -> None:
    curve = loss_curve([1.0, 0.5, 0.25, 0.5]).replace("<svg ", f'<svg xmlns="{SVG[1:-1]}" ', 1)
    lines = ElementTree.fromstring(curve).findall(f"{SVG}polyline")
    points = [[tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()] for line in lines]
    assert [len(line) for line in points] == [4, 4]
    heights = [y for _, y in points[0]]
    assert heights[2] == max(heights) and heights[0] == min(heights), "the lowest loss is furthest down"
    assert "step 4" in curve and len(ElementTree.fromstring(curve).findall(f"{SVG}line")) == 3
