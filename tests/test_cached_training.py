import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset
from PIL import Image
from safetensors.torch import load_file, save_file
from test_late_branching import WITHOUT_CHOICES, representatives
from test_late_branching import late as late_without_dropout
from test_trainer import dataset, step_logs, trained, trainer_for
from transformers import DataCollatorForTokenClassification, DataCollatorWithPadding, TrainerCallback

from sigma_nens_hf import cached_training
from sigma_nens_hf.blocks import block_names
from sigma_nens_hf.cached_training import training_from_cache
from sigma_nens_hf.members import base_model_of
from sigma_nens_hf.prefix_cache import PART_SIZE

NUM_EXAMPLES = 16


def late(architecture, branch_layer=1, base=None, dtype=None, **config):
    model = tiny.base_model(architecture, **(base or {}))  # dropout is on, behind the branch it acts
    return tiny.adapt(model if dtype is None else model.to(dtype), branch_layer=branch_layer, **config)


def text_dataset(architecture="bert", num_examples=NUM_EXAMPLES, padding="right", padded=False):
    """Texts of different length; cut off where their tokens end, or padded to one length."""
    rows = dataset(architecture, num_examples).with_format(None).to_list()
    for row in rows:
        length = sum(row["attention_mask"])
        for name, value in row.items():
            if isinstance(value, list):
                kept, rest = value[:length], value[length:] if padded else []
                row[name] = kept + rest if padding == "right" else rest + kept
        if padding == "left" and not padded:
            row["left"] = True
    return Dataset.from_list(rows).with_format("torch")


def collator_for(data):
    tokenizer = tiny.tokenizer()
    tokenizer.padding_side = "left" if "left" in data.column_names else "right"
    has_token_labels = "labels" in data.column_names and torch.as_tensor(data[0]["labels"]).dim()
    return (DataCollatorForTokenClassification if has_token_labels else DataCollatorWithPadding)(tokenizer)


def cached_trainer(model, folder, data, collator=None, trainer_kwargs=None, **arguments):
    if collator is None and "input_ids" in data.column_names:
        collator = collator_for(data)
    kwargs = {} if collator is None else {"data_collator": collator}
    settings = {"prefix_dropout": False, "prefix_cache": str(Path(folder, "cache")), **arguments}
    return trainer_for(model, folder, data, {**kwargs, **(trainer_kwargs or {})}, **settings)


def cached(trainer):
    return training_from_cache(trainer)


def keys_in(folder):
    return sorted(os.listdir(Path(folder, "cache")))


def parts_in(folder):
    (key,) = keys_in(folder)
    return sorted(Path(folder, "cache", key).iterdir())


class CountRows(TrainerCallback):
    """Counts what the first block sees in training."""

    def __init__(self, model):
        self.rows, self.is_counting = [], False
        base = base_model_of(model)
        block = base.get_submodule(block_names(base)[0])
        block.register_forward_hook(lambda module, args, output: self._note(output))

    def on_train_begin(self, *_, **kwargs):
        self.is_counting = True

    def _note(self, output):
        states = output if isinstance(output, torch.Tensor) else output[0]
        if self.is_counting and torch.is_grad_enabled():
            self.rows.append(len(states))


def compare(make_model, folder, data, tolerance=1e-4, evaluates=False, **arguments):
    """Train with a cache and without, and compare every step and all that was trained."""
    runs = {}
    for name, extra in {"cached": {}, "plain": {"prefix_cache": None}}.items():
        model = make_model()
        count = CountRows(model)
        trainer = cached_trainer(model, folder / name, data, **{**arguments, **extra})
        trainer.add_callback(count)
        trainer.train()
        metrics = trainer.evaluate() if evaluates else {}
        runs[name] = (step_logs(trainer), trained(model), metrics, count.rows)
    (logs, weights, metrics, rows), (plain_logs, plain_weights, plain_metrics, plain_rows) = runs.values()
    assert len(logs) == len(plain_logs) > 0
    for step, expected in zip(logs, plain_logs, strict=True):
        for key in ("loss", "grad_norm", "task_loss"):
            assert step[key] == pytest.approx(expected[key], rel=10 * tolerance, abs=1e-5), key
    for name, weight in plain_weights.items():
        assert (weights[name] - weight).abs().max() < 20 * tolerance * weight.abs().max().clamp_min(1), name
    assert bool(metrics) == evaluates
    for key in metrics.keys() & {"eval_nll", "eval_accuracy"}:
        assert metrics[key] == pytest.approx(plain_metrics[key], rel=1e-3)
    return rows, plain_rows


