"""A corpus to try things on: drawings of simple shapes, with captions that say what they show.

`make_shapes` writes `00000.png`, `00001.png`, … and a `metadata.jsonl` with a line for each. A drawing
depends on the seed and its number alone, so a larger corpus begins with the smaller one, byte for byte.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

COLORS = {
    "red": (220, 50, 47),
    "orange": (235, 140, 30),
    "yellow": (240, 210, 60),
    "green": (60, 160, 70),
    "blue": (40, 90, 200),
    "purple": (130, 70, 170),
    "white": (245, 245, 245),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "ring", "cross", "bar")
SIZES = {"small": 0.16, "large": 0.26}
PLACES = {
    "top left": (0.3, 0.3),
    "top right": (0.7, 0.3),
    "center": (0.5, 0.5),
    "bottom left": (0.3, 0.7),
    "bottom right": (0.7, 0.7),
}


def make_shapes(folder: Path, *, count: int, pixels: int = 32, seed: int = 0) -> None:
    """Write a corpus of `count` square PNGs and their captions.

    Args:
        folder (Path): Where to write; made if it is absent.
        count (int): Number of drawings.
        pixels (int): Width and height of a drawing. Default: ``32``.
        seed (int): Which corpus. Default: ``0``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        name = f"{number:05d}.png"
        caption = _draw(folder / name, pixels, random.Random(f"shapes {seed} {number}"))
        lines.append(json.dumps({"file_name": name, "caption": caption}) + "\n")
    (folder / "metadata.jsonl").write_text("".join(lines))


def _draw(path: Path, pixels: int, chance: random.Random) -> str:
    """Draw one picture and return its caption."""
    from PIL import Image, ImageDraw

    color, background = chance.sample(sorted(COLORS), 2)
    shape, size, place = chance.choice(SHAPES), chance.choice(sorted(SIZES)), chance.choice(sorted(PLACES))
    scale = 4  # drawn larger and reduced, for smooth edges
    side = pixels * scale
    image = Image.new("RGB", (side, side), COLORS[background])
    x, y = (side * (part + chance.uniform(-0.03, 0.03)) for part in PLACES[place])
    r = side * SIZES[size] * chance.uniform(0.9, 1.1)
    draw, ink = ImageDraw.Draw(image), COLORS[color]
    box = (x - r, y - r, x + r, y + r)
    if shape == "circle":
        draw.ellipse(box, fill=ink)
    elif shape == "square":
        draw.rectangle(box, fill=ink)
    elif shape == "triangle":
        draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=ink)
    elif shape == "ring":
        draw.ellipse(box, outline=ink, width=max(1, int(r * 0.4)))
    elif shape == "cross":
        draw.rectangle((x - r, y - r / 4, x + r, y + r / 4), fill=ink)
        draw.rectangle((x - r / 4, y - r, x + r / 4, y + r), fill=ink)
    else:
        draw.rectangle((x - r, y - r / 3, x + r, y + r / 3), fill=ink)
    image.resize((pixels, pixels), Image.Resampling.LANCZOS).save(path)
    return f"a {size} {color} {shape} at the {place} on {background}"
