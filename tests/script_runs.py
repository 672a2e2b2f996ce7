"""Tiny data and command lines for both scripts: everything runs through their own parser, as a user's run does."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import run_imagenet_vit
import run_sst2
import stages
import tiny
from datasets import ClassLabel, Dataset

SCRIPTS = {"text": run_sst2, "image": run_imagenet_vit}
NUM_TRAIN, NUM_REPORT = 60, 21
WORDS = {"positive": ["good", "fine", "very good"], "negative": ["bad", "dull", "very dull"]}
COLOURS = {"blue": (40, 60, 220), "green": (60, 210, 40), "red": (220, 50, 60)}


def rows(num_examples, offset=0):
    for i in range(offset, offset + num_examples):
        label = "positive" if i % 2 else "negative"
        yield {"text": f"a {WORDS[label][i % 3]} film {'film ' * (i % 4)}", "mood": label}


def coloured_image(i):
    noise = np.random.default_rng(i).normal(scale=20, size=(18 + i % 4, 24, 3))
    return PIL.Image.fromarray((np.array(list(COLOURS.values())[i % 3]) + noise).clip(0, 255).astype(np.uint8))


def text_arguments(folder, checkpoint):
    for name, (count, offset) in {"train": (NUM_TRAIN, 0), "report": (NUM_REPORT, NUM_TRAIN)}.items():
        Dataset.from_list(list(rows(count, offset))).to_csv(folder / f"{name}.csv")
    return [
        "--model_name_or_path", str(checkpoint), "--modules_to_save", "pooler",
        "--train_file", str(folder / "train.csv"), "--report_file", str(folder / "report.csv"),
        "--text_column", "text", "--label_column", "mood", "--class_names", "negative", "positive",
    ]  # fmt: skip


def parquet_folder(folder):
    """Write the texts as the Hub keeps a dataset: several files for a split."""
    label = ClassLabel(names=["negative", "positive"])
    for shard in range(3):
        data = Dataset.from_list(list(rows(NUM_TRAIN // 3, NUM_TRAIN // 3 * shard))).cast_column("mood", label)
        data.to_parquet(folder / f"train-0000{shard}-of-00003.parquet")
    data = Dataset.from_list(list(rows(NUM_REPORT, NUM_TRAIN))).cast_column("mood", label)
    data.to_parquet(folder / "validation-00000-of-00001.parquet")
    return folder


def image_folder(folder):
    """Write train/CLASS/*.png and validation/CLASS/*.png."""
    for split, numbers in {"train": range(NUM_TRAIN), "validation": range(NUM_TRAIN, NUM_TRAIN + NUM_REPORT)}.items():
        for i in numbers:
            path = folder / split / list(COLOURS)[i % 3] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            coloured_image(i).save(path)
    return folder


def image_arguments(folder, checkpoint):
    return ["--model_name_or_path", str(checkpoint), "--dataset_name", str(image_folder(folder / "images"))]


def command_line(kind, folder, checkpoint):
    data = (text_arguments if kind == "text" else image_arguments)(folder, checkpoint)
    return [
        *data, "--output_dir", str(folder / "out"), "--num_train_epochs", "1", "--per_device_train_batch_size", "6",
        "--num_members", "3", "--use_cpu", "True", "--disable_tqdm", "True", "--logging_steps", "5",
        "--save_steps", "4",
    ]  # fmt: skip


def parse(kind, arguments):
    return stages.parse_arguments(SCRIPTS[kind].ARGUMENTS, arguments)


def launch_two_processes(kind, arguments):
    # `accelerate launch --cpu` would start a single one, whatever --num_processes says.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [SCRIPTS[kind].__file__, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(tiny.__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
