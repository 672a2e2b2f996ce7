"""Figures of an ensemble, each saved with the numbers behind it.

They are matplotlib's `Figure` objects and leave its global state alone.
"""

from .entropies import entropy_histogram
from .frontier import frontier_plot
from .gates import gates_plot, sharing_histogram
from .model_comparison import reliability_diagram, risk_coverage_plot

__all__ = [
    "entropy_histogram",
    "frontier_plot",
    "gates_plot",
    "reliability_diagram",
    "risk_coverage_plot",
    "sharing_histogram",
]
