"""Members that are run chunk by chunk: all is as with all members at once, but for the memory."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import train_in_chunks
from test_trainer import dataset, step_logs, trainer_for
from torch.nn import functional

from sigma_nens_hf import SigmaNEnsTrainingArguments, member_subset
from sigma_nens_hf.member_chunks import check_can_be_chunked, split_members

SIZES = [1, 2, 3]  # of 4 members; the last chunk of 3 is a ragged one


def weighted_loss(outputs, labels, num_items_in_batch=None):
    losses = functional.cross_entropy(outputs.logits, labels, torch.tensor([1.0, 5.0, 0.2]), reduction="none")
    return losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch


def float_labels(problem_type):
    labels = torch.randn(8, 3, generator=torch.Generator().manual_seed(3))
    return (labels > 0).float() if problem_type.startswith("multi") else labels


# Architecture, the adapter's config, training arguments, and further arguments of the trainer.
CASES = {
    "text": ("bert", {}, {}, {}),
    "token": ("bert-token", {}, {}, {}),
    "multiple choice": ("bert-choice", {}, {}, {}),
    "image": ("vit", {"modules_to_save": ["layernorm"], "exclude_modules": ["layernorm"]}, {}, {}),
    "decoder": ("llama-token", {}, {}, {}),
    "shared prefix": ("bert", {"branch_layer": 1, "prefix": "shared"}, {}, {}),
    "frozen prefix": ("bert-token", {"branch_layer": 1}, {"activation_checkpointing": True}, {}),
    "frozen prefix of images": ("swin", {"branch_layer": 1}, {}, {}),
    "trained embeddings": ("bert", {"branch_layer": 1, "modules_to_save": ["word_embeddings"]}, {}, {}),
    "trained positions": ("deberta_v3", {"branch_layer": 1, "modules_to_save": ["rel_embeddings"]}, {}, {}),
    "teacher": ("deit-teacher", {}, {}, {}),
    "regression": ("vit", {"problem_type": "regression"}, {}, {}),
    "multi-label": ("bert", {"problem_type": "multi_label_classification"}, {}, {}),
    "label smoothing": ("bert-token", {}, {"label_smoothing_factor": 0.2}, {}),
    "own loss": ("bert", {}, {}, {"compute_loss_func": weighted_loss}),
    "one member": ("bert", {"num_members": 1}, {}, {}),
    "checkpointed": ("bert", {}, {"activation_checkpointing": True}, {}),
}


def case_trainer(case, folder, size, **arguments):
    architecture, config, settings, trainer_kwargs = CASES_OF_TRAINING[case]
    model = tiny.ensemble(architecture, base=tiny.without_dropout(architecture), **config)
    data = dataset(architecture, 8)
    if "problem_type" in config:
        labels = float_labels(config["problem_type"]).tolist()
        data = data.remove_columns("labels").add_column("labels", labels).with_format("torch")
    arguments = {"diversity_weight": 0.5, "member_chunk_size": size, **settings, **arguments}
    return trainer_for(model, folder, data, trainer_kwargs, **arguments)


def step(trainer, num_batches=2):
    """One step of several micro-batches, as `Trainer.train` makes it, without the optimizer's part."""
    data, size = trainer.train_dataset, len(trainer.train_dataset) // num_batches
    batches = [trainer.data_collator([data[i] for i in range(k * size, (k + 1) * size)]) for k in range(num_batches)]
    trainer.current_gradient_accumulation_steps = num_batches
    num_items = trainer._get_num_items_in_batch(batches, trainer.args.device)
    loss = sum(trainer.training_step(trainer.model, batch, num_items) for batch in batches).item()
    trainer.log({"loss": loss})
    (logs,) = step_logs(trainer)
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return logs, gradients


@pytest.mark.parametrize("case", CASES)
def test_a_step_in_chunks_is_the_step_of_all_members(case, tmp_path):
    """With two micro-batches, which hold different numbers of tokens."""
    expected_logs, expected_gradients = step(case_trainer(case, tmp_path, None))
    assert expected_gradients
    for size in SIZES:
        logs, gradients = step(case_trainer(case, tmp_path, size))
        assert logs.keys() == expected_logs.keys()
        for name, value in expected_logs.items():
            assert logs[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
        largest = max(gradient.abs().max() for gradient in expected_gradients.values())
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-5 * largest, msg=name)


