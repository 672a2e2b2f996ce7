"""Evaluates tiny ensembles on tiny data; run by tests in one process or several."""

import json
import sys
from pathlib import Path

import numpy as np
import tiny
import torch
import transformers
from datasets import ClassLabel, Dataset, Image, List
from PIL import Image as Picture

from sigma_nens_hf import ensemble_from_pretrained
from sigma_nens_hf.cli import app
from sigma_nens_hf.evaluation.data import EvaluationData
from sigma_nens_hf.evaluation.evaluate import accelerator_of_launch, evaluate_dataset

LABELS = {0: "bad", 1: "fair", 2: "good"}
# Architecture and number of examples of every case: no last batch is full, and "few" has fewer than processes.
CASES = {"bert": ("bert", 1_131), "token": ("bert-token", 101), "choice": ("bert-choice", 43), "vit": ("vit", 29),
         "few": ("vit", 5)}  # fmt: skip
BATCH_SIZE = 8


def processor(architecture):
    size = {"height": tiny.IMAGE_SIZE, "width": tiny.IMAGE_SIZE}
    is_image = architecture in tiny.IMAGE_ARCHITECTURES
    return transformers.ViTImageProcessor(size=size) if is_image else tiny.tokenizer()


def ensemble(architecture):
    config = {} if architecture in tiny.CHOICE_ARCHITECTURES else {"id2label": LABELS}
    return tiny.ensemble(architecture, num_members=3, **config)


def save_adapter(folder, architecture="bert", **config):
    """Save a base model and an adapter over it."""
    tiny.base_model(architecture).save_pretrained(folder / "base")
    processor(architecture).save_pretrained(folder / "base")
    model, _ = ensemble_from_pretrained(
        folder / "base", tiny.task(architecture), 3, id2label=LABELS, init_scaler_std=1.0, head_init="fresh", **config
    )
    tiny.make_trainable_parts_random(model)
    model.save_pretrained(folder / "adapter")
    return model


def text(generator):
    return " ".join(generator.choice(tiny.WORDS, generator.integers(1, 9)))


def dataset(architecture, size, seed=0):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, size).tolist()
    names = ClassLabel(names=["Good", "bad", "FAIR"])  # in another order than the model's
    if architecture in tiny.IMAGE_ARCHITECTURES:
        pixels = generator.integers(0, 256, (size, 12, 20, 3), dtype=np.uint8)
        data = Dataset.from_dict({"image": [Picture.fromarray(p) for p in pixels], "label": labels})
        return data.cast_column("image", Image()).cast_column("label", names)
    if architecture in tiny.CHOICE_ARCHITECTURES:
        # Not equally many choices, and a label that all have.
        choices = [[f"{word} {text(generator)}" for word in tiny.WORDS[: 2 + n % 3]] for n in range(size)]
        rows = {"question": [text(generator) for _ in labels], "choices": choices}
        return Dataset.from_dict(rows | {"label": [label % 2 for label in labels]})
    if architecture in tiny.TOKEN_ARCHITECTURES:
        # Some words are several tokens, and some have no label.
        words = [[w if i % 3 else f"{w}.{w}" for i, w in enumerate(text(generator).split())] for _ in labels]
        tags = [[-100 if (n + i) % 5 == 0 else (n + i) % 3 for i in range(len(of))] for n, of in enumerate(words)]
        return Dataset.from_dict({"tokens": words, "ner_tags": tags}).cast_column("ner_tags", List(names))
    rows = {"text": [text(generator) for _ in labels], "label": labels}
    return Dataset.from_dict(rows).cast_column("label", names)


def evaluate(case, folder):
    architecture, size = CASES[case]
    model = ensemble(architecture)
    data = EvaluationData.of(model, dataset(architecture, size))
    return evaluate_dataset(
        model, processor(architecture), data, batch_size=BATCH_SIZE, examples_file=folder / f"{case}.csv"
    )


def figures(evaluation):
    """All figures but the rows, which are in the file."""
    return {
        "member_accuracy": evaluation.member_accuracy.tolist(),
        "member_nll": evaluation.member_nll.tolist(),
        "classwise_calibration_error": evaluation.classwise_calibration_error,
        "num_words_cut_off": evaluation.num_words_cut_off,
        "sums": {name: float(column.sum()) for name, column in evaluation.table.columns().items()},
    }


def failure():
    """What is raised when one of the images cannot be read, which a single process finds out."""
    data = dataset("vit", 29).cast_column("image", Image(decode=False))
    rows = [row | {"image": {"bytes": b"no image", "path": None}} if n == 7 else row for n, row in enumerate(data)]
    model = ensemble("vit")
    data = EvaluationData.of(model, Dataset.from_list(rows, features=data.features))
    try:
        evaluate_dataset(model, processor("vit"), data, batch_size=BATCH_SIZE)
    except ValueError as error:
        return str(error)


def run(folder, command_line):
    process = accelerator_of_launch().process_index
    # The failure first: what comes after it shows that the processes have not lost each other.
    found = {"failure": failure(), **{case: figures(evaluate(case, folder)) for case in CASES}}
    (folder / f"figures-{process}.json").write_text(json.dumps(found))
    app(command_line, standalone_mode=False)


def main():
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    main()