@pytest.mark.parametrize("architecture", representatives(WITHOUT_CHOICES, ("bert", "swin")))
def test_cached_training_equals_training_without_a_cache(architecture, tmp_path):
    is_text = architecture in tiny.TEXT_ARCHITECTURES
    data = text_dataset(architecture) if is_text else dataset(architecture)
    rows, plain_rows = compare(lambda: late(architecture), tmp_path, data, evaluates=True, max_steps=3)
    assert set(rows) == {1}
    assert set(plain_rows) == {4}


@pytest.mark.parametrize("architecture", ["roberta-token", "bert-token"])
@pytest.mark.parametrize("padding", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_padding_on_either_side(architecture, padding, tmp_path):
    """Where positions are counted from the first token, or all texts have one length."""
    data = text_dataset(architecture, padding=padding, padded=architecture == "bert-token")
    compare(lambda: late(architecture), tmp_path, data, max_steps=3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"remove_unused_columns": False},
        {"train_sampling_strategy": "group_by_length"},
        pytest.param({"dataloader_num_workers": 2}, marks=pytest.mark.slow),
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        {"member_chunk_size": 3},
        pytest.param({"label_smoothing_factor": 0.2}, marks=pytest.mark.slow),
        pytest.param({"eval_strategy": "steps", "eval_steps": 1}, marks=pytest.mark.slow),
        pytest.param({"activation_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param({"dataloader_drop_last": True, "per_device_train_batch_size": 5}, marks=pytest.mark.slow),
    ],
    ids=lambda arguments: next(iter(arguments)),
)
@pytest.mark.parametrize("architecture", ["bert", pytest.param("vit", marks=pytest.mark.slow)])
def test_arguments_mean_what_they_mean_without_a_cache(arguments, architecture, tmp_path):
    if architecture == "bert" or "train_sampling_strategy" not in arguments:
        data = text_dataset() if architecture == "bert" else dataset("vit")
        # The masks of dropout are drawn for each chunk and each micro-batch.
        make_model = partial(late_without_dropout, architecture)
        compare(make_model, tmp_path / architecture, data, max_steps=2, **arguments)


@pytest.mark.slow
def test_autocast_to_sixteen_bits(tmp_path):
    for architecture in ("bert", "vit"):
        data = text_dataset() if architecture == "bert" else dataset("vit")
        compare(
            partial(late_without_dropout, architecture),
            tmp_path / architecture,
            data,
            1e-4,
            bf16=True,
            max_steps=2,
            scaler_learning_rate=1e-3,
        )


@pytest.mark.slow
def test_columns_and_formats_that_a_dataset_may_have(tmp_path):
    data = text_dataset()
    extra = data.add_column("note", ["x"] * len(data))
    tokens = data.with_format(None)

    def tokenise(rows):
        return {name: rows[name] for name in ("input_ids", "attention_mask", "labels")}

    variants = {
        "label": data.rename_column("labels", "label"),
        "note": extra,
        "columns": extra.with_format("torch", columns=["input_ids", "attention_mask", "labels"]),
        "transform": tokens.with_transform(tokenise),
        "indices": data.select(range(len(data) - 1, -1, -1)),
        "plain": tokens,
    }
    for name, rows in variants.items():
        remove = name != "transform"
        found, plain = compare(lambda: late("bert"), tmp_path / name, rows, max_steps=2, remove_unused_columns=remove)
        assert set(found) == {1}, name
        assert set(plain) == {4}


def test_images_made_by_a_transform(tmp_path):
    data = dataset("vit").with_format(None)

    def transform(rows):
        return {"pixel_values": [torch.tensor(p) * 2 for p in rows["pixel_values"]], "labels": rows["labels"]}

    data = data.with_transform(transform)
    rows, _ = compare(lambda: late("vit"), tmp_path, data, max_steps=2, remove_unused_columns=False)
    assert set(rows) == {1}


def test_tuned_prefix_is_cached_for_the_second_stage_and_found_again_on_resuming(tmp_path):
    def trainer(folder, **arguments):
        return cached_trainer(
            late("bert", prefix="staged"), folder, text_dataset(), save_strategy="steps", save_steps=2, **arguments
        )

    plain = trainer(tmp_path / "plain", prefix_cache=None)
    plain.train()
    whole = trainer(tmp_path / "whole")
    whole.train()
    assert len(keys_in(tmp_path / "whole")) == 1
    for step, expected in zip(step_logs(whole), step_logs(plain), strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    resumed = trainer(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=True)
    assert keys_in(tmp_path / "resumed") == keys_in(tmp_path / "whole")
    for name, weight in trained(whole.model).items():
        assert torch.equal(trained(resumed.model)[name], weight), name


def many(num_examples=2 * PART_SIZE + 9):
    return Dataset.from_list(
        [{"input_ids": [5 + (7 * i + j) % 50 for j in range(2 + i % 4)], "attention_mask": [1] * (2 + i % 4),
          "labels": i % 3} for i in range(num_examples)]
    )  # fmt: skip


def build(folder, data=None, model=None, **arguments):
    data = many() if data is None else data
    model = late("bert", base={"attention_probs_dropout_prob": 0.0}) if model is None else model
    trainer = cached_trainer(model, folder, data, per_device_eval_batch_size=64, **arguments)
    with cached(trainer):
        pass
    return trainer


def test_killed_build_is_completed_and_equals_an_uninterrupted_one(tmp_path, monkeypatch, capsys):
    build(tmp_path / "whole")
    assert "Prefix cache: " in capsys.readouterr().out
    write, calls = cached_training.PrefixCache.write_part, []

    def killed(self, part, *values):
        calls.append(part)
        if len(calls) == 2:
            raise KeyboardInterrupt
        write(self, part, *values)

    with monkeypatch.context() as patch:
        patch.setattr(cached_training.PrefixCache, "write_part", killed)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "killed")
    assert [path.name for path in parts_in(tmp_path / "killed")] == ["part-000000.safetensors"]
    first = parts_in(tmp_path / "killed")[0].stat().st_mtime_ns
    build(tmp_path / "killed")
    assert "for 265 of 521 examples" in capsys.readouterr().out
    assert parts_in(tmp_path / "killed")[0].stat().st_mtime_ns == first
    assert_same_parts(tmp_path)
    build(tmp_path / "killed")
    assert "Prefix cache" not in capsys.readouterr().out  # nothing is left to be done


def assert_same_parts(folder):
    whole, killed = parts_in(folder / "whole"), parts_in(folder / "killed")
    assert [path.name for path in whole] == [path.name for path in killed]
    assert [path.read_bytes() for path in whole] == [path.read_bytes() for path in killed]


def test_damaged_parts_are_computed_again(tmp_path):
    build(tmp_path / "whole")
    build(tmp_path / "killed")
    first, second, third = parts_in(tmp_path / "killed")
    first.write_bytes(first.read_bytes()[:-100])
    second.write_bytes(b"")
    save_file(load_file(third), third)  # in form like one, but from elsewhere
    build(tmp_path / "killed")
    assert_same_parts(tmp_path)


def test_size_is_said_before_anything_is_built(tmp_path, capsys, monkeypatch):
    data = many(40)

    def too_soon(*_):
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(cached_training.PrefixCache, "write_part", too_soon)
        with pytest.raises(AssertionError):
            build(tmp_path, data)
    size = sum(len(row["input_ids"]) for row in data) * tiny.HIDDEN_SIZE * 4
    line = f"Prefix cache: {size / 2**20:,.1f} MiB for 40 of 40 examples in {tmp_path / 'cache'}"
    assert line in capsys.readouterr().out
    build(tmp_path, data)
    (part,) = parts_in(tmp_path)
    assert size < part.stat().st_size < size + 5_000


def test_disk_that_is_too_small_is_refused_and_nothing_is_left(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        trainer = cached_trainer(late("bert"), tmp_path, text_dataset())
        with pytest.raises(
            ValueError, match=r"The prefix cache takes .* MiB for 16 of 16 examples .* but only 0.0 MiB"
        ):
            trainer.train()
    assert not [path for path in Path(tmp_path, "cache").rglob("*") if path.is_file()]
    trainer.train()
    assert trainer.state.global_step == 4


def without_mask(examples):
    batch = collator_for(text_dataset("bert-token"))(examples)
    return {name: tensor for name, tensor in batch.items() if name != "attention_mask"}


def seldom_random_collator(examples):
    pixels = torch.stack([row["pixel_values"] for row in examples])
    # Of one example alone, so none that was looked at first.
    pixels[[row["labels"].item() == 2 for row in examples]] *= torch.rand(1)
    return {"pixel_values": pixels, "labels": torch.stack([row["labels"] for row in examples])}


def stacking_collator(examples):
    return {name: torch.stack([row[name] for row in examples]) for name in ("input_ids", "attention_mask", "labels")}


def random_collator(examples):
    return {
        "pixel_values": torch.stack([row["pixel_values"] for row in examples]).flip(-1) * torch.rand(1),
        "labels": torch.stack([row["labels"] for row in examples]),
    }


@pytest.mark.parametrize(
    ("model", "data", "arguments", "message"),
    [
        (
            lambda: late("vit"),
            lambda: dataset("vit"),
            {"collator": random_collator},
            "augmentation off",
        ),
        (lambda: late("bert"), text_dataset, {"prefix_dropout": True}, "prefix_dropout=False"),
        (lambda: late("bert", prefix="shared"), text_dataset, {}, "before branch_layer is trained"),
        (
            lambda: late("bert", modules_to_save=["embeddings.word_embeddings"]),
            text_dataset,
            {},
            "before branch_layer is trained",
        ),
        (
            lambda: late("deberta_v3", modules_to_save=["rel_embeddings"]),
            lambda: text_dataset("deberta_v3"),
            {},
            r"before branch_layer is trained \(deberta.encoder.rel_embeddings",
        ),
        (lambda: late("bert"), text_dataset, {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        (lambda: late("bert"), text_dataset, {"collator": stacking_collator}, "cannot be joined in one batch: stack"),
        (lambda: late("bert", None), text_dataset, {}, "give it a branch_layer"),
        (lambda: late("bert-choice"), lambda: dataset("bert-choice"), {}, "multiple choice can have no cache"),
        (lambda: late("bert"), lambda: text_dataset().to_iterable_dataset(), {}, "got IterableDataset"),
        (lambda: late("bert"), lambda: list(text_dataset()), {}, "got list. datasets.Dataset.from_list makes one"),
        (lambda: late("bert"), lambda: text_dataset(padding="left"), {}, "by the features of padding"),
        (
            lambda: late("bert-token"),
            lambda: text_dataset("bert-token", padding="left"),
            {},
            "padded further, as with padding on the left",
        ),
        (lambda: late("bert-token"), lambda: text_dataset("bert-token"), {"collator": without_mask}, "padded further"),
    ],
)
def test_what_cannot_be_cached_is_refused(model, data, arguments, message, tmp_path):
    model, data = model(), data()
    if not isinstance(data, Dataset):
        arguments = {"collator": collator_for(text_dataset()), **arguments}
        data_of_trainer = data
        trainer = cached_trainer(model, tmp_path, text_dataset(), **arguments)
        trainer.train_dataset = data_of_trainer
    else:
        trainer = cached_trainer(model, tmp_path, data, **arguments)
    before = trained(model)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert not Path(tmp_path, "cache").exists()
    assert all(torch.equal(before[name], weight) for name, weight in trained(model).items())


def test_staged_training_is_refused_before_its_first_stage_where_it_cannot_be_cached(tmp_path):
    with pytest.warns(UserWarning, match="cannot be repeated"):
        model = tiny.ensemble("llama", branch_layer=1, prefix="staged")
    trainers = {"can have no cache": cached_trainer(model, tmp_path, text_dataset("llama"))}
    for message, arguments in {
        "prefix_dropout=False": {"prefix_dropout": True},
        "padded on the left": {"data": text_dataset(padding="left")},
        "word_embeddings": {"model": late("bert", prefix="staged", modules_to_save=["word_embeddings"])},
    }.items():
        arguments = {"model": late("bert", prefix="staged"), "data": text_dataset(), **arguments}
        trainers[message] = cached_trainer(folder=tmp_path, **arguments)
    for message, trainer in trainers.items():
        with pytest.raises(ValueError, match=message):
            trainer.train()
    assert not Path(tmp_path, "prefix").exists()


def test_cache_changes_no_random_number_of_the_training(tmp_path):
    """Whether it is built, found, or damaged: dropout behind the branch is the same."""
    runs = []
    for folder in ("a", "a", "b"):
        trainer = cached_trainer(late("bert"), tmp_path / folder, text_dataset())
        trainer.train()
        runs.append(trained(trainer.model))
    for run in runs[1:]:
        assert all(torch.equal(runs[0][name], weight) for name, weight in run.items())


@pytest.mark.slow
def test_model_and_trainer_are_as_before(tmp_path):
    data = text_dataset()
    trainer = cached_trainer(late("bert"), tmp_path, data)
    collator = trainer.data_collator
    trainer.train()
    assert trainer.train_dataset is data
    assert trainer.data_collator is collator
    assert trainer.predict(data).predictions.shape == (NUM_EXAMPLES, 3)
    trainer.train()
    assert len(keys_in(tmp_path)) == 1


def test_one_cache_serves_ensembles_of_any_size_and_labels(tmp_path):
    data = text_dataset()
    build(tmp_path, data, late("bert"))
    (part,) = parts_in(tmp_path)
    written = part.stat().st_mtime_ns
    other = data.remove_columns("labels").add_column("labels", [[0.0, 1.0, 1.0]] * len(data)).with_format("torch")
    model = late("bert", num_members=2, problem_type="multi_label_classification")
    trainer = cached_trainer(model, tmp_path, data=other)
    trainer.data_collator.collator = _float_labels
    trainer.train()
    assert len(parts_in(tmp_path)) == 1
    assert parts_in(tmp_path)[0].stat().st_mtime_ns == written


def _float_labels(examples):
    labels = torch.stack([row["labels"] for row in examples]).float()
    batch = DataCollatorWithPadding(tiny.tokenizer())(
        [{name: row[name] for name in ("input_ids", "attention_mask")} for row in examples]
    )
    return {**batch, "labels": labels}


def test_every_image_goes_to_a_device_under_data_parallel(tmp_path):
    trainer = cached_trainer(late("vit"), tmp_path, dataset("vit"))
    trainer.args._n_gpu = 2
    with cached(trainer):
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(6)])
    assert {len(tensor) for tensor in batch.values()} == {6}
    trainer.args._n_gpu = 1
    with cached(trainer):
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(6)])
    assert len(batch["pixel_values"]) == 1


