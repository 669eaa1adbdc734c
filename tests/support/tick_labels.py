"""The labels below a drawing's axis: what they say, and that none lies on another."""

import itertools

import pytest


def labels_apart(draw):
    """Return the labels of the x axis and its name, of the figure that `draw` saves; none may touch the next one."""
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    figures, save = [], figure_class.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            figure_class, "savefig", lambda figure, *to, **how: [figures.append(figure), save(figure, *to, **how)]
        )
        draw()
    (figure,) = figures
    (axes,) = figure.axes
    low, high = sorted(axes.get_xlim())
    labels = [tick.label1 for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes)), [label.get_text() for label in labels]
    return [label.get_text() for label in labels], axes.get_xlabel()
