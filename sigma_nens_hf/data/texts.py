"""Texts and pairs of texts as the examples of a run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from datasets import Value
from torch import nn
from transformers import DataCollatorWithPadding

from .arguments import DataArguments, Split
from .splits import choose_column

TEXT, SECOND_TEXT = "text", "text_pair"
TEXT_COLUMNS = ("sentence", "text")


@dataclass
class TextArguments(DataArguments):
    """Which texts are trained, calibrated and reported on."""

    dataset_name: str | None = field(
        default="stanfordnlp/sst2",
        metadata={"help": "Dataset id on the Hub or a local folder; ignored with train_file."},
    )
    text_column: str | None = field(
        default=None, metadata={"help": f"Column of the text; default: the first there is of {TEXT_COLUMNS}."}
    )
    second_text_column: str | None = field(default=None, metadata={"help": "Column of a second text, for pairs."})
    max_seq_length: int = field(default=128, metadata={"help": "Longest input in tokens; the rest is cut off."})

    task: ClassVar[str] = "text-classification"
    input_feature: ClassVar[Any] = Value("string")

    def input_columns(self, available: list[str]) -> dict[str, str]:
        """Find the columns of the texts; see `DataArguments`."""
        columns = {TEXT: choose_column("text", self.text_column, TEXT_COLUMNS, available)}
        return columns | ({SECOND_TEXT: self.second_text_column} if self.second_text_column else {})

    def content(self, row: dict[str, Any]) -> bytes:
        """Return an example's texts; see `DataArguments`."""
        return "\0".join(_without_gaps([row[TEXT], row.get(SECOND_TEXT, "")])).encode()

    def adjust(self, model: nn.Module, processor: Any) -> Any:
        """Return the tokenizer as it is; see `DataArguments`."""
        if processor is None:
            raise ValueError("The checkpoint has no tokenizer. Save the one that it was trained with beside it.")
        return processor

    def encode(self, split: Split, processor: Any, is_training: bool) -> Split:
        """Tokenise a split; see `DataArguments`."""

        def tokenise(batch: dict) -> dict:
            texts, second = _without_gaps(batch[TEXT]), batch.get(SECOND_TEXT)
            second = None if second is None else _without_gaps(second)
            return processor(texts, second, truncation=True, max_length=self.max_seq_length)

        columns = [TEXT, SECOND_TEXT] if self.second_text_column else [TEXT]
        return split.map(tokenise, batched=True, remove_columns=columns)

    def collator(self, model: nn.Module, processor: Any) -> Callable[[list], dict]:
        """Pad to the longest text of a batch; see `DataArguments`."""
        return DataCollatorWithPadding(processor)


def _without_gaps(texts: list[str | None]) -> list[str]:
    if None in texts:
        raise ValueError("The data has rows without a text; an empty field of a csv file is one.")
    return texts
