"""Temperature scaling of a single model and of the pooled ensemble."""

import math
import warnings
from typing import NamedTuple

import torch
from torch import nn

from .labels import SINGLE_LABEL
from .members import active_config, base_model_of, problem_type_of
from .metrics.checks import ArrayLike, as_array, checked_labels

# A temperature outside of these says that the split could not tell, not that a model is that wrong.
_LOWEST_LOGIT = -1e8
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.05, 20.0


class TemperatureFit(NamedTuple):
    """A temperature and what it did for the split that it was fitted on.

    Attributes:
        temperature: T; above 1 it makes predictions less sure, below 1 surer.
        nll_before: Negative log-likelihood at T = 1, in nats.
        nll_after: The same at T; never higher.
        num_examples: Size of the split.
    """

    temperature: float
    nll_before: float
    nll_after: float
    num_examples: int


def fit_temperature(logits: ArrayLike, labels: ArrayLike) -> TemperatureFit:
    r"""Fit the softmax temperature T that minimises the negative log-likelihood of held-out examples.

    $$\min_T \; -\tfrac1N \sum_n \log \mathrm{softmax}(z_n / T)_{y_n}, \qquad .05 \le T \le 20$$

    It is convex in 1 / T, so its slope there, mean of E_p[z] - z_y, has one root, found in log T. Accuracy does not
    change. Of an ensemble, z are its `logits`, the logarithm of the mean of the members' probabilities: it is pooled
    first and scaled then.

    Source: C. Guo et al., "On calibration of modern neural networks", 2017 (arXiv 1706.04599); pooling first:
    R. Rahaman, A. Thiery, "Uncertainty quantification and deep ensembles", 2021 (arXiv 2007.08792). The bounds are
    this package's own.

    Args:
        logits: (N, C), of one model or of the ensemble; examples that were not trained on.
        labels: (N,), class indices.

    Returns:
        The fit. Where the split cannot tell a temperature (every prediction right, one class, constant logits) it ends
        at a bound or at 1, with a warning.

    Raises:
        ValueError: The input is no set of finite logits with labels, or holds probabilities.
    """
    z = torch.as_tensor(as_array(logits)).double()
    if z.dim() != 2 or not z.numel():
        raise ValueError(f"Expected logits (N, C) with N > 0, got shape {tuple(z.shape)}.")
    if not torch.isfinite(z).all():
        raise ValueError("The logits hold NaN or infinity.")
    y = torch.as_tensor(checked_labels(labels, *z.shape))[:, None]
    if z.shape[1] > 1 and (z >= 0).all() and torch.allclose(z.sum(1), torch.ones(len(z), dtype=z.dtype), atol=1e-3):
        raise ValueError("These are probabilities, not logits; pass their logarithms.")
    # Below the lower bound the label's probability is 0 at every temperature, and differences may exceed all numbers.
    z = (z - z.amax(1, keepdim=True)).clamp_min(_LOWEST_LOGIT)

    def nll(temperature: float) -> float:
        return -(z / temperature).log_softmax(1).gather(1, y).mean().item()

    def slope(log_temperature: float) -> float:
        """Slope of the NLL in 1 / T."""
        expected = ((z * math.exp(-log_temperature)).softmax(1) * z).sum(1)
        return (expected - z.gather(1, y)[:, 0]).mean().item()

    low, high = math.log(LOWEST_TEMPERATURE), math.log(HIGHEST_TEMPERATURE)
    if not z.any():
        _warn("every example has the same logit for all classes", "it stays 1")
        temperature = 1.0
    elif slope(low) <= 0:
        _warn("it has no error that would speak for less confidence", f"it is held at {LOWEST_TEMPERATURE}")
        temperature = LOWEST_TEMPERATURE
    elif slope(high) >= 0:
        _warn("the logits say nothing of its labels, or the wrong thing", f"it is held at {HIGHEST_TEMPERATURE}")
        temperature = HIGHEST_TEMPERATURE
    else:
        if (y == y[0]).all():
            _warn("all of its labels are the same", "it may not hold for other classes")
        # Here, since it would add to the import of the package.
        from scipy.optimize import brentq

        temperature = math.exp(brentq(slope, low, high, xtol=1e-10))
    before, after = nll(1.0), nll(temperature)
    if after > before:  # by rounding, where the optimum is 1
        temperature, after = 1.0, before
    return TemperatureFit(temperature, before, after, len(z))


def use_calibration(model: nn.Module, enabled: bool = True) -> None:
    """Let an ensemble's `logits` be calibrated with the temperature that its adapter stores, or leave that again.

    The temperature T acts on the pooled prediction: `logits` become the log-softmax of log p / T, whose softmax is the
    calibrated prediction. `member_logits`, and with them votes and the parts of the uncertainty, stay as they are. T
    was fitted for all members together; it is used unchanged for a subset of them, and a member taken out has none.

    Args:
        model: The ensemble.
        enabled: Whether to calibrate.

    Raises:
        ValueError: The model is no ensemble, its adapter has no `calibration_temperature`, or it is for multiple labels
            or regression, where there is no softmax.
    """
    if enabled:
        check_can_be_calibrated(model)
    active_config(base_model_of(model)).use_calibration(enabled)


def temperature_in_use(model: nn.Module) -> float:
    """Return the temperature that an ensemble's `logits` are calibrated with, 1 where they are not.

    Args:
        model: The ensemble.

    Raises:
        ValueError: The model is no ensemble.
    """
    return active_config(base_model_of(model)).temperature_in_use


def check_can_be_calibrated(model: nn.Module) -> None:
    """Refuse a model whose prediction is no softmax.

    Args:
        model: The ensemble.

    Raises:
        ValueError: The model is no ensemble, or is for multiple labels or regression.
    """
    problem_type = problem_type_of(base_model_of(model).config)
    if problem_type != SINGLE_LABEL:
        raise ValueError(f"Temperature scaling is for single labels, this model is for {problem_type}.")


def _warn(reason: str, consequence: str) -> None:
    message = f"The calibration split does not tell a temperature, since {reason}; {consequence}."
    warnings.warn(message, stacklevel=3)
