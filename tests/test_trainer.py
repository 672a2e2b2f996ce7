import json
import os
import shutil

import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file
from sklearn.metrics import accuracy_score
from transformers import DataCollatorForTokenClassification, TrainerCallback, TrainingArguments, set_seed

from sigma_nens_hf import (
    SigmaNEnsTrainer,
    SigmaNEnsTrainingArguments,
    diversity_regularizer,
    realized_sharing,
    temperature_for_sharing,
)
from sigma_nens_hf.checkpoints import last_complete_checkpoint
from sigma_nens_hf.metrics import (
    accuracy,
    expected_calibration_error,
    negative_log_likelihood,
    pairwise_disagreement,
)

# Learning rates of what members train, but for biases and heads.
RATES = {"sigma_norm_scaler": 3e-2, "sigma_norm_scale": 1e-2}


def dataset(architecture, num_examples=16, seed=1):
    batch = tiny.inputs(architecture, num_examples, seed=seed)
    batch.setdefault("labels", torch.arange(num_examples) % 3)  # for DeiT with a teacher
    return Dataset.from_dict({name: tensor.tolist() for name, tensor in batch.items()}).with_format("torch")


def trainer_for(model, folder, data=None, trainer_kwargs=None, **arguments):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    args = SigmaNEnsTrainingArguments(**{**settings, **arguments})
    return SigmaNEnsTrainer(model=model, args=args, train_dataset=data, eval_dataset=data, **(trainer_kwargs or {}))


