"""One style for all figures: readable in print, in grey and by the colour-blind."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import matplotlib
import matplotlib.style

# Colours of M. Okabe and K. Ito, "Color universal design", 2008: told apart with every kind of colour vision.
BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
GREY = "0.45"
SMALL = 7  # points, for the names of norms

_STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "figure.constrained_layout.use": True,
    "figure.dpi": 100,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so figures are the same everywhere
    "font.size": 9,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
    "pdf.fonttype": 42,  # text stays text
    "savefig.bbox": "tight",  # a long name is not cut off
    "savefig.dpi": 200,
    "svg.hashsalt": "sigma_nens_hf",  # the same file at every run
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}
# matplotlib's parameters belong to the process, not to a thread.
_lock = threading.Lock()


class SeriesStyle(NamedTuple):
    """How one of several series is told apart: by each of the three alone."""

    color: str
    linestyle: str | tuple
    marker: str


SERIES_STYLES = (
    SeriesStyle(BLUE, "-", "o"),
    SeriesStyle(ORANGE, "--", "s"),
    SeriesStyle("black", ":", "^"),
    SeriesStyle(GREEN, "-.", "D"),
    SeriesStyle(PURPLE, (0, (6, 1, 1, 1, 1, 1)), "v"),
    SeriesStyle(SKY, (0, (1, 3)), "P"),
)


@contextmanager
def house_style() -> Iterator[None]:
    """Draw in this style whatever the user's own is, which is back afterwards. One thread at a time."""
    with _lock, matplotlib.style.context(_STYLE, after_reset=True):
        yield
