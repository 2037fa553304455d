"""A page to draw on: boxes, text, lines and arrows that become one SVG, in light and in dark mode.

Colours are names ("c0" to "c5" for ranks or sequences, "empty" for what nobody owns). A canvas
knows how wide its texts are, roughly, and refuses to become a picture in which two of them overlap
or that is wider than a page.
"""

from dataclasses import dataclass
from html import escape
from itertools import combinations

PAGE_WIDTH = 760
MARGIN = 20
NUM_COLORS = 6

# name: fill, stroke and text on a light page, then on a dark one
COLORS = {
    "c0": ("#dbeafe", "#2563eb", "#1e3a8a", "#17335c", "#60a5fa", "#dbeafe"),
    "c1": ("#fef0c3", "#c27803", "#6b3d08", "#47320d", "#f2b431", "#fef0c3"),
    "c2": ("#d9f5e2", "#15803d", "#14532d", "#123a24", "#4ade80", "#d9f5e2"),
    "c3": ("#f0e6fe", "#8b31d8", "#541b86", "#391f56", "#c084fc", "#f0e6fe"),
    "c4": ("#fde2e6", "#d61f45", "#861232", "#4a1626", "#fb7185", "#fde2e6"),
    "c5": ("#cff4ee", "#0b8378", "#134e4a", "#0e3b38", "#2dd4bf", "#cff4ee"),
    "empty": ("#f3f4f6", "#a8b0bb", "#6b7280", "#1c2129", "#4b535d", "#8b949e"),
}

SANS = "-apple-system, 'Segoe UI', Helvetica, Arial, 'Liberation Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace"

FONTS = {  # name: size, width of a character, family, weight
    "title": (15, 8.6, SANS, 600),
    "label": (13, 7.0, SANS, 400),
    "strong": (13, 7.4, SANS, 600),
    "note": (12, 6.4, SANS, 400),
    "code": (13, 7.9, MONO, 400),
    "small": (11.5, 7.0, MONO, 400),
}


@dataclass(frozen=True)
class Box:
    """Where something lies: left, top, right, bottom."""

    left: float
    top: float
    right: float
    bottom: float
    what: str = ""

    def overlaps(self, other: "Box") -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


def text_width(text: str, font: str) -> float:
    """About how many pixels a text takes."""
    return len(text) * FONTS[font][1]


def color(index: int) -> str:
    """The colour of the index-th rank or sequence."""
    return f"c{index % NUM_COLORS}"


