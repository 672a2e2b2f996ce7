"""An ensemble evaluated on a dataset of raw inputs: figures, a per-example table, and pictures in one folder."""

from .data import EvaluationData, load_split
from .evaluate import DatasetEvaluation, evaluate_dataset
from .report import report_of

__all__ = ["DatasetEvaluation", "EvaluationData", "evaluate_dataset", "load_split", "report_of"]
