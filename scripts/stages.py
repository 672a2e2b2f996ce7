"""The stages of a run, whatever its data: a single model and an ensemble, trained the same way, stored and reported.

A calibration split is carved from the training data for evaluations during training and for a figure to choose by.
The reported split is looked at once, at the end, and never used to choose anything. A run that was killed goes on from
its last checkpoint when it is started again with the same arguments.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from class_order import head_init_for
from rich.console import Console
from stage_report import StageReport, evaluate_report, load_examples, save_examples, table_of
from transformers import HfArgumentParser, set_seed

from sigma_nens_hf import SigmaNEnsTrainer, SigmaNEnsTrainingArguments, SigmaNormConfig, ensemble_from_pretrained
from sigma_nens_hf.checkpoints import last_complete_checkpoint
from sigma_nens_hf.data.arguments import DataArguments, Split
from sigma_nens_hf.data.splits import LABELS, carve, check_splits, load_splits, unseen_classes
from sigma_nens_hf.run_settings import remember_settings, write_json

REPORT_FILE, EXAMPLES_FILE = "report.json", "examples.npz"
ADAPTER_FOLDER = "adapter"


@dataclass
class ModelArguments:
    """Which checkpoint becomes which ensemble."""

    model_name_or_path: str = field(metadata={"help": "Model id on the Hub or local folder."})
    model_revision: str | None = field(default=None, metadata={"help": "Revision of the model."})
    num_members: int = field(default=4, metadata={"help": "Number of members M."})
    init_scaler_std: float = field(default=0.1, metadata={"help": "Noise on the members' scalers at the start."})
    gate_depth: float = field(
        default=SigmaNormConfig.gate_depth, metadata={"help": "Largest share of a feature that a gate takes away."}
    )
    train_scale: bool = field(
        default=SigmaNormConfig.train_scale, metadata={"help": "Whether members' norms train a scale they share."}
    )
    member_heads: Literal["last", "all", "shared"] = field(
        default="last",
        metadata={
            "help": "What of the head every member has for its own: its last projection, all of it, or nothing, so "
            "that members share one head. With many classes member heads outweigh everything else in the adapter."
        },
    )
    head_init: Literal["auto", "fresh", "copy"] = field(
        default="auto",
        metadata={
            "help": "How heads start: copied from the checkpoint, fresh, or copied only if the checkpoint brings a "
            "head with the dataset's classes in the dataset's order."
        },
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules trained as one copy that members share, such as the pooler."}
    )
    branch_layer: int | None = field(
        default=None,
        metadata={
            "help": "First block of the ensemble that carries members, counted from 0; the blocks before it run once "
            "for all members. The single model has tuned norms at every depth."
        },
    )
    prefix: Literal["frozen", "shared", "staged"] = field(
        default="frozen",
        metadata={
            "help": "The norms before branch_layer: left as they are, trained as one copy, or first tuned as one "
            "model's and then frozen."
        },
    )


def parse_arguments(
    classes: Sequence[type], argv: list[str] | None = None, defaults: dict[str, Any] | None = None
) -> tuple[Any, ...]:
    """Parse a command line, or one json file with the same names.

    Args:
        classes: The dataclasses of the arguments.
        argv: The command line without the program; None: this process's.
        defaults: Values that take the place of the dataclasses' own defaults.

    Returns:
        One instance of every class.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = HfArgumentParser(classes)
    if len(argv) == 1 and argv[0].endswith(".json"):
        return parser.parse_dict({**(defaults or {}), **json.loads(Path(argv[0]).read_text())})
    parser.set_defaults(**(defaults or {}))
    return parser.parse_args_into_dataclasses(argv)


def run(
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: SigmaNEnsTrainingArguments,
    splits: dict[str, Split] | None = None,
) -> list[StageReport]:
    """Train and report the single model, if wanted, and the ensemble.

    Args:
        model_args: Which checkpoint becomes which ensemble.
        data_args: Which examples.
        training_args: How; `output_dir` holds everything that is written.
        splits: Splits "train" and "report" that are at hand already; None: load them.

    Returns:
        One report for every trained model, the ensemble's last. Its adapter is in `output_dir/ensemble/adapter`.

    Raises:
        ValueError: The data cannot be right, data is streamed without `max_steps`, or `output_dir` holds another run.
    """
    if data_args.streaming and training_args.max_steps < 1:
        raise ValueError("A stream has no length that would tell when to stop training: with streaming pass max_steps.")
    console = Console(quiet=not training_args.should_log)
    output_dir = Path(training_args.output_dir)
    stages = {"single": 1} if data_args.compare_single and model_args.num_members > 1 else {}
    stages["ensemble"] = model_args.num_members
    with training_args.main_process_first(desc="preparing the run"):
        splits = check_splits(splits, data_args) if splits is not None else load_splits(data_args)
        splits = carve(splits, data_args, training_args.seed)
        has_begun = any(output_dir.glob("*/checkpoint-*")) or any(output_dir.glob(f"*/{REPORT_FILE}"))
        remember_settings(output_dir, _settings_of(model_args, data_args, training_args), has_begun)
    if model_args.head_init == "auto":
        head_init, message = head_init_for(
            model_args.model_name_or_path, model_args.model_revision, _class_names(splits)
        )
        model_args = replace(model_args, head_init=head_init)
        if message:
            console.print(message)
    unseen = unseen_classes(splits)
    if unseen:
        console.print(f"No training example has the label {', '.join(unseen)}.")
    reports = []
    for name, num_members in stages.items():
        report_file = output_dir / name / REPORT_FILE
        if report_file.exists():
            console.print(f"[bold]{name}[/bold]: finished before, see {report_file}")
            reports.append(StageReport(**json.loads(report_file.read_text())))
            continue
        console.rule(f"{name}: {num_members} member{'s' if num_members > 1 else ''}")
        reports.append(train_stage(name, num_members, model_args, data_args, training_args, splits))
    if training_args.should_log:
        examples = [load_examples(output_dir / name / EXAMPLES_FILE) for name in stages]
        console.print(table_of(reports, examples, training_args.seed))
    return reports


