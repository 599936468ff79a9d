"""Inspect a matplotlib figure: its texts, its pixels, overlaps and cut-off parts."""

import itertools

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from flashpoint.plots import style


def laid_out(draw, theme="light"):
    with style.themed(theme):
        figure = draw()
        FigureCanvasAgg(figure)
        figure.draw_without_rendering()
    return figure


def written(figure):
    """Return each visible text and its bounding box."""
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    # An axis also makes ticks outside its limits, which are not drawn.
    hidden = set()
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        hidden |= {label for t in ticks if not low <= t.get_loc() <= high for label in (t.label1, t.label2)}
    # Use the extent of Text: the extent of an annotation includes its arrow.
    return [(text.get_text(), Text.get_window_extent(text)) for text in texts if text not in hidden]


def check(figure):
    """Check that every panel has data within its axes, and that no text is cut off or covers another."""
    for ax in figure.axes:
        points = [line.get_xydata() for line in ax.lines if line.get_marker() not in ("None", "")]
        assert any(len(p) for p in points) or ax.patches or ax.lines, ax.get_title(loc="left")
        assert ax.get_xlim()[0] != ax.get_xlim()[1]
        for x, y in (at for p in points for at in ax.transData.transform(p)):
            assert ax.bbox.x0 - 0.5 <= x <= ax.bbox.x1 + 0.5, ax.get_title(loc="left")
            assert ax.bbox.y0 - 0.5 <= y <= ax.bbox.y1 + 0.5, ax.get_title(loc="left")
        for bar in ax.patches:
            box = bar.get_window_extent()
            assert (box.x0, box.y0) >= (ax.bbox.x0 - 1, ax.bbox.y0 - 1)
            assert box.x1 <= ax.bbox.x1 + 1
            assert box.y1 <= ax.bbox.y1 + 1
    texts = written(figure)
    for text, box in texts:
        assert figure.bbox.x0 <= box.x0, text
        assert box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0, text
        assert box.y1 <= figure.bbox.y1, text
    for (a, left), (b, right) in itertools.combinations(texts, 2):
        assert not left.padded(-1).overlaps(right.padded(-1)), (a, b)
    for legend in figure.legends:
        assert not any(legend.get_window_extent().overlaps(ax.bbox) for ax in figure.axes)


def pixels(figure):
    """Return the picture as an array (height, width, 3) of 0 to 1; as in the figure, the first row is at the bottom."""
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[::-1, :, :3] / 255


def painted(figure, ax, colour):
    """Return the number of pixels of the axes that have this colour."""
    (x0, y0), (x1, y1) = ax.bbox.min.round().astype(int), ax.bbox.max.round().astype(int)
    return int((abs(pixels(figure)[y0:y1, x0:x1] - to_rgb(colour)) < 0.01).all(axis=2).sum())