@pytest.mark.slow
def test_two_processes_train_from_one_cache_as_one_does_without(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = Path(tiny.__file__).with_name("train_from_cache.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(tiny.__file__).parent)}
    done = subprocess.run([*command, script, str(tmp_path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Prefix cache: ") == 2  # one for each prefix, by one of the processes
    from train_from_cache import train

    two = torch.load(tmp_path / "two.pt", weights_only=False)
    one = train(tmp_path / "one", num_processes=1)
    for prefix in one:
        for alone, together in zip(one[prefix]["steps"], two[prefix]["steps"], strict=True):
            for name in ("loss", "grad_norm", "task_loss"):
                assert together[name] == pytest.approx(alone[name], rel=2e-3), (prefix, name)
        assert two[prefix]["agree"]


def test_rare_augmentation_is_noticed_while_the_cache_is_built(tmp_path):
    data = dataset("vit", 40).remove_columns("labels").add_column("labels", [0] * 31 + [2] + [0] * 8)
    trainer = cached_trainer(
        late("vit"), tmp_path, data.with_format("torch"), seldom_random_collator, per_device_eval_batch_size=31
    )
    with pytest.raises(ValueError, match="the training data is random, pixel_values"):
        trainer.train()
    assert parts_in(tmp_path) == []


def test_texts_that_are_processed_otherwise_are_noticed_one_by_one(tmp_path):
    data = text_dataset(num_examples=40)
    tokens = data.with_format(None)
    changed_text = tokens[1]["input_ids"]

    def tokenise(rows, replacement=None):
        ids = [[replacement or i for i in row] if row == changed_text else row for row in rows["input_ids"]]
        return {**rows, "input_ids": ids}

    arguments = {"remove_unused_columns": False, "per_device_train_batch_size": 16}
    cached_trainer(late("bert"), tmp_path, tokens.with_transform(tokenise), **arguments).train()
    rows = tokens.with_transform(partial(tokenise, replacement=7))
    trainer = cached_trainer(late("bert"), tmp_path, rows, **arguments)
    with pytest.raises(ValueError, match="the tokens of example 1 are not those of which features are kept"):
        trainer.train()


def test_padding_with_labels_is_refused(tmp_path):
    data = text_dataset("bert-token")
    collator = DataCollatorForTokenClassification(tiny.tokenizer(), label_pad_token_id=0)
    with pytest.raises(ValueError, match="padding has labels other than -100"):
        cached_trainer(late("bert-token"), tmp_path, data, collator).train()


def test_first_token_that_is_masked_is_refused_wherever_it_is(tmp_path):
    rows = text_dataset(num_examples=40).with_format(None).to_list()
    rows[1]["attention_mask"][0] = 0
    with pytest.raises(ValueError, match="their first token is masked"):
        cached_trainer(late("bert"), tmp_path, Dataset.from_list(rows).with_format("torch")).train()


def test_collator_may_tokenise(tmp_path):
    rows = [{"text": "a b c" * (1 + i % 3), "labels": i % 3} for i in range(8)]

    def collate(examples):
        encoded = tiny.tokenizer()([row["text"] for row in examples], padding=True, return_tensors="pt")
        return {**encoded, "labels": torch.tensor([row["labels"] for row in examples])}

    trainer = cached_trainer(late("bert"), tmp_path, Dataset.from_list(rows), collate, remove_unused_columns=False)
    trainer.train()
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("architecture", ["bert", "vit"])
def test_features_that_code_has_changed_are_noticed(architecture, tmp_path):
    data = text_dataset() if architecture == "bert" else dataset(architecture)
    build(tmp_path, data, late(architecture))
    model = late(architecture)
    block = base_model_of(model).get_submodule(block_names(base_model_of(model))[0])
    block.register_forward_hook(lambda _, args, output: 1.1 * output)
    with pytest.raises(ValueError, match=r"holds other features of example 0 .* Delete that folder"):
        build(tmp_path, data, model)


def test_files_and_collators_of_images_count(tmp_path):
    paths = [tmp_path / f"{n}.png" for n in range(4)]
    for n, path in enumerate(paths):
        Image.new("RGB", (16, 16), (60 * n, 10, 20)).save(path)
    rows = {"image": list(map(str, paths)), "labels": [0, 1, 2, 0]}

    def collate(examples, classes=(0, 1, 2)):
        pixels = [torch.tensor(np.asarray(row["image"])).permute(2, 0, 1) / 255 for row in examples]
        return {"pixel_values": torch.stack(pixels), "labels": torch.tensor([classes[r["labels"]] for r in examples])}

    def keys(collator):
        data = Dataset.from_dict(rows).cast_column("image", datasets.Image())
        trainer = cached_trainer(late("vit"), tmp_path, data, collator, remove_unused_columns=False)
        with cached(trainer):
            return set(keys_in(tmp_path))

    first = keys(collate)
    assert keys(collate) == first
    second = keys(partial(collate, classes=(0, 1, 1)))
    assert len(second) == 2
    Image.new("RGB", (16, 16), (5, 10, 20)).save(paths[3])
    os.utime(paths[3], ns=(1, 1))
    assert len(keys(collate)) == 3


def test_others_may_read_a_cache_in_a_folder_that_they_may_read(tmp_path):
    build(tmp_path, text_dataset())
    (part,) = parts_in(tmp_path)
    assert part.stat().st_mode & 0o777 == part.parent.stat().st_mode & 0o666