# Here alone: autocast is put around the model when training begins.
CASES_OF_TRAINING = CASES | {"frozen prefix in bf16": ("vit", {"branch_layer": 1}, {"bf16": True}, {})}


@pytest.mark.parametrize("case", ["text", "token", "frozen prefix in bf16"])
def test_training_in_chunks_is_training_with_all_members(case, tmp_path):
    def logs(size):
        trainer = case_trainer(
            case, tmp_path, size, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3
        )
        trainer.train()
        return step_logs(trainer)

    for chunked, expected in zip(logs(3), logs(None), strict=True):
        for name in ("loss", "grad_norm", "task_loss", "regularizer", "disagreement", "realized_sharing"):
            assert chunked[name] == pytest.approx(expected[name], rel=1e-3), name


@pytest.mark.parametrize(("return_member_logits", "sizes"), [(False, (1, 3)), (True, (3,))])
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("label smoothing", "checkpointed")])
def test_evaluation_in_chunks_is_evaluation_of_all_members(case, return_member_logits, sizes, tmp_path):
    # The last batch is a smaller one.
    arguments = {"return_member_logits": return_member_logits, "per_device_eval_batch_size": 3}
    trainer = case_trainer(case, tmp_path, None, **arguments)
    expected = trainer.predict(trainer.train_dataset)
    for size in sizes:
        trainer = case_trainer(case, tmp_path, size, **arguments)
        prediction = trainer.predict(trainer.train_dataset)
        assert prediction.metrics.keys() == expected.metrics.keys()
        for name, value in expected.metrics.items():
            if name.startswith(("test_loss", "test_nll", "test_accuracy", "test_ece")):
                assert prediction.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        assert_alike(prediction.predictions, expected.predictions)


def assert_alike(actual, expected):
    if isinstance(expected, tuple):
        assert len(actual) == len(expected)
        for part, expected_part in zip(actual, expected, strict=True):
            assert_alike(part, expected_part)
    else:
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["bert-token", "deit-teacher", "swin"])
def test_outputs_are_joined_member_by_member(architecture, tmp_path):
    """Calibrated ones too, with hidden states and attentions, of heads whose members' logits are not returned."""
    model = tiny.ensemble(architecture, base={"output_hidden_states": True, "output_attentions": True})
    model.set_attn_implementation("eager")  # the only one that returns attentions
    config = model.peft_config["default"]
    config.calibration_temperature = 1.7
    config.use_calibration(True)
    data = dataset(architecture, 4).remove_columns("labels")
    trainers = [trainer_for(model, tmp_path, member_chunk_size=size) for size in (3, None)]
    chunked, expected = (trainer.predict(data, ignore_keys=[]).predictions for trainer in trainers)
    assert len(expected) > 3
    assert_alike(chunked, expected)
    with model.disable_adapter():  # there are no members to run in chunks
        assert_alike(*(trainer.predict(data, ignore_keys=[]).predictions for trainer in trainers))


def test_chunks_are_of_the_members_that_take_part(tmp_path):
    logs, predictions = [], []
    for size in (None, 1):
        trainer = case_trainer("text", tmp_path, size, return_member_logits=True)
        with member_subset(trainer.model, [3, 0]):
            logs.append(step(trainer)[0])
            predictions.append(trainer.predict(trainer.train_dataset).predictions)
    assert logs[1]["loss"] == pytest.approx(logs[0]["loss"], rel=1e-5)
    assert predictions[0].shape == (8, 2, 3)
    assert_alike(*reversed(predictions))


def test_members_are_split_in_order_and_weigh_as_many_as_they_are():
    chunks = split_members(range(4), 3)
    assert [(chunk.members, chunk.weight) for chunk in chunks] == [((0, 1, 2), 0.75), ((3,), 0.25)]
    assert [(chunk.is_first, chunk.is_last) for chunk in chunks] == [(True, False), (False, True)]
    (chunk,) = split_members(range(4), 9)
    assert (chunk.members, chunk.weight, chunk.is_first, chunk.is_last) == ((0, 1, 2, 3), 1, True, True)


