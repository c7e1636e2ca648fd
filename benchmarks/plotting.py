"""The style of plots."""

from contextlib import AbstractContextManager

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def style() -> AbstractContextManager[None]:
    """Returns a context that sets the fonts of plots drawn in it."""
    return rc_context({"font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.titlepad": 12})


def titled(title: str, width: float, height: float) -> Figure:
    """Returns an empty figure with a title; width and height in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    return figure


def finish(axes: Axes) -> None:
    """Removes the frame and adds a grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
