"""Calibrated ensembles over one frozen backbone, as a PEFT method.

Importing this package registers the method ``SIGMA_NORM`` with peft.
"""

from .calibration import TemperatureFit, fit_temperature, temperature_in_use, use_calibration
from .config import SigmaNormConfig
from .heads import MemberHead
from .hub import ensemble_from_pretrained, load_ensemble
from .layer import SigmaNormLayer
from .members import member_subset
from .model import SigmaNormModel, extract_mean, extract_member
from .peft_hub import install_push_to_hub
from .prediction import MultiLabelPrediction, Prediction, RegressionPrediction, TokenPrediction, predict
from .registration import register
from .regularizer import (
    diversity_regularizer,
    expected_sharing,
    realized_sharing,
    temperature_for_sharing,
)
from .trainer import SigmaNEnsTrainer
from .training_args import SigmaNEnsTrainingArguments
from .uncertainty import UncertaintyDecomposition, decompose_uncertainty
from .version import __version__

register(SigmaNormConfig, SigmaNormModel)
install_push_to_hub()

__all__ = [
    "MemberHead",
    "MultiLabelPrediction",
    "Prediction",
    "RegressionPrediction",
    "SigmaNEnsTrainer",
    "SigmaNEnsTrainingArguments",
    "SigmaNormConfig",
    "SigmaNormLayer",
    "SigmaNormModel",
    "TemperatureFit",
    "TokenPrediction",
    "UncertaintyDecomposition",
    "__version__",
    "decompose_uncertainty",
    "diversity_regularizer",
    "ensemble_from_pretrained",
    "expected_sharing",
    "extract_mean",
    "extract_member",
    "fit_temperature",
    "load_ensemble",
    "member_subset",
    "predict",
    "realized_sharing",
    "temperature_for_sharing",
    "temperature_in_use",
    "use_calibration",
]
