#!/usr/bin/env python
"""Fine-tune a sigma-norm ensemble for text classification and report it beside a single model trained the same way.

Any text checkpoint and any text-classification dataset: an id on the Hub, or csv, json or parquet files.

    python scripts/run_sst2.py --model_name_or_path google-bert/bert-base-uncased --output_dir outputs/sst2
    accelerate launch scripts/run_sst2.py --train_file train.csv --report_file test.csv --output_dir outputs/mine

A calibration split is carved from the training data for evaluations during training and for a figure to choose by.
The reported split is looked at once, at the end, and never used to choose anything. A run that was killed goes on from
its last checkpoint when it is started again with the same arguments.
"""

import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from datasets import DatasetDict
from rich.console import Console
from rich.table import Table
from text_splits import DataArguments, carve, check_splits, encode, load_splits
from transformers import DataCollatorWithPadding, HfArgumentParser, set_seed

from sigma_nens_hf import SigmaNEnsTrainer, SigmaNEnsTrainingArguments, ensemble_from_pretrained
from sigma_nens_hf.checkpoints import last_complete_checkpoint
from sigma_nens_hf.metrics import (
    accuracy,
    brier_score,
    expected_calibration_error,
    negative_log_likelihood,
    pairwise_disagreement,
)

REPORT_FILE = "report.json"
SETTINGS_FILE = "settings.json"
ADAPTER_FOLDER = "adapter"


@dataclass
class ModelArguments:
    """Which checkpoint becomes which ensemble."""

    model_name_or_path: str = field(
        default="google-bert/bert-base-uncased", metadata={"help": "Model id on the Hub or local folder."}
    )
    model_revision: str | None = field(default=None, metadata={"help": "Revision of the model."})
    num_members: int = field(default=4, metadata={"help": "Number of members M."})
    init_scaler_std: float = field(default=0.1, metadata={"help": "Noise on the members' scalers at the start."})
    member_heads: str | None = field(
        default=None,
        metadata={"help": "'all': the whole head per member; 'shared': one head; default: the last projection."},
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules trained as one copy that members share, such as the pooler."}
    )


@dataclass
class StageReport:
    """What one trained model showed on the reported split.

    Attributes:
        name: "single" or "ensemble".
        num_members: Number of members M.
        accuracy: Share of right predictions.
        nll: Negative log-likelihood in nats.
        calibration_nll: The same on the calibration split, to choose between settings by.
        ece: Expected calibration error, 15 bins.
        brier: Brier score.
        disagreement: Share of examples on which two members differ, mean over pairs.
        seconds: Training time of this process, evaluations included.
        resumed: Whether an earlier process had begun the training, so that `seconds` is only a part.
        adapter_bytes: Size of the stored adapter weights.
        num_examples: Number of reported examples.
    """

    name: str
    num_members: int
    accuracy: float
    nll: float
    calibration_nll: float
    ece: float
    brier: float
    disagreement: float
    seconds: float
    resumed: bool
    adapter_bytes: int
    num_examples: int


def run(
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: SigmaNEnsTrainingArguments,
    splits: DatasetDict | None = None,
) -> list[StageReport]:
    """Train and report the single model, if wanted, and the ensemble.

    Args:
        model_args: Which checkpoint becomes which ensemble.
        data_args: Which examples.
        training_args: How; `output_dir` holds everything that is written.
        splits: Splits "train" and "report" that are at hand already; None: load them.

    Returns:
        One report for every trained model, the ensemble's last. Its adapter is in `output_dir/ensemble/adapter`.
    """
    console = Console(quiet=not training_args.should_log)
    output_dir = Path(training_args.output_dir)
    stages = {"single": 1} if data_args.compare_single and model_args.num_members > 1 else {}
    stages["ensemble"] = model_args.num_members
    with training_args.main_process_first(desc="preparing the run"):
        remember_settings(output_dir, model_args, data_args, training_args)
        splits = check_splits(splits, data_args) if splits is not None else load_splits(data_args)
        splits = carve(splits, data_args, training_args.seed)
    reports = []
    for name, num_members in stages.items():
        report_file = output_dir / name / REPORT_FILE
        if report_file.exists():
            console.print(f"[bold]{name}[/bold]: finished before, see {report_file}")
            reports.append(StageReport(**json.loads(report_file.read_text())))
            continue
        console.rule(f"{name}: {num_members} member{'s' if num_members > 1 else ''}")
        reports.append(train_stage(name, num_members, model_args, data_args, training_args, splits))
    console.print(table_of(reports, training_args.seed))
    return reports


def remember_settings(
    output_dir: Path,
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: SigmaNEnsTrainingArguments,
) -> None:
    """Write down what a folder's run was started with, or check that it is the same now.

    Raises:
        ValueError: The folder holds a run with other settings, which must not be mixed with this one.
    """
    names = [
        "seed", "num_train_epochs", "max_steps", "learning_rate", "scaler_learning_rate",
        "modules_to_save_learning_rate", "diversity_weight", "diversity_temperature", "members_per_feature",
        "diversity_reduction", "diversity_layers", "per_device_train_batch_size", "gradient_accumulation_steps",
        "weight_decay", "warmup_steps", "label_smoothing_factor",
    ]  # fmt: skip
    settings = {
        "model": asdict(model_args),
        "data": asdict(data_args),
        "training": {name: getattr(training_args, name) for name in names},
    }
    settings["model"]["model_name_or_path"] = os.path.basename(model_args.model_name_or_path)
    path = output_dir / SETTINGS_FILE
    if not path.exists():
        output_dir.mkdir(parents=True, exist_ok=True)
        _write_json(path, settings)
        return
    before = json.loads(path.read_text())
    changed = [
        f"{group}.{name}: {before.get(group, {}).get(name)} then, {value} now"
        for group, values in settings.items()
        for name, value in values.items()
        if before.get(group, {}).get(name) != value
    ]
    if changed:
        raise ValueError(
            f"{output_dir} holds a run with other settings ({'; '.join(changed)}). Choose another output folder, or "
            "delete this one to start anew."
        )