def _settings_of(
    model_args: ModelArguments, data_args: DataArguments, training_args: SigmaNEnsTrainingArguments
) -> dict[str, dict[str, Any]]:
    """Return the settings that two runs must share to be one."""
    names = [
        "seed", "num_train_epochs", "max_steps", "learning_rate", "scaler_learning_rate", "scale_learning_rate",
        "modules_to_save_learning_rate", "diversity_weight", "diversity_temperature", "members_per_feature",
        "diversity_reduction", "diversity_layers", "per_device_train_batch_size", "gradient_accumulation_steps",
        "weight_decay", "warmup_steps", "label_smoothing_factor", "prefix_epochs", "prefix_dropout",
    ]  # fmt: skip
    settings = {
        "model": asdict(model_args),
        "data": asdict(data_args),
        "training": {name: getattr(training_args, name) for name in names},
    }
    settings["model"]["model_name_or_path"] = os.path.basename(model_args.model_name_or_path)
    del settings["data"]["compare_single"]  # whether there is another stage changes nothing about this one
    files = [Path(file) for file in (data_args.train_file, data_args.report_file) if file]
    settings["files"] = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    return settings


def train_stage(
    name: str,
    num_members: int,
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: SigmaNEnsTrainingArguments,
    splits: dict[str, Split],
) -> StageReport:
    """Train, store and report one model, going on from its last checkpoint where there is one."""
    stage_dir = Path(training_args.output_dir) / name
    args = stage_arguments(training_args, stage_dir)
    set_seed(args.seed)
    branch = {}
    if num_members > 1 and model_args.branch_layer is not None:
        branch = {"branch_layer": model_args.branch_layer, "prefix": model_args.prefix}
    else:
        args.prefix_cache = None  # there is no prefix
    model, processor = ensemble_from_pretrained(
        model_args.model_name_or_path,
        data_args.task,
        num_members=num_members,
        id2label=dict(enumerate(_class_names(splits))),
        revision=model_args.model_revision,
        init_scaler_std=model_args.init_scaler_std,
        gate_depth=model_args.gate_depth,
        train_scale=model_args.train_scale,
        member_heads={"last": None, "all": "all", "shared": []}[model_args.member_heads],
        head_init=model_args.head_init,
        modules_to_save=model_args.modules_to_save,
        **branch,
    )
    processor = data_args.adjust(model, processor)
    with args.main_process_first(desc="encoding"):
        train = data_args.encode(splits["train"], processor, is_training=True)
        calibration = data_args.encode(splits["calibration"], processor, is_training=False)
    trainer = SigmaNEnsTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=calibration,
        processing_class=processor,
        data_collator=data_args.collator(model, processor),
    )
    checkpoint = last_complete_checkpoint(stage_dir)
    if checkpoint and args.should_log:
        print(f"Going on from {checkpoint}", flush=True)
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.perf_counter() - start
    fit = trainer.calibrate(calibration)  # stored with the adapter, used when asked for
    figures, examples = evaluate_report(trainer, splits["report"], data_args, fit)
    report = StageReport(
        name=name,
        seconds=seconds,
        resumed=checkpoint is not None,
        adapter_bytes=store_adapter(trainer),
        **figures,
    )
    if args.should_save:
        save_examples(stage_dir / EXAMPLES_FILE, examples)
        write_json(stage_dir / REPORT_FILE, asdict(report))  # the last thing: where it is, the stage is finished
    trainer.accelerator.free_memory()
    return report


def stage_arguments(training_args: SigmaNEnsTrainingArguments, stage_dir: Path) -> SigmaNEnsTrainingArguments:
    """Return the training arguments of one stage."""
    # The fields that the arguments were made with; `replace` would trip over fields that are derived.
    given = {name: value for name, value in vars(training_args).items() if name in training_args.__dataclass_fields__}
    args = SigmaNEnsTrainingArguments(**{**given, "output_dir": str(stage_dir)})
    args.return_member_logits = True
    # Encoded examples hold what the collator needs, which is not always what the model is called with.
    args.remove_unused_columns = False
    args.dataloader_pin_memory = args.dataloader_pin_memory and args.device.type != "cpu"
    if args.accelerator_config.dispatch_batches is None:
        # Else the main process makes the batches of a stream for all, and texts of different lengths do not fit.
        args.accelerator_config.dispatch_batches = False
    return args


def store_adapter(trainer: SigmaNEnsTrainer) -> int:
    """Store the adapter and its processor, and return the size of its weights in bytes."""
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
    return (adapter / "adapter_model.safetensors").stat().st_size


def _class_names(splits: dict[str, Split]) -> list[str]:
    return splits["calibration"].features[LABELS].names