class LiveBytes:
    """Counts the bytes of the activations that wait for their backward pass."""

    def __init__(self, model):
        self.weights = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
        self.now = self.peak = 0

    def pack(self, tensor):
        return Saved(tensor, self)

    def add(self, size):
        self.now += size
        self.peak = max(self.peak, self.now)


class Saved:
    def __init__(self, tensor, counter):
        is_weight = tensor.untyped_storage().data_ptr() in counter.weights
        # An output that held on to its own graph would never be freed where no backward pass comes by.
        self.tensor, self.counter, self.size = tensor.detach(), counter, 0 if is_weight else tensor.nbytes
        counter.add(self.size)

    def __del__(self):
        self.counter.add(-self.size)


def test_only_the_activations_of_one_chunk_are_alive(tmp_path):
    def peak(num_members, size):
        model = tiny.ensemble("bert", num_members=num_members, base=tiny.without_dropout("bert"))
        trainer = trainer_for(model, tmp_path, dataset("bert", 16), member_chunk_size=size)
        counter = LiveBytes(model)
        with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda saved: saved.tensor):
            step(trainer, num_batches=1)
        assert counter.now == 0
        return counter.peak

    all_members = peak(8, None)
    for size in (1, 2, 4):
        # The regulariser and the gates are of all members always.
        assert peak(8, size) < (size / 8 + 0.1) * all_members
    assert peak(8, 1) < 1.15 * peak(1, None)


def test_a_fixed_prefix_is_computed_once_for_all_chunks(tmp_path):
    def rows_below(case):
        trainer = case_trainer(case, tmp_path, 1, per_device_eval_batch_size=8)
        block, seen = trainer.model.base_model.model.bert.encoder.layer[0], []
        block.register_forward_hook(lambda _, inputs, output: seen.append(len(inputs[0])))
        step(trainer, num_batches=1)
        training = sorted(seen)
        seen.clear()
        trainer.evaluate(trainer.train_dataset)
        return training, sorted(seen)

    once = [1, 1, 1, 1, 8]  # a row for every chunk, so that the block runs
    assert rows_below("frozen prefix") == (once, once)
    assert rows_below("shared prefix") == ([8, 8, 8, 8], once)
    assert rows_below("trained embeddings") == ([8, 8, 8, 8], once)


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_sizes_that_are_none_are_refused(size, tmp_path):
    with pytest.raises(ValueError, match="member_chunk_size must be a whole number of at least 1, or None"):
        SigmaNEnsTrainingArguments(str(tmp_path), member_chunk_size=size)


def test_data_parallel_and_deepspeed_are_refused(tmp_path):
    trainer = case_trainer("text", tmp_path, 1)
    trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match=r"member_chunk_size cannot be used under torch\.nn\.DataParallel"):
        type(trainer)(model=trainer.model, args=trainer.args)
    with pytest.raises(ValueError, match="member_chunk_size cannot be used with DeepSpeed"):
        check_can_be_chunked(is_data_parallel=False, is_deepspeed=True)


def test_gradients_are_exchanged_once_a_step(tmp_path, monkeypatch):
    trainer = case_trainer("text", tmp_path, 1)
    without_exchange = []
    monkeypatch.setattr(trainer.accelerator, "no_sync", lambda model: without_exchange.append(model) or nullcontext())
    step(trainer, num_batches=1)
    assert without_exchange == [trainer.model] * 3


@pytest.mark.slow
def test_two_processes_train_in_chunks_as_one_does_with_all_members(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    command += [train_in_chunks.__file__, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(tiny.__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    chunked = json.loads((tmp_path / "logs.json").read_text())
    expected = train_in_chunks.train(tmp_path, num_processes=1, member_chunk_size=None)
    for step_in_chunks, expected_step in zip(chunked["steps"], expected["steps"], strict=True):
        for name in ("loss", "grad_norm", "task_loss", "regularizer"):
            assert step_in_chunks[name] == pytest.approx(expected_step[name], rel=1e-3), name
    for name in ("eval_nll", "eval_accuracy", "eval_ece"):
        assert chunked["evaluation"][name] == pytest.approx(expected["evaluation"][name], rel=2e-3, abs=1e-6), name