def train_stage(
    name: str,
    num_members: int,
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: SigmaNEnsTrainingArguments,
    splits: DatasetDict,
) -> StageReport:
    """Train, store and report one model, going on from its last checkpoint where there is one."""
    stage_dir = Path(training_args.output_dir) / name
    args = SigmaNEnsTrainingArguments(**{**_as_kwargs(training_args), "output_dir": str(stage_dir)})
    args.return_member_logits = True
    args.dataloader_pin_memory = args.dataloader_pin_memory and args.device.type != "cpu"
    labels = splits["train"].features[data_args.label_column].names
    set_seed(args.seed)
    model, tokenizer = ensemble_from_pretrained(
        model_args.model_name_or_path,
        "text-classification",
        num_members=num_members,
        id2label=dict(enumerate(labels)),
        revision=model_args.model_revision,
        init_scaler_std=model_args.init_scaler_std,
        member_heads=[] if model_args.member_heads == "shared" else model_args.member_heads,
        modules_to_save=model_args.modules_to_save,
    )
    with args.main_process_first(desc="tokenising"):
        encoded = encode(splits, tokenizer, data_args)
    trainer = SigmaNEnsTrainer(
        model=model,
        args=args,
        train_dataset=encoded["train"],
        eval_dataset=encoded["calibration"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    checkpoint = last_complete_checkpoint(stage_dir)
    if checkpoint and args.should_log:
        print(f"Going on from {checkpoint}", flush=True)
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.perf_counter() - start
    report = report_stage(name, trainer, encoded, seconds, checkpoint is not None)
    trainer.accelerator.wait_for_everyone()
    if args.should_save:
        _write_json(stage_dir / REPORT_FILE, asdict(report))
    trainer.accelerator.free_memory()
    return report


def report_stage(
    name: str, trainer: SigmaNEnsTrainer, encoded: DatasetDict, seconds: float, resumed: bool
) -> StageReport:
    """Store the adapter and evaluate it on the reported split, once."""
    calibration = trainer.predict(encoded["calibration"], metric_key_prefix="calibration")
    prediction = trainer.predict(encoded["report"], metric_key_prefix="report")
    member_logits = torch.as_tensor(prediction.predictions)
    probabilities = member_logits.double().softmax(-1).mean(1)
    labels = prediction.label_ids
    adapter = Path(trainer.args.output_dir) / ADAPTER_FOLDER
    if trainer.args.should_save:
        # Written beside its place and moved there whole, so that a kill leaves no half adapter.
        unfinished = adapter.with_name(f".{ADAPTER_FOLDER}-unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        trainer.model.save_pretrained(unfinished)
        trainer.processing_class.save_pretrained(unfinished)
        shutil.rmtree(adapter, ignore_errors=True)
        os.replace(unfinished, adapter)
    trainer.accelerator.wait_for_everyone()
    return StageReport(
        name=name,
        num_members=member_logits.shape[1],
        accuracy=accuracy(probabilities, labels),
        nll=negative_log_likelihood(probabilities, labels),
        calibration_nll=calibration.metrics["calibration_nll"],
        ece=expected_calibration_error(probabilities, labels),
        brier=brier_score(probabilities, labels),
        disagreement=pairwise_disagreement(member_logits.argmax(-1)),
        seconds=seconds,
        resumed=resumed,
        adapter_bytes=(adapter / "adapter_model.safetensors").stat().st_size,
        num_examples=len(labels),
    )


def table_of(reports: list[StageReport], seed: int) -> Table:
    """Return the reports as a table, one column for every model."""
    table = Table(
        title=f"{reports[0].num_examples:,} held-out examples, seed {seed}",
        caption="Lower is better but for accuracy. One seed is no evidence for a method.",
    )
    table.add_column("")
    for report in reports:
        table.add_column(f"{report.name} (M={report.num_members})", justify="right")
    rows = {
        "accuracy": lambda report: f"{report.accuracy:.4f}",
        "NLL (nats)": lambda report: f"{report.nll:.4f}",
        "NLL, calibration split": lambda report: f"{report.calibration_nll:.4f}",
        "ECE (15 bins)": lambda report: f"{report.ece:.4f}",
        "Brier score": lambda report: f"{report.brier:.4f}",
        "members disagree on": lambda report: f"{report.disagreement:.4f}" if report.num_members > 1 else "-",
        "training time": lambda report: f"{report.seconds:.0f} s{' (resumed)' if report.resumed else ''}",
        "stored adapter": lambda report: f"{report.adapter_bytes / 1024:,.0f} KiB",
    }
    for name, cell in rows.items():
        table.add_row(name, *map(cell, reports))
    return table


def _as_kwargs(training_args: SigmaNEnsTrainingArguments) -> dict:
    """The fields that the arguments were made with; `replace` would trip over fields that are derived."""
    return {name: value for name, value in vars(training_args).items() if name in training_args.__dataclass_fields__}


def _write_json(path: Path, content: dict) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=2, default=str))
    os.replace(unfinished, path)


def main() -> None:
    """Parse the command line, or one json file with the same names, and run."""
    parser = HfArgumentParser((ModelArguments, DataArguments, SigmaNEnsTrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, data_args, training_args = parser.parse_json_file(json_file=sys.argv[1])
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    run(model_args, data_args, training_args)


if __name__ == "__main__":
    main()
