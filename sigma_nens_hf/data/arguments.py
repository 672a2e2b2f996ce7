"""What a run is to know about its data: the arguments, and what differs between texts and images."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from datasets import Dataset, IterableDataset
from torch import nn

Split = Dataset | IterableDataset
CALIBRATION_SAMPLES, STREAMED_CALIBRATION_SAMPLES = 10_000, 1_000
LABEL_COLUMNS = ("label", "labels", "fine_label")


@dataclass
class DataArguments(ABC):
    """Which examples are trained, calibrated and reported on, and how a model takes them.

    Attributes:
        task: Name of the task as in `transformers.pipeline`.
        input_feature: Type of the inputs as a feature of `datasets`.
    """

    dataset_name: str | None = field(
        default=None, metadata={"help": "Dataset id on the Hub or a local folder; ignored with train_file."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    train_file: str | None = field(default=None, metadata={"help": "csv, json or parquet file to train on."})
    report_file: str | None = field(default=None, metadata={"help": "csv, json or parquet file to report on."})
    report_split: str = field(
        default="validation", metadata={"help": "Split of the dataset to report on; several are joined by a +."}
    )
    label_column: str | None = field(
        default=None, metadata={"help": f"Column of the label; default: the first there is of {LABEL_COLUMNS}."}
    )
    class_names: list[str] | None = field(
        default=None,
        metadata={
            "help": "Labels as they stand in the data, in the order of their indices, where the dataset has no class "
            "names of its own. Default: all that occur in the training data, sorted; not known with streaming."
        },
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on this many examples at most."})
    max_report_samples: int | None = field(default=None, metadata={"help": "Report on this many examples at most."})
    calibration_fraction: float = field(
        default=0.1, metadata={"help": "Share of the training data carved off as the calibration split."}
    )
    max_calibration_samples: int | None = field(
        default=None,
        metadata={
            "help": f"Calibrate on this many examples at most. Default: {CALIBRATION_SAMPLES}, with streaming "
            f"{STREAMED_CALIBRATION_SAMPLES}, which are held in memory."
        },
    )
    streaming: bool = field(
        default=False,
        metadata={
            "help": "Read the data while training instead of fetching all of it before; needs max_steps. The "
            "calibration split is chosen by a hash of each example's content, so that it is never trained on."
        },
    )
    shuffle_buffer_size: int = field(
        default=1_000,
        metadata={
            "help": "With streaming: the next example is drawn from this many. Data sorted by class needs a buffer "
            "larger than a class, or must not be streamed."
        },
    )
    compare_single: bool = field(
        default=True, metadata={"help": "Train and report a single model the same way, for comparison."}
    )

    task: ClassVar[str]
    input_feature: ClassVar[Any]

    @property
    def is_augmented(self) -> bool:
        """Whether an example is another one each time that it is trained on."""
        return False

    @abstractmethod
    def input_columns(self, available: list[str]) -> dict[str, str]:
        """Return the columns of the inputs: the name that they get here, and their name in the data.

        Args:
            available: The columns of the data.

        Raises:
            ValueError: There is none.
        """

    @abstractmethod
    def content(self, row: dict[str, Any]) -> bytes:
        """Return what tells an example from others.

        Args:
            row: The example.
        """

    @abstractmethod
    def adjust(self, model: nn.Module, processor: Any) -> Any:
        """Return the processor as this run uses it, which is stored with the adapter.

        Args:
            model: The ensemble.
            processor: The processor that came with the checkpoint.

        Raises:
            ValueError: There is none, or it does not fit the model.
        """

    @abstractmethod
    def encode(self, split: Split, processor: Any, is_training: bool) -> Split:
        """Return a split as the collator takes it.

        Args:
            split: The inputs and their `labels`.
            processor: The adjusted processor.
            is_training: Whether the split is trained on.
        """

    @abstractmethod
    def collator(self, model: nn.Module, processor: Any) -> Callable[[list], dict]:
        """Return what makes a batch of encoded examples.

        Args:
            model: The ensemble.
            processor: The adjusted processor.
        """
