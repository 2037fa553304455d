"""Figures of the engine's real objects: tensors, a Batch, sequences and their blocks, a schedule.

Each function takes the object as the engine has it and returns an SVG; `save` keeps it under
chapters/figures, where its chapter shows it. Nothing is random, so that a test can draw it again.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chapters.tools.svg import PAGE_WIDTH, Canvas, color, text_width

FIGURES = Path("chapters/figures")
CELL = 26  # height of a cell that holds a number
GAP = 12  # between shards


def save(svg: str, name: str) -> None:
    """Write chapters/figures/NAME.svg; NAME begins with the chapter's number."""
    path = FIGURES / f"{name}.svg"
    if not path.exists() or path.read_text() != svg:
        path.write_text(svg)


def number(value: float) -> str:
    """A number as short as it is exact: 3, 0.5, -0.25."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def ink(style: str) -> str:
    """The style of text in a box: its colour's, but black (or white) in a grey one."""
    return "" if style == "empty" else style


@dataclass(frozen=True)
class Matrix:
    """A 2-D tensor in one or more shards, each in the colour of its rank.

    The shards lie below each other (dim 0) or side by side (dim 1). `colors` gives other colours
    than 0, 1, ...; None is grey. `notes` stand beside the shards, `row_names` beside the rows.
    """

    shards: Items[Any]
    name: str = ""
    dim: int = 0
    row_names: Items[str] = ()
    notes: Items[str] = ()
    colors: Items[int | None] | None = None
    strong_rows: Items[int] = ()

    @property
    def tables(self) -> list[list[list[str]]]:
        return [[[number(x) for x in row] for row in shard.tolist()] for shard in self.shards]

    @property
    def cell_width(self) -> float:
        texts = [text for table in self.tables for row in table for text in row]
        return max(CELL, max(text_width(text, "code") for text in texts) + 8)

    @property
    def gutter(self) -> float:
        """The room that the row names take, left of the cells."""
        return max((text_width(name, "small") + 8 for name in self.row_names), default=0)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the cells, without names and notes."""
        rows = [len(table) for table in self.tables]
        columns = [len(table[0]) for table in self.tables]
        gaps = GAP * (len(self.shards) - 1)
        if self.dim == 0:
            return columns[0] * self.cell_width, sum(rows) * CELL + gaps
        return sum(columns) * self.cell_width + gaps, rows[0] * CELL

    @property
    def note_width(self) -> float:
        """The room that the notes of stacked shards take, right of the cells."""
        if self.dim == 1:
            return 0
        return max((text_width(note, "note") + 10 for note in self.notes), default=0)

    def draw(self, canvas: Canvas, x: float, y: float) -> None:
        """Cells with their top left corner at (x + gutter, y)."""
        left, row = x + self.gutter, 0
        if self.name:
            canvas.text(left + self.size[0] / 2, y - 16, self.name, "strong")
        for rank, table in enumerate(self.tables):
            colors = range(len(self.shards)) if self.colors is None else self.colors
            style = "empty" if colors[rank] is None else color(colors[rank])
            self._draw_shard(canvas, left, y, table, style, row)
            width, height = len(table[0]) * self.cell_width, len(table) * CELL
            self._draw_note(canvas, left, y, width, height, rank)
            if self.dim == 0:
                y += height + GAP
                row += len(table)
            else:
                left += width + GAP

    def _draw_shard(self, canvas, left, top, table, style, first_row) -> None:
        for i, cells in enumerate(table):
            y = top + i * CELL
            is_strong = first_row + i in self.strong_rows
            if self.row_names and left - self.gutter >= 0:
                name = self.row_names[first_row + i]
                canvas.text(
                    left - 8, y + CELL / 2, name, "small", "" if is_strong else "soft", "end"
                )
            for j, text in enumerate(cells):
                x = left + j * self.cell_width
                canvas.rect(x, y, self.cell_width, CELL, style, 0)
                canvas.text(x + self.cell_width / 2, y + CELL / 2, text, "code", ink(style))
        for i in self.strong_rows:
            if first_row <= i < first_row + len(table):
                y = top + (i - first_row) * CELL
                width = len(table[0]) * self.cell_width
                canvas.outline(left, y, width, CELL, style)

    def _draw_note(self, canvas, left, top, width, height, rank) -> None:
        if not self.notes:
            return
        if self.dim == 0:
            canvas.text(
                left + width + 10, top + height / 2, self.notes[rank], "note", "soft", "start"
            )
        else:
            canvas.text(left + width / 2, top + height + 14, self.notes[rank], "note", "soft")


def equation(*items: Matrix | str, title: str) -> str:
    """Matrices in a row with signs between them: `x`, "·", `W`, "=", `y`."""
    canvas = Canvas()
    matrices = [item for item in items if isinstance(item, Matrix)]
    named = any(matrix.name for matrix in matrices)
    middle = max(matrix.size[1] for matrix in matrices) / 2 + (26 if named else 0)
    x = 0.0
    for item in items:
        if isinstance(item, str):
            width = max(text_width(item, "title"), 10) + 16
            canvas.text(x + width / 2, middle, item, "title", "soft")
            x += width
        else:
            item.draw(canvas, x, middle - item.size[1] / 2)
            x += item.gutter + item.size[0] + item.note_width
    return canvas.svg(title)


def sharded_matrix(shards: Items[Any], title: str, **names: Any) -> str:
    """One tensor as its ranks hold it; the keywords are those of `Matrix`."""
    return equation(Matrix(shards, **names), title=title)


def packed_rows(batch: Any, names: Items[str], title: str, tokens: Items[str] = ()) -> str:
    """The T rows of a Batch, one colour a sequence, with cu_seqlens under their edges.

    Below the tokens (default: their ids) stand the positions and, where there is a cache, the
    slots.
    """
    lines = {"token": tokens or batch.input_ids.tolist(), "position": batch.positions.tolist()}
    if batch.slot_mapping is not None:
        lines["slot"] = batch.slot_mapping.tolist()
    edges = batch.cu_seqlens_q.tolist()
    canvas = Canvas()
    gutter = max(text_width("cu_seqlens", "label"), text_width("position", "label")) + 14
    widest = max(text_width(str(text), "code") for line in lines.values() for text in line)
    width = min(max(34, widest + 10), (PAGE_WIDTH - 60 - gutter) / edges[-1])
    owners = [i for i, n in enumerate(batch.query_lens) for _ in range(n)]
    for i, name in enumerate(names):
        center = gutter + (edges[i] + edges[i + 1]) / 2 * width
        canvas.text(center, 8, name, "strong", color(i))
    for k, (label, texts) in enumerate(lines.items()):
        y = 24 + k * (CELL + 4)
        canvas.text(gutter - 14, y + CELL / 2, label, "label", "soft", "end")
        for row, text in enumerate(texts):
            style = color(owners[row])
            canvas.rect(gutter + row * width, y, width, CELL, style if k == 0 else "empty", 0)
            center = gutter + (row + 0.5) * width
            canvas.text(center, y + CELL / 2, text, "code", style if k == 0 else "")
    _edge_marks(canvas, gutter, 24 + len(lines) * (CELL + 4), width, edges, "cu_seqlens")
    return canvas.svg(title)


def _edge_marks(canvas, left, top, width, edges, label) -> None:
    """A tick and a number under each edge between sequences."""
    canvas.text(left - 14, top + 18, label, "label", "soft", "end")
    for edge in edges:
        x = left + edge * width
        canvas.line([(x, top), (x, top + 8)])
        canvas.text(x, top + 18, edge, "code")


def block_table(sequences: Items[Any], manager: Any, title: str) -> str:
    """Block tables of sequences above, the pool of their BlockManager below.

    A filled slot holds a computed token, in the colour of its sequence; a shared block has a stripe
    for each of its owners.
    """
    canvas = Canvas()
    names = [seq.request.request_id for seq in sequences]
    gutter = max(text_width(name, "strong") for name in names) + 16
    for i, seq in enumerate(sequences):
        y = i * (CELL + 8)
        canvas.text(gutter - 16, y + CELL / 2, names[i], "strong", color(i), "end")
        for j, block in enumerate(seq.block_table):
            canvas.rect(gutter + j * 40, y, 40, CELL, color(i), 0)
            canvas.text(gutter + (j + 0.5) * 40, y + CELL / 2, block, "code", color(i))
        x = gutter + len(seq.block_table) * 40 + 12
        state = f"{seq.num_computed_tokens} tokens computed"
        canvas.text(x, y + CELL / 2, state, "note", "soft", "start")
    _pool(canvas, len(sequences) * (CELL + 8) + 28, sequences, manager)
    return canvas.svg(title)


def _pool(canvas: Canvas, top: float, sequences: Items[Any], manager: Any) -> None:
    """Every block of the pool with its slots, as many in a row as a page can take."""
    size = manager.block_size
    width = max(76, size * max(8, min(18, 200 / size)))
    in_row = int((PAGE_WIDTH - 60 + 16) // (width + 16))
    for block in range(len(manager.blocks)):
        x = (block % in_row) * (width + 16)
        y = top + (block // in_row) * 76
        owners = [i for i, seq in enumerate(sequences) if block in seq.block_table]
        canvas.text(x + width / 2, y, f"block {block}", "note", "soft")
        canvas.slots(x, y + 10, width, 20, ["empty"] * size)
        for k, i in enumerate(owners):
            before = sequences[i].block_table.index(block) * size
            filled = max(0, min(size, sequences[i].num_computed_tokens - before))
            styles = [color(i)] * filled + ["empty"] * (size - filled)
            height = 20 / len(owners)
            canvas.slots(x, y + 10 + k * height, width, height, styles)
        cached = ", cached" if manager.blocks[block].key is not None else ""
        names = ", ".join(sequences[i].request.request_id for i in owners)
        style = color(owners[0]) if owners else "soft"
        canvas.text(x + width / 2, y + 42, names or f"free{cached}", "note", style)


def schedule(
    steps: Items[Items[tuple[Any, int]]],
    title: str,
    notes: dict[tuple[int, str], str] | None = None,
) -> str:
    """What `Scheduler.schedule` returned, step by step: the tokens that each sequence got.

    A bar is as high as its share of the largest piece. `notes` puts a word into a step where a
    sequence got nothing: {(2, "C"): "preempted"}.
    """
    notes = notes or {}
    given = [{seq.request.request_id: n for seq, n in step} for step in steps]
    names = sorted({name for step in given for name in step} | {name for _, name in notes})
    canvas = Canvas()
    gutter = max([text_width(name, "strong") for name in [*names, "together"]]) + 16
    words = max((text_width(word, "note") + 10 for word in notes.values()), default=0)
    width = max(words, min(64, (PAGE_WIDTH - 60 - gutter) / len(steps)))
    height, most = 38, max(n for step in given for n in step.values())
    for k in range(len(steps)):
        canvas.text(gutter + (k + 0.5) * width, 6, f"step {k}" if width > 52 else k, "note", "soft")
    for i, name in enumerate(names):
        y = 20 + i * (height + 6)
        canvas.text(gutter - 16, y + height / 2, name, "strong", color(i), "end")
        canvas.line([(gutter, y + height), (gutter + len(steps) * width, y + height)], "grid")
        for k, step in enumerate(given):
            x = gutter + k * width
            if name in step:
                bar = max(18, height * step[name] / most)
                canvas.rect(x + 3, y + height - bar, width - 6, bar, color(i), 2)
                canvas.text(x + width / 2, y + height - bar / 2, step[name], "code", color(i))
            elif (k, name) in notes:
                canvas.text(x + width / 2, y + height / 2, notes[k, name], "note", "soft")
    y = 20 + len(names) * (height + 6) + 12
    canvas.text(gutter - 16, y, "together", "label", "soft", "end")
    for k, step in enumerate(given):
        canvas.text(gutter + (k + 0.5) * width, y, sum(step.values()), "code")
    return canvas.svg(title)


def rows_by_step(runs: dict[str, Items[tuple[int, int]]], title: str) -> str:
    """Which rows each step computes: a panel a run, steps downwards, positions across.

    A run is a list of (tokens known from before, tokens computed now), one pair a step. Computed
    rows are coloured, known ones grey; under a panel stands the number of computed rows.
    """
    canvas, size, left = Canvas(), 24, 52.0
    for i, (name, steps) in enumerate(runs.items()):
        width = max(kept + n for kept, n in steps) * size
        canvas.text(left, 6, name, "strong", color(i), "start")
        for k, (kept, n) in enumerate(steps):
            y = 22 + k * (size + 4)
            canvas.text(left - 10, y + size / 2, f"step {k}", "note", "soft", "end")
            for position in range(kept + n):
                style = "past" if position < kept else color(i)
                canvas.rect(left + position * size, y, size, size, style, 0)
                text = position if position >= kept else ""
                canvas.text(left + (position + 0.5) * size, y + size / 2, text, "code", style)
        total = sum(n for _, n in steps)
        y = 22 + len(steps) * (size + 4) + 12
        canvas.text(left, y, f"{total} rows computed", "note", "soft", "start")
        left += width + 92
    return canvas.svg(title)


def blocks_over_time(series: dict[str, Items[int]], capacity: int, title: str) -> str:
    """Blocks in use after each step, one line a run, against the size of the pool."""
    canvas = Canvas()
    left, top, width, height = 34, 28, 520, 190
    num_steps = max(len(values) for values in series.values())
    across, floor = width / max(1, num_steps - 1), top + height
    canvas.text(0, 6, "blocks in use", "label", "soft", "start")
    for value in _ticks(capacity):
        y = floor - value * height / capacity
        style = "axis dashed" if value == capacity else "grid"
        canvas.line([(left, y), (left + width, y)], style)
        canvas.text(left - 8, y, value, "small", "soft", "end")
    canvas.text(left + width + 10, top, "the whole pool", "note", "soft", "start")
    for step in _ticks(num_steps - 1):
        canvas.text(left + step * across, floor + 16, step, "small", "soft")
    canvas.text(left + width / 2, floor + 38, "step", "label", "soft")
    taken = [float(top)]
    for i, (name, values) in enumerate(series.items()):
        points = [(left + k * across, floor - v * height / capacity) for k, v in enumerate(values)]
        canvas.area([*points, (points[-1][0], floor), (left, floor)], f"{color(i)} faint")
        canvas.line(points, f"l-{color(i)} thick")
        y = _free_height(points[-1][1] - 6, taken)
        canvas.text(points[-1][0] + 10, y, name, "strong", color(i), "start")
    return canvas.svg(title)


def _free_height(y: float, taken: list[float]) -> float:
    """The nearest height at or above y where no other name stands; remembers it."""
    while any(abs(y - other) < 18 for other in taken):
        y -= 2
    taken.append(y)
    return y


def _ticks(most: int) -> list[int]:
    """About five round numbers from 0 to most, which is the last."""
    step = next(s * 10**e for e in range(9) for s in (1, 2, 5) if most <= 5 * s * 10**e)
    ticks = [tick for tick in range(0, most + 1, step) if most - tick > 0.6 * step]
    return [*ticks, most]


def pooling_cursor(
    cursor: Any, names: Items[str], title: str, colors: Items[int] | None = None
) -> str:
    """Each prompt as its PoolingCursor sees it in this step.

    Coloured tokens are rows of this step, with their row number in the hidden states; the first
    and the last row have a thick border. Grey tokens were computed before, empty ones are still to
    come. `colors` keeps the colour of a prompt from step to step.
    """
    canvas = Canvas()
    gutter = max(text_width(name, "strong") for name in names) + 16
    states = [_progress(cursor, i) for i in range(len(names))]
    room = PAGE_WIDTH - 60 - gutter - max(text_width(state, "note") for state in states)
    width = min(34, room / max(cursor.prompt_lens))
    first, last = cursor.first_rows.tolist(), cursor.last_rows.tolist()
    for i, name in enumerate(names):
        y, start, style = i * (CELL + 16), cursor.starts[i], color(colors[i] if colors else i)
        canvas.text(gutter - 16, y + CELL / 2, name, "strong", style, "end")
        for k in range(cursor.prompt_lens[i]):
            x, row = gutter + k * width, first[i] + k - start
            if first[i] <= row <= last[i]:
                canvas.rect(x, y, width, CELL, style, 0)
                canvas.text(x + width / 2, y + CELL / 2, row, "code", style)
            else:
                canvas.rect(x, y, width, CELL, "past" if k < start else "empty dashed", 0)
        for row in {first[i], last[i]}:
            canvas.outline(gutter + (start + row - first[i]) * width, y, width, CELL, style)
        x = gutter + cursor.prompt_lens[i] * width + 12
        canvas.text(x, y + CELL / 2, states[i], "note", "soft", "start")
    return canvas.svg(title)


def _progress(cursor: Any, i: int) -> str:
    done = cursor.starts[i] + cursor.query_lens[i]
    return f"{done} of {cursor.prompt_lens[i]}" + (", finished" if cursor.finished[i] else "")


def token_spans(
    tokens: Items[str], rows: dict[str, Items[tuple[int, int, Any]]], title: str
) -> str:
    """What stands for which tokens: a line of boxes a name, under the tokens of one text.

    A box is (first token, number of tokens, what is written in it).
    """
    canvas = Canvas()
    gutter = max(text_width(name, "label") for name in rows) + 14
    widest = max(text_width(token, "code") for token in tokens) + 14
    width = min(max(50, widest), (PAGE_WIDTH - 60 - gutter) / len(tokens))
    for k, token in enumerate(tokens):
        canvas.text(gutter + (k + 0.5) * width, 8, token, "code")
    for i, (name, boxes) in enumerate(rows.items()):
        y = 28 + i * (CELL + 10)
        canvas.text(gutter - 14, y + CELL / 2, name, "label", "soft", "end")
        for first, n, text in boxes:
            canvas.rect(gutter + first * width, y, n * width, CELL, color(i), 0)
            center = gutter + (first + n / 2) * width
            canvas.text(center, y + CELL / 2, text, "code", color(i))
    return canvas.svg(title)


def maxsim_matrix(
    similarity: Any,
    query_tokens: Items[str],
    document_tokens: Items[str],
    title: str,
    total: str | None = "sum = MaxSim",
) -> str:
    """Similarities `[query, document]`: the darker the larger; each query token's best is framed.

    The column at the right holds the best of each row; their sum, called `total`, is the MaxSim
    score. None: they are not added.
    """
    values = similarity.tolist()
    canvas = Canvas()
    gutter = max(text_width(token, "code") for token in query_tokens) + 12
    widest = max(text_width(token, "code") for token in document_tokens) + 12
    width = max(60, widest)
    low, high = min(map(min, values)), max(map(max, values))
    for j, token in enumerate(document_tokens):
        canvas.text(gutter + (j + 0.5) * width, 6, token, "code")
    right = gutter + len(document_tokens) * width + 24
    canvas.text(right + 30, 6, "best", "strong")
    for i, row in enumerate(values):
        y = 22 + i * 30
        canvas.text(gutter - 12, y + 15, query_tokens[i], "code", "", "end")
        for j, value in enumerate(row):
            x = gutter + j * width
            canvas.rect(x, y, width, 30, "page", 0)
            share = (value - low) / (high - low or 1)
            canvas.rect(x, y, width, 30, "c0 quiet", 0, opacity=round(share, 2))
            canvas.text(x + width / 2, y + 15, f"{value:.2f}", "code")
        canvas.text(right + 30, y + 15, f"{max(row):.2f}", "code", "c1")
    for i, row in enumerate(values):
        canvas.outline(gutter + row.index(max(row)) * width, 22 + i * 30, width, 30, "c1")
    if total is not None:
        y = 22 + len(values) * 30
        canvas.line([(right, y + 6), (right + 60, y + 6)])
        canvas.text(right - 12, y + 22, total, "label", "soft", "end")
        canvas.text(right + 30, y + 22, f"{sum(map(max, values)):.2f}", "code", "c1")
    return canvas.svg(title)


def flow(
    boxes: dict[str, tuple[int, int, str, str]],
    arrows: Items[tuple[str, str] | tuple[str, str, str]],
    title: str,
    colors: dict[str, int] | None = None,
) -> str:
    """Boxes on a grid and arrows between them.

    `boxes` {key: (column, row, first line, second line)}; `arrows` (from, to) or (from, to,
    label). A box without a colour is grey. Arrows go straight down or across, else with one bend.
    """
    columns = 1 + max(column for column, *_ in boxes.values())
    texts = [(text_width(a, "strong"), text_width(b, "note")) for *_, a, b in boxes.values()]
    labels = max((text_width(arrow[2], "note") for arrow in arrows if len(arrow) == 3), default=0)
    width = max(max(pair) for pair in texts) + 24
    room = (PAGE_WIDTH - 50 - columns * width) / max(1, columns - 1)
    gap_x, gap_y, height = min(max(40, labels + 24), room), 44, 50
    canvas = Canvas()
    places = {}
    for key, (column, row, first, second) in boxes.items():
        x, y = column * (width + gap_x), row * (height + gap_y)
        places[key] = (x, y)
        style = color(colors[key]) if colors and key in colors else "empty"
        canvas.rect(x, y, width, height, style, 6)
        canvas.text(x + width / 2, y + (17 if second else 25), first, "strong", ink(style))
        canvas.text(x + width / 2, y + 35, second, "note", ink(style))
    for source, target, *label in arrows:
        _arrow(canvas, places[source], places[target], (width, height), label[0] if label else "")
    return canvas.svg(title)


def _arrow(canvas: Canvas, start, end, size, label: str) -> None:
    """An arrow from box to box: across within a row, else down or up, with a step aside."""
    (x1, y1), (x2, y2), (width, height) = start, end, size
    if y1 == y2:
        right = x2 > x1
        ends = (x1 + width, x2 - 2) if right else (x1, x2 + width + 2)
        y = y1 + height / 2
        canvas.line([(ends[0], y), (ends[1], y)], arrow=True)
        canvas.text(sum(ends) / 2, y - 11, label, "note", "soft")
        return
    begin, stop = (y1 + height, y2 - 2) if y2 > y1 else (y1, y2 + height + 2)
    middle, x1, x2 = (begin + stop) / 2, x1 + width / 2, x2 + width / 2
    turns = [] if x1 == x2 else [(x1, middle), (x2, middle)]
    canvas.line([(x1, begin), *turns, (x2, stop)], arrow=True)
    if x1 == x2:
        canvas.text(x1 + 8, middle + 11, label, "note", "soft", "start")
    else:
        canvas.text((x1 + x2) / 2, middle - 10, label, "note", "soft")
