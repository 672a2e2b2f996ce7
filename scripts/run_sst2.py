#!/usr/bin/env python
"""Fine-tune a sigma-norm ensemble for text classification and report it beside a single model trained the same way.

Any text checkpoint and any text-classification dataset: an id on the Hub, or csv, json or parquet files.

    python scripts/run_sst2.py --model_name_or_path google-bert/bert-base-uncased --output_dir outputs/sst2
    accelerate launch scripts/run_sst2.py --train_file train.csv --report_file test.csv --output_dir outputs/mine

What is done with them is said in stages.py, which run_imagenet_vit.py shares.
"""

from dataclasses import dataclass, field

from stage_report import StageReport
from stages import ModelArguments, parse_arguments, run

from sigma_nens_hf import SigmaNEnsTrainingArguments
from sigma_nens_hf.data.texts import TextArguments


@dataclass
class TextModelArguments(ModelArguments):
    """Which text checkpoint becomes which ensemble."""

    model_name_or_path: str = field(
        default="google-bert/bert-base-uncased", metadata={"help": "Model id on the Hub or local folder."}
    )


ARGUMENTS = (TextModelArguments, TextArguments, SigmaNEnsTrainingArguments)


def main(argv: list[str] | None = None) -> list[StageReport]:
    """Run with a command line; None: this process's."""
    return run(*parse_arguments(ARGUMENTS, argv))


if __name__ == "__main__":
    main()
