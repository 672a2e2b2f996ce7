"""How well a score tells out-of-distribution examples from the others."""

import numpy as np

from .checks import ArrayLike, as_array

_TRUE_POSITIVE_RATE = 0.95


def area_under_roc(id_scores: np.ndarray, ood_scores: np.ndarray) -> float:
    """Return the `auroc` of `ood_metrics` alone, which is what its interval needs.

    Args:
        id_scores: (N,), scores of in-distribution examples.
        ood_scores: (K,), scores of out-of-distribution examples.
    """
    # As in `ood_metrics`.
    from sklearn.metrics import roc_auc_score

    is_ood = np.repeat([0, 1], [len(id_scores), len(ood_scores)])
    return float(roc_auc_score(is_ood, np.concatenate([id_scores, ood_scores])))


def ood_metrics(id_scores: ArrayLike, ood_scores: ArrayLike) -> dict[str, float]:
    """Return how well scores detect out-of-distribution examples, which are the positive class.

    An example is taken for out-of-distribution if its score is at least the threshold; tied scores pass together.

    * `auroc`: area under the ROC curve: the probability that an out-of-distribution example scores higher than an
      in-distribution one, ties counted half. .5 is chance.
    * `aupr`: average precision, the sum over thresholds of precision times the gain in recall, without interpolation.
      Chance is the share of out-of-distribution examples, so it compares only between sets of the same sizes.
    * `fpr_at_95_tpr`: false-positive rate at the first threshold, going down, whose true-positive rate is at least
      .95: the share of in-distribution examples that are lost when 95 % of the others are detected. Not interpolated.
      Lower is better.

    Source: D. Hendrycks, K. Gimpel, "A baseline for detecting misclassified and out-of-distribution examples in neural
    networks", 2017 (arXiv 1610.02136), but for the last: S. Liang, Y. Li, R. Srikant, "Enhancing the reliability of
    out-of-distribution image detection in neural networks", 2018 (arXiv 1706.02690). Computed by scikit-learn.

    Args:
        id_scores: (N,), scores of in-distribution examples; higher means more out-of-distribution.
        ood_scores: (K,), scores of out-of-distribution examples.

    Raises:
        ValueError: One of them is empty, not one-dimensional, or holds NaN or infinity.
    """
    # It would add .4 s to the import of the package, which trains without it.
    from sklearn.metrics import average_precision_score, roc_curve

    groups = {
        "id_scores": as_array(id_scores).astype(np.float64),
        "ood_scores": as_array(ood_scores).astype(np.float64),
    }
    for name, group in groups.items():
        if group.ndim != 1 or not len(group):
            raise ValueError(f"{name} must be one score for each example and not empty, got shape {group.shape}.")
        if not np.isfinite(group).all():
            raise ValueError(f"{name} hold NaN or infinity, which cannot be ranked.")
    scores = np.concatenate(list(groups.values()))
    is_ood = np.repeat([0, 1], [len(group) for group in groups.values()])
    # All thresholds: the first that reaches .95 may lie on a straight piece of the curve.
    false_positive_rate, true_positive_rate, _ = roc_curve(is_ood, scores, drop_intermediate=False)
    first = np.argmax(true_positive_rate >= _TRUE_POSITIVE_RATE)
    return {
        "auroc": area_under_roc(*groups.values()),
        "aupr": float(average_precision_score(is_ood, scores)),
        "fpr_at_95_tpr": float(false_positive_rate[first]),
    }