def step_logs(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def trained(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("architecture", "smoothing"),
    [
        *(("bert", 0.0), ("vit", 0.0), ("bert-token", 0.2)),
        *(
            pytest.param(name, 0.0, marks=pytest.mark.slow)
            for name in ("bert-token", "bert-choice", "llama-token", "deit-teacher")
        ),
        *(
            pytest.param(name, 0.2, marks=pytest.mark.slow)
            for name in ("bert", "vit", "llama-token", "bert-choice", "deit-teacher")
        ),
    ],
)
def test_gradient_accumulation_changes_nothing(architecture, smoothing, tmp_path):
    """Also where micro-batches hold different numbers of tokens: each weighs the same."""
    runs = []
    for accumulation in (1, 4):
        model = tiny.ensemble(architecture, base=tiny.without_dropout(architecture))
        trainer = trainer_for(
            model,
            tmp_path / str(accumulation),
            dataset(architecture, 32),
            per_device_train_batch_size=16 // accumulation,
            gradient_accumulation_steps=accumulation,
            max_grad_norm=1e9,
            max_steps=3,
            label_smoothing_factor=smoothing,
        )
        trainer.train()
        runs.append(step_logs(trainer))
    for one, four in zip(*runs, strict=True):
        for name in ("loss", "grad_norm", "task_loss", "regularizer", "disagreement"):
            is_per_token = name == "disagreement" and architecture in tiny.TOKEN_ARCHITECTURES
            if not is_per_token:  # which is logged as a mean over micro-batches
                assert four[name] == pytest.approx(one[name], rel=2e-3), name


@pytest.mark.parametrize("architecture", ["bert", "vit"])
def test_resumed_training_equals_uninterrupted_training_exactly(architecture, tmp_path):
    data = dataset(architecture)  # dropout is on

    def model():
        return tiny.ensemble(architecture, modules_to_save=["pooler"] if architecture == "bert" else None)

    uninterrupted = trainer_for(model(), tmp_path / "a", data, save_strategy="steps", save_steps=2)
    uninterrupted.train()
    shutil.copytree(tmp_path / "a" / "checkpoint-2", tmp_path / "b" / "checkpoint-2")
    torch.manual_seed(99)
    resumed = trainer_for(model(), tmp_path / "b", data, save_strategy="steps", save_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    expected = trained(uninterrupted.model)
    assert trained(resumed.model).keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in trained(resumed.model).items())
    for name in ("loss", "grad_norm", "regularizer"):
        assert step_logs(resumed)[-1][name] == step_logs(uninterrupted)[-1][name]


def test_checkpoint_holds_adapter_and_optimizer_only(tmp_path):
    trainer = trainer_for(tiny.ensemble("bert"), tmp_path, dataset("bert"), save_strategy="steps", save_steps=4)
    trainer.train()
    files = set(os.listdir(tmp_path / "checkpoint-4"))
    assert files == {
        "README.md", "adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "rng_state.pth",
        "scheduler.pt", "trainer_state.json", "training_args.bin",
    }  # fmt: skip
    stored = load_file(tmp_path / "checkpoint-4" / "adapter_model.safetensors")
    assert sum(t.numel() for t in stored.values()) == sum(t.numel() for t in trained(trainer.model).values())


def test_cut_off_checkpoint_is_passed_over(tmp_path):
    assert last_complete_checkpoint(tmp_path / "nowhere") is None
    for step in (2, 4, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text('{"global_step": 1}')
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text('{"epoch": ')
    (tmp_path / "checkpoint-12").mkdir()
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    with pytest.raises(ValueError, match="no complete checkpoint"):
        trainer_for(tiny.ensemble("bert"), tmp_path / "empty", dataset("bert")).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_every_member_is_trained_in_one_group_and_never_decayed(architecture, tmp_path):
    model = tiny.ensemble(architecture, num_members=3, member_heads="all")
    data = dataset(architecture, 8)
    trainer = trainer_for(model, tmp_path, data, weight_decay=0.3)
    model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(model, trainer.data_collator([data[i] for i in range(8)])).backward()
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert names
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert "sigma_norm_" in name
            if architecture in tiny.CHOICE_ARCHITECTURES and "classifier.sigma_norm_head_bias" in name:
                continue  # a softmax over choices does not feel a number added to all
            for member in parameter.grad:
                assert member.abs().sum() > 0, name
    optimizer = trainer.create_optimizer()
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(names)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}
    for group in optimizer.param_groups:
        rates = {RATES.get(names[id(parameter)].split(".")[-2], 6e-3) for parameter in group["params"]}
        assert rates == {group["lr"]}


def test_shared_modules_have_their_own_rate_and_only_their_weights_decay(tmp_path):
    model = tiny.ensemble("bert", modules_to_save=["pooler"])
    trainer = trainer_for(model, tmp_path, dataset("bert"), weight_decay=0.3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        (
            group["lr"],
            group["weight_decay"],
            sorted(names[id(p)].split("default")[-1] for p in group["params"]),
        )
        for group in trainer.create_optimizer().param_groups
    ]
    assert groups[0][:2] == (6e-3, 0.0)
    assert [group[:2] for group in groups[1:3]] == [(3e-2, 0.0), (1e-2, 0.0)]
    assert groups[3:] == [(2e-4, 0.3, [".dense.weight"]), (2e-4, 0.0, [".dense.bias"])]


def test_trained_scales_have_their_own_rate_and_do_not_decay(tmp_path):
    model = tiny.ensemble("bert")
    trainer = trainer_for(model, tmp_path, dataset("bert"), weight_decay=0.3, scale_learning_rate=0.07)
    groups = {group["lr"]: group for group in trainer.create_optimizer().param_groups}
    assert groups.keys() == {6e-3, 3e-2, 0.07}
    scales = [p for name, p in model.named_parameters() if name.endswith(".sigma_norm_scale.default")]
    assert {id(p) for p in groups[0.07]["params"]} == {id(p) for p in scales}
    assert len(scales) == 5
    assert groups[0.07]["weight_decay"] == 0


def test_optimizer_that_chooses_its_parameters_is_refused(tmp_path):
    trainer = trainer_for(tiny.ensemble("bert"), tmp_path, dataset("bert"))
    trainer.optimizer_cls_and_kwargs = (torch.optim.AdamW, {"params": []})
    with pytest.raises(ValueError, match="chooses its own parameters"):
        trainer.create_optimizer()


def test_loss_is_task_loss_plus_weighted_regularizer(tmp_path):
    data = dataset("vit")
    for reduction, layers in (("mean", None), ("sum", ["layernorm_after"])):
        model = tiny.ensemble("vit")
        trainer = trainer_for(
            model, tmp_path, data, max_steps=1, per_device_train_batch_size=16, diversity_weight=0.02,
            diversity_temperature=0.3, diversity_reduction=reduction, diversity_layers=layers,
        )  # fmt: skip
        batch = trainer.data_collator([data[i] for i in range(16)])
        with torch.no_grad():
            output = model(**batch)
        regularizer = diversity_regularizer(model, 0.3, reduction=reduction, layers=layers).item()
        votes = output.member_logits.argmax(-1)
        sharing = realized_sharing(model, layers=layers)
        trainer.train()
        (logs,) = step_logs(trainer)
        assert logs["task_loss"] == pytest.approx(output.loss.item(), rel=1e-4)
        assert logs["regularizer"] == pytest.approx(regularizer, rel=1e-4)
        assert logs["loss"] == pytest.approx(output.loss.item() + 0.02 * regularizer, rel=1e-3)
        assert logs["disagreement"] == pytest.approx(pairwise_disagreement(votes), abs=1e-5)
        assert logs["realized_sharing"] == pytest.approx(sharing, abs=0.3)  # after the step


def test_logged_parts_are_means_over_the_steps_between(tmp_path):
    def logs(every):
        trainer = trainer_for(tiny.ensemble("vit"), tmp_path, dataset("vit"), logging_steps=every)
        trainer.train()
        return step_logs(trainer)

    single, (together,) = logs(1), logs(4)
    for name in ("task_loss", "regularizer", "disagreement"):
        assert together[name] == pytest.approx(np.mean([entry[name] for entry in single]), rel=1e-5)


def test_regularizer_drives_members_apart(tmp_path):
    def sharing(weight):
        model = tiny.ensemble("vit", init_scaler_std=0.1)
        trainer_for(
            model, tmp_path, dataset("vit"), max_steps=30, diversity_weight=weight, scaler_learning_rate=0.5
        ).train()
        return realized_sharing(model)

    assert sharing(20.0) < 0.8 * sharing(0.0)


def test_label_smoothing_acts_on_the_members_logits(tmp_path):
    data = dataset("bert", 8)
    model = tiny.ensemble("bert")
    trainer = trainer_for(model, tmp_path, data, label_smoothing_factor=0.2)
    batch = trainer.data_collator([data[i] for i in range(8)])
    model.eval()
    with torch.no_grad():
        loss = trainer.compute_loss(model, dict(batch))
        log_p = model(**batch).member_logits.log_softmax(-1)
    target = torch.full_like(log_p, 0.2 / 3)
    target.scatter_(-1, batch["labels"][:, None, None].expand(-1, 4, 1), 0.8 + 0.2 / 3)
    torch.testing.assert_close(loss, -(target * log_p).sum(-1).mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ["bert-token", pytest.param("bert", marks=pytest.mark.slow)])
def test_custom_loss_sees_the_members_as_rows_and_accumulates_right(architecture, tmp_path):
    class_weights = torch.tensor([1.0, 5.0, 0.2])
    shapes = set()

    def loss_function(outputs, labels, num_items_in_batch=None):
        shapes.add((tuple(outputs.logits.shape), tuple(labels.shape)))
        logits = outputs.logits.flatten(0, -2)
        losses = torch.nn.functional.cross_entropy(logits, labels.flatten(), class_weights, reduction="none")
        return losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch

    runs = []
    for accumulation in (1, 4):
        model = tiny.ensemble(architecture, base=tiny.without_dropout(architecture))
        trainer = trainer_for(
            model, tmp_path, dataset(architecture, 16), per_device_train_batch_size=16 // accumulation, max_steps=2,
            gradient_accumulation_steps=accumulation, max_grad_norm=1e9, diversity_weight=0.5,
            trainer_kwargs={"compute_loss_func": loss_function},
        )  # fmt: skip
        trainer.train()
        runs.append(step_logs(trainer))
    tokens = (11,) if architecture == "bert-token" else ()
    assert shapes == {((rows, *tokens, 3), (rows, *tokens)) for rows in (64, 16)}
    for one, four in zip(*runs, strict=True):
        for name in ("loss", "grad_norm", "task_loss", "regularizer"):
            assert four[name] == pytest.approx(one[name], rel=2e-3), name


def test_evaluation_reports_the_ensemble_and_standard_metrics_go_on_working(tmp_path):
    seen = []

    def compute_metrics(prediction):  # as in transformers' examples
        logits, labels = prediction
        seen.append(logits.shape)
        return {"sklearn_accuracy": accuracy_score(labels, np.argmax(logits, axis=-1))}

    data = dataset("bert", 10)  # a ragged last batch
    batch = {name: data[:][name] for name in data.column_names}
    for return_member_logits in (False, True):
        model = tiny.ensemble("bert")
        trainer = trainer_for(
            model, tmp_path, data, return_member_logits=return_member_logits,
            trainer_kwargs={"compute_metrics": compute_metrics},
        )  # fmt: skip
        metrics = trainer.evaluate()
        with torch.no_grad():
            output = model(**batch)
        p, labels = output.logits.softmax(-1), batch["labels"]
        assert metrics["eval_nll"] == pytest.approx(negative_log_likelihood(p, labels), rel=1e-5)
        assert metrics["eval_accuracy"] == metrics["eval_sklearn_accuracy"] == accuracy(p, labels)
        assert metrics["eval_ece"] == pytest.approx(expected_calibration_error(p, labels), abs=1e-5)
        predictions = trainer.predict(data).predictions
        expected = output.member_logits if return_member_logits else output.logits
        assert predictions.shape == expected.shape
        np.testing.assert_allclose(predictions, expected.numpy(), rtol=1e-4, atol=1e-4)
    assert set(seen) == {(10, 3)}


def test_tokens_of_texts_of_any_length_are_evaluated_together(tmp_path):
    """Batches of different length: logits of members are padded, joined and put in order all the same."""
    rows = dataset("bert-token", 10)
    lengths = [int(row["attention_mask"].sum()) for row in rows]
    data = [{name: row[name][:n] for name in row} for row, n in zip(rows, lengths, strict=True)]
    model = tiny.ensemble("bert-token")
    seen = []

    def compute_metrics(prediction):
        seen.append(prediction.predictions.shape)
        return {}

    collator = DataCollatorForTokenClassification(_Padding())
    results = {}
    for return_member_logits in (False, True):
        trainer = trainer_for(
            model, tmp_path, data, return_member_logits=return_member_logits, per_device_eval_batch_size=3,
            trainer_kwargs={"compute_metrics": compute_metrics, "data_collator": collator},
        )  # fmt: skip
        prediction = trainer.predict(data)
        results[return_member_logits] = prediction.metrics
        logits = torch.as_tensor(prediction.predictions)
        for row, example in enumerate(data):
            with torch.no_grad():
                output = model(**{name: tensor[None] for name, tensor in example.items() if name != "labels"})
            expected = output.member_logits[0] if return_member_logits else output.logits[0]
            assert tiny.relative_error(logits[row][..., : lengths[row], :], expected) < 1e-4
    longest = max(lengths)
    assert logits.shape == (10, 4, longest, 3)
    assert seen == [(10, longest, 3)] * 2
    for name in ("test_nll", "test_accuracy", "test_ece"):
        assert results[True][name] == pytest.approx(results[False][name], rel=1e-5)
    labelled = [
        (logits[i, :, t].softmax(-1).mean(0), data[i]["labels"][t]) for i in range(10) for t in range(lengths[i])
    ]
    p, labels = (torch.stack(column) for column in zip(*labelled, strict=True))
    assert results[True]["test_nll"] == pytest.approx(negative_log_likelihood(p, labels), rel=1e-4)


class _Padding:
    """The little of a tokenizer that a collator needs to pad."""

    padding_side = "right"

    def pad(self, features, **_):
        longest = max(len(feature["input_ids"]) for feature in features)
        filler = {"input_ids": tiny.PADDING, "attention_mask": 0}
        return {
            name: torch.stack([_filled(feature[name], longest, filler[name]) for feature in features])
            for name in filler
        }


def _filled(row, length, value):
    return torch.nn.functional.pad(row, (0, length - len(row)), value=value)


@pytest.mark.parametrize("problem_type", ["multi_label_classification", "regression"])
def test_other_problem_types_train_towards_their_labels(problem_type, tmp_path):
    torch.manual_seed(1)
    labels = (torch.rand(16, 3) > 0.5).float() if problem_type.startswith("multi") else torch.randn(16, 3)
    data = dataset("vit").remove_columns("labels").add_column("labels", labels.tolist()).with_format("torch")
    model = tiny.ensemble("vit", problem_type=problem_type)
    trainer = trainer_for(model, tmp_path, data, max_steps=60, diversity_weight=0.0, per_device_train_batch_size=16)
    before = trainer.evaluate()
    with torch.no_grad():
        own = model(pixel_values=data[:4]["pixel_values"], labels=labels[:4]).loss
        loss = trainer.compute_loss(model, {"pixel_values": data[:4]["pixel_values"], "labels": labels[:4]})
    torch.testing.assert_close(loss, own, rtol=1e-4, atol=1e-5)
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.5 * before["eval_loss"]
    assert "eval_nll" not in after


@pytest.mark.parametrize(
    ("architecture", "use_reentrant"),
    [
        *(("bert", False), ("bert", True), ("llama", False), ("swin", True)),
        *(
            pytest.param(name, use_reentrant, marks=pytest.mark.slow)
            for name, use_reentrant in [
                ("deberta_v3", False),
                ("deberta_v3", True),
                ("llama", True),
                ("vit", False),
                ("vit", True),
                ("swin", False),
            ]
        ),
    ],
)
def test_gradient_checkpointing_changes_nothing(architecture, use_reentrant, tmp_path):
    runs = []
    for checkpointing in (False, True):
        trainer = trainer_for(
            tiny.ensemble(architecture, base=tiny.without_dropout(architecture)), tmp_path, dataset(architecture),
            max_steps=2, max_grad_norm=1e9, activation_checkpointing=checkpointing,
            activation_checkpointing_kwargs={"use_reentrant": use_reentrant},
        )  # fmt: skip
        trainer.train()
        runs.append(step_logs(trainer))
    for plain, checkpointed in zip(*runs, strict=True):
        for name in ("loss", "grad_norm"):
            assert checkpointed[name] == pytest.approx(plain[name], rel=1e-3), name


def test_member_logits_are_found_among_further_outputs(tmp_path):
    data = dataset("bert", 6)
    model = tiny.ensemble("bert", base={"output_hidden_states": True})
    trainer = trainer_for(model, tmp_path, data, return_member_logits=True)
    assert trainer.evaluate()["eval_nll"] > 0
    assert trainer.predict(data).predictions.shape == (6, 4, 3)


def test_custom_loss_settles_the_problem_type_of_float_labels(tmp_path):
    data = dataset("bert", 8)
    data = data.map(lambda row: {"labels": [float(row["labels"] == c) for c in range(3)]}).with_format("torch")

    def loss_function(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.binary_cross_entropy_with_logits(outputs.logits, labels)

    model = tiny.ensemble("bert")
    trainer = trainer_for(model, tmp_path, data, max_steps=1, trainer_kwargs={"compute_loss_func": loss_function})
    trainer.train()
    assert model.config.problem_type == "multi_label_classification"
    assert "eval_nll" not in trainer.evaluate()
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(tiny.base_model("bert"), tmp_path / "adapter")
    batch = {name: data[:][name] for name in ("input_ids", "attention_mask")}
    expected = loaded(**batch).member_logits.sigmoid().mean(1)
    torch.testing.assert_close(loaded(**batch).logits.sigmoid(), expected, rtol=1e-4, atol=1e-5)


def test_frozen_adapter_is_not_trained(tmp_path):
    tiny.ensemble("bert").save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(tiny.base_model("bert"), tmp_path / "adapter")
    trainer = trainer_for(model, tmp_path, dataset("bert"))
    with pytest.raises(ValueError, match="is_trainable=True"):
        trainer.train()
    assert trainer.evaluate()["eval_nll"] > 0


def test_evaluation_loss_is_the_mean_member_loss_without_regularizer(tmp_path):
    data = dataset("vit", 8)
    model = tiny.ensemble("vit")
    metrics = trainer_for(model, tmp_path, data, diversity_weight=10.0).evaluate()
    with torch.no_grad():
        expected = model(**{name: data[:][name] for name in data.column_names}).loss.item()
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_prediction_without_labels(tmp_path):
    data = dataset("bert", 6).remove_columns("labels")
    prediction = trainer_for(tiny.ensemble("bert"), tmp_path, data).predict(data)
    assert prediction.predictions.shape == (6, 3)
    assert prediction.label_ids is None


def test_best_model_is_loaded_at_the_end(tmp_path):
    class WorseAndWorse(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            metrics["eval_score"] = -state.global_step

    model = tiny.ensemble("vit")
    trainer = trainer_for(
        model, tmp_path, dataset("vit"), eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="score", greater_is_better=True,
        trainer_kwargs={"callbacks": [WorseAndWorse()]},
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    best = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
    scaler = next(name for name in trained(model) if "sigma_norm_scaler" in name)
    assert torch.equal(trained(model)[scaler], best[scaler.removesuffix(".default")])


def test_recipe_is_written_into_the_adapter(tmp_path):
    model = tiny.ensemble("bert", num_members=8)
    trainer_for(model, tmp_path, dataset("bert"), max_steps=1, members_per_feature=2, seed=5).train()
    model.save_pretrained(tmp_path / "adapter")
    recipe = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["training_recipe"]
    assert recipe["diversity_temperature"] == temperature_for_sharing(2, 8)
    assert (recipe["diversity_weight"], recipe["members_per_feature"], recipe["seed"]) == (0.15, 2, 5)
    assert recipe["train_examples"] == 16
    assert str(tmp_path) not in json.dumps(recipe)


def test_single_member_trains_without_regularizer(tmp_path):
    trainer = trainer_for(tiny.ensemble("bert", num_members=1), tmp_path, dataset("bert"), max_steps=1)
    trainer.train()
    (logs,) = step_logs(trainer)
    assert logs["loss"] == pytest.approx(logs["task_loss"], rel=1e-4)
    assert "regularizer" not in logs


def test_wrong_labels_are_refused_before_they_reach_the_device(tmp_path):
    data = dataset("bert")
    data = data.map(lambda row, i: {"labels": -1 if i == 9 else row["labels"]}, with_indices=True)
    trainer = trainer_for(tiny.ensemble("bert"), tmp_path, data)
    with pytest.raises(ValueError, match="Label -1 names none of the 3 classes"):
        trainer.train()
    with pytest.raises(ValueError, match="unlabelled test split"):
        trainer.evaluate()


def test_scalers_that_are_no_longer_finite_stop_the_training(tmp_path):
    model = tiny.ensemble("bert")
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "sigma_norm_scaler" in n)[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"scalers of .*embeddings\.LayerNorm.* not finite"):
        trainer_for(model, tmp_path, dataset("bert")).train()


def test_plain_arguments_are_refused(tmp_path):
    with pytest.raises(TypeError, match="must be SigmaNEnsTrainingArguments, got TrainingArguments"):
        SigmaNEnsTrainer(model=tiny.ensemble("bert"), args=TrainingArguments(output_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (lambda: tiny.base_model("bert"), {}, "no sigma-norm adapter"),
        (lambda: tiny.ensemble("bert"), {"members_per_feature": 3}, "from 1 to 2 for 4 members"),
        (lambda: tiny.ensemble("bert"), {"diversity_layers": ["nowhere"]}, "match no norm"),
    ],
)
def test_arguments_that_do_not_fit_the_model_are_refused(model, arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer_for(model(), tmp_path, dataset("bert"), **arguments)


def test_gradient_checkpointing_through_the_trainer_changes_nothing(tmp_path):
    runs = []
    for checkpointing in (False, True):
        set_seed(1)
        model = tiny.ensemble("bert", base=tiny.without_dropout("bert"))
        trainer = trainer_for(model, tmp_path, dataset("bert"), activation_checkpointing=checkpointing)
        trainer.train()
        runs.append(step_logs(trainer))
    for plain, checkpointed in zip(*runs, strict=True):
        assert checkpointed["loss"] == pytest.approx(plain["loss"], rel=1e-4)
        assert checkpointed["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)


def test_member_logits_of_two_heads_ragged_choices_and_further_outputs(tmp_path):
    rows = [{name: tensor[0] for name, tensor in tiny.inputs("bert-choice", 1, seed=i).items()} for i in range(4)]
    for row in rows[2:]:
        row.update({name: row[name][:2] for name in ("input_ids", "attention_mask")}, labels=torch.tensor(1))
    cases = {
        "deit-teacher": (tiny.ensemble("deit-teacher"), dataset("deit-teacher", 6), (6, 4, 3)),
        "swin": (tiny.ensemble("swin", base={"output_hidden_states": True}), dataset("swin", 6), (6, 4, 3)),
        "choices": (tiny.ensemble("bert-choice"), rows, (4, 4, 3)),
    }
    for model, data, shape in cases.values():
        trainer = trainer_for(model, tmp_path, data, return_member_logits=True, per_device_eval_batch_size=2)
        prediction = trainer.predict(data)
        assert prediction.predictions.shape == shape
        assert prediction.metrics["test_nll"] > 0


def test_regression_target_of_minus_one_hundred_is_a_number(tmp_path):
    labels = torch.tensor([-100.0, 1.0, -100.0, -3.0])
    data = dataset("vit", 4).remove_columns("labels").add_column("labels", labels.tolist()).with_format("torch")
    model = tiny.ensemble("vit", num_labels=1)
    with torch.no_grad():
        expected = model(pixel_values=data[:]["pixel_values"], labels=labels).loss.item()
    trainer = trainer_for(model, tmp_path, data, diversity_weight=0.0, max_steps=1)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)
    trainer.train()
    assert step_logs(trainer)[0]["task_loss"] == pytest.approx(expected, rel=1e-3)


def test_step_and_evaluation_without_any_label(tmp_path):
    rows = dataset("bert-token", 4)
    data = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in rows]
    trainer = trainer_for(tiny.ensemble("bert-token"), tmp_path, data, max_steps=1)
    trainer.train()
    assert step_logs(trainer)[0]["task_loss"] == 0
    assert "eval_nll" not in trainer.evaluate()


def test_smoothing_of_what_is_no_single_label_is_refused(tmp_path):
    model = tiny.ensemble("vit", problem_type="regression")
    data = dataset("vit", 4).remove_columns("labels").add_column("labels", [[0.5, 1.0, 2.0]] * 4).with_format("torch")
    with pytest.raises(ValueError, match="label_smoothing_factor is for single labels, this model is for regression"):
        trainer_for(model, tmp_path, data, label_smoothing_factor=0.1).train()