class Canvas:
    """Collects shapes; `svg(title)` frames them on a card as wide as they need."""

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.texts: list[Box] = []
        self.right = self.bottom = 0.0

    def rect(self, x, y, width, height, style: str, radius: float = 3, opacity: float = 1) -> None:
        """A box in a colour's style; "c0 quiet" has no border, "c0 dashed" a broken one."""
        see_through = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
        self._shape(
            f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
            f' rx="{radius:g}"{see_through}/>',
            x + width,
            y + height,
        )

    def slots(self, x, y, width, height, styles: list[str]) -> None:
        """A row of boxes that share a width, one for each style."""
        each = width / len(styles)
        for i, style in enumerate(styles):
            self.rect(x + i * each, y, each, height, style, 0)

    def outline(self, x, y, width, height, style: str) -> None:
        """A thick border around what lies there."""
        corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
        self.line([*corners, (x, y), (x + 1, y)], f"l-{style} thick")

    def text(
        self, x: float, y: float, text: str, font: str = "label", style: str = "", anchor="middle"
    ):
        """One line of text, centred vertically at y; the anchor says what of it lies at x."""
        text = str(text)
        if not text:
            return
        size, width = FONTS[font][0], text_width(text, font)
        left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
        box = Box(left, y - size * 0.55, left + width, y + size * 0.55, text)
        self.texts.append(box)
        names = f"{font} t-{style}" if style else font
        self._shape(
            f'<text class="{names}" x="{x:g}" y="{y + size * 0.35:g}" text-anchor="{anchor}">'
            f"{escape(text)}</text>",
            box.right,
            box.bottom,
        )

    def line(self, points: list[tuple[float, float]], style: str = "axis", arrow: bool = False):
        """A broken line, with an arrow head at its end if asked."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        head = ' marker-end="url(#head)"' if arrow else ""
        self._shape(
            f'<path class="line {style}" d="{path}"{head}/>',
            max(x for x, _ in points),
            max(y for _, y in points),
        )

    def area(self, points: list[tuple[float, float]], style: str):
        """A filled polygon without a border."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points) + " Z"
        self._shape(f'<path class="{style} quiet" d="{path}"/>', points[0][0], points[0][1])

    def _shape(self, shape: str, right: float, bottom: float) -> None:
        self.shapes.append(shape)
        self.right, self.bottom = max(self.right, right), max(self.bottom, bottom)

    def svg(self, title: str) -> str:
        """The picture; ValueError when texts overlap or it is too wide for a page."""
        for a, b in combinations(self.texts, 2):
            if a.overlaps(b):
                raise ValueError(f"the texts {a.what!r} and {b.what!r} overlap")
        width, height = round(self.right + 2 * MARGIN), round(self.bottom + 2 * MARGIN)
        if width > PAGE_WIDTH:
            raise ValueError(f"the figure is {width} wide; a page has {PAGE_WIDTH}")
        left = min([0.0, *(box.left for box in self.texts)])
        if left < -MARGIN / 2:
            raise ValueError(f"a text begins {-left:.0f} left of the figure")
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
                f' viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">',
                f"<title>{escape(title)}</title>",
                f"<style>\n{STYLE}</style>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8"'
                ' markerHeight="8" orient="auto"><path class="head" d="M0 0.5 L8 4 L0 7.5 Z"/>'
                "</marker></defs>",
                f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}"'
                ' rx="8"/>',
                f'<g transform="translate({MARGIN} {MARGIN})">',
                *self.shapes,
                "</g>",
                "</svg>",
                "",
            ]
        )


def _styles() -> str:
    """The style sheet: fonts, the light colours, the dark ones in a media query."""
    fonts = [
        f".{name} {{ font: {weight} {size}px {family}; }}"
        for name, (size, _, family, weight) in FONTS.items()
    ]
    light = _theme(0, "#ffffff", "#d5dae1", "#1f2328", "#59636e")
    dark = _theme(3, "#0d1117", "#343b44", "#e6edf3", "#9aa4af")
    rules = [
        *fonts,
        ".line { fill: none; stroke-width: 1.5; }",
        ".thick { stroke-width: 2.5; }",
        ".dashed { stroke-dasharray: 5 4; }",
        *light,
        ".faint { fill-opacity: 0.35; }",
        ".quiet { stroke: none; }",
    ]
    lines = "\n".join(rules)
    inner = "\n".join(f"  {rule}" for rule in [*dark, ".quiet { stroke: none; }"])
    return f"{lines}\n@media (prefers-color-scheme: dark) {{\n{inner}\n}}\n"


def _theme(offset: int, card: str, border: str, ink: str, soft: str) -> list[str]:
    rules = [
        f".card {{ fill: {card}; stroke: {border}; }}",
        f"text {{ fill: {ink}; }}",
        f".t-soft {{ fill: {soft}; }}",
        f".axis {{ stroke: {soft}; }}",
        f".grid {{ stroke: {border}; stroke-width: 1; }}",
        f".head {{ fill: {soft}; }}",
        f".page {{ fill: {card}; stroke: {border}; }}",
        f".past {{ fill: {soft}; fill-opacity: 0.25; stroke: {soft}; }}",
    ]
    for name, colors in COLORS.items():
        fill, stroke, text = colors[offset : offset + 3]
        rules += [
            f".{name} {{ fill: {fill}; stroke: {stroke}; }}",
            f".t-{name} {{ fill: {text}; }}",
            f".l-{name} {{ stroke: {stroke}; }}",
        ]
    return rules


STYLE = _styles()
