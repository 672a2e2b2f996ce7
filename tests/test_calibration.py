import copy
import math
import warnings

import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset
from test_trainer import dataset, trainer_for

from sigma_nens_hf import (
    fit_temperature,
    load_ensemble,
    member_subset,
    predict,
    temperature_in_use,
    use_calibration,
)
from sigma_nens_hf.calibration import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from sigma_nens_hf.metrics import accuracy, negative_log_likelihood


def synthetic(temperature, num_examples=20_000, num_classes=4, seed=0):
    """Logits whose labels are drawn from their softmax at a temperature."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num_examples, num_classes, generator=generator, dtype=torch.float64)
    labels = (logits / temperature).softmax(1).multinomial(1, generator=generator)[:, 0]
    return logits, labels


@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.0, 2.5, 8.0])
@pytest.mark.parametrize("num_classes", [2, 10])
def test_a_known_temperature_is_recovered(temperature, num_classes):
    fit = fit_temperature(*synthetic(temperature, num_classes=num_classes))
    assert fit.temperature == pytest.approx(temperature, rel=0.06)
    assert fit.num_examples == 20_000


@pytest.mark.parametrize("seed", range(10))
def test_the_fit_is_the_minimum(seed):
    logits, labels = synthetic(0.5 + seed / 3, num_examples=30, seed=seed)
    fit = fit_temperature(logits, labels)

    def nll(temperature):
        return negative_log_likelihood((logits / temperature).softmax(1), labels)

    assert fit.nll_before == pytest.approx(nll(1))
    assert fit.nll_after == pytest.approx(nll(fit.temperature))
    assert fit.nll_after <= fit.nll_before
    grid = np.geomspace(LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE, 400)
    assert fit.nll_after <= min(map(nll, grid)) + 1e-12


@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray, lambda values: values.tolist()])
def test_a_shift_of_the_logits_and_their_kind_change_nothing(kind):
    logits, labels = synthetic(2.0, num_examples=200)
    shifted = logits + torch.randn(200, 1) * 1e3
    assert fit_temperature(kind(shifted), kind(labels)).temperature == pytest.approx(
        fit_temperature(logits, labels).temperature, rel=1e-6
    )


@pytest.mark.parametrize(
    ("logits", "labels", "temperature", "message"),
    [
        ([[2.0, 0.0], [0.0, 1.0]], [0, 1], LOWEST_TEMPERATURE, "no error"),
        ([[2.0, 0.0], [0.0, 1.0]], [1, 0], HIGHEST_TEMPERATURE, "the wrong thing"),
        ([[0.0], [3.0]], [0, 0], 1.0, "same logit for all classes"),
        ([[4.0, 4.0], [-7.0, -7.0]], [0, 1], 1.0, "same logit for all classes"),
        ([[2.0, 0.0]], [0], LOWEST_TEMPERATURE, "no error"),
        ([[2.0, 0.0], [1.0, 0.0], [0.0, 0.5]], [0, 0, 0], None, "labels are the same"),
    ],
)
def test_what_tells_no_temperature_ends_bounded_with_a_warning(logits, labels, temperature, message):
    with pytest.warns(UserWarning, match=message):
        fit = fit_temperature(logits, labels)
    assert LOWEST_TEMPERATURE <= fit.temperature <= HIGHEST_TEMPERATURE
    assert temperature is None or fit.temperature == temperature
    assert fit.nll_after <= fit.nll_before


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        ([[math.nan, 0.0]], [0], "NaN or infinity"),
        ([[-math.inf, 0.0]], [0], "NaN or infinity"),
        ([0.0, 1.0], [0, 1], r"logits \(N, C\)"),
        (np.zeros((0, 2)), [], r"logits \(N, C\)"),
        ([[0.2, 0.8], [0.5, 0.5]], [0, 1], "probabilities, not logits"),
        ([[0.0, 1.0]], [-1], "Labels must be from 0 to 1"),
        ([[0.0, 1.0]], [0, 1], "one for each example"),
    ],
)
def test_bad_input_is_refused(logits, labels, message):
    with pytest.raises(ValueError, match=message):
        fit_temperature(logits, labels)


@pytest.mark.parametrize("architecture", ["bert", "vit", "bert-token", "bert-choice", "deit-teacher"])
@pytest.mark.parametrize("return_member_logits", [False, True])
def test_trainer_fits_the_pooled_prediction_and_the_model_uses_it_when_asked(
    architecture, return_member_logits, tmp_path
):
    model = tiny.ensemble(architecture)
    data = dataset(architecture, 14)
    trainer = trainer_for(model, tmp_path, data, return_member_logits=return_member_logits)
    with torch.no_grad():
        inputs = {name: data[:][name] for name in data.column_names if name != "labels"}
        before = model(**inputs)
    labels = data[:]["labels"]
    pooled, members = before.logits[labels != -100], before.member_logits
    fit = trainer.calibrate(data)
    assert fit.temperature == pytest.approx(fit_temperature(pooled, labels[labels != -100]).temperature, rel=1e-3)
    assert model.peft_config["default"].calibration_temperature == fit.temperature
    assert temperature_in_use(model) == 1

    use_calibration(model)
    assert temperature_in_use(model) == fit.temperature
    with torch.no_grad():
        after = model(**inputs)
    torch.testing.assert_close(after.member_logits, members)
    expected = members.double().softmax(-1).mean(1) ** (1 / fit.temperature)
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(after.logits.softmax(-1), expected.float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(after.logits.logsumexp(-1), torch.zeros(after.logits.shape[:-1]), rtol=0, atol=1e-5)
    evaluation = trainer.evaluate()
    assert evaluation["eval_nll"] == pytest.approx(fit.nll_after, rel=1e-4)
    assert evaluation["eval_accuracy"] == accuracy(pooled.softmax(-1), labels[labels != -100])
    # Fitted again in use, it is that of the pooled prediction, not of the calibrated one; and stays in use.
    assert trainer.calibrate(data).temperature == fit.temperature
    assert temperature_in_use(copy.deepcopy(model)) == fit.temperature
    with model.disable_adapter(), torch.no_grad():
        model(**inputs)  # has no members, and nothing to calibrate
    use_calibration(model, False)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, before.logits)


def test_predictions_of_a_loaded_ensemble_are_calibrated_when_asked(checkpoint_folder, tokenizer, tmp_path):
    folder = checkpoint_folder("bert")
    model = tiny.adapt(tiny.base_model("bert"), id2label={0: "bad", 1: "fair", 2: "good"})
    model.peft_config["default"].base_model_name_or_path = str(folder)
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="has no calibration_temperature"):
        load_ensemble(tmp_path / "plain", calibrated=True)
    model.peft_config["default"].calibration_temperature = 2.0
    use_calibration(model)
    model.save_pretrained(tmp_path / "adapter")
    plain, _ = load_ensemble(tmp_path / "adapter")
    assert temperature_in_use(plain) == 1  # whether it is in use is no part of an adapter
    calibrated, _ = load_ensemble(tmp_path / "adapter", calibrated=True)
    texts = ["a good film", "dull", "a very fine film"]
    for before, after in zip(predict(plain, tokenizer, texts), predict(calibrated, tokenizer, texts), strict=True):
        powers = {name: probability**0.5 for name, probability in before.probabilities.items()}
        assert after.probabilities == pytest.approx({n: p / sum(powers.values()) for n, p in powers.items()}, rel=1e-4)
        assert after.label == before.label
        assert after.probability == max(after.probabilities.values())
        for name in ("predictive_entropy", "expected_entropy", "modulation_uncertainty", "member_votes"):
            assert getattr(after, name) == getattr(before, name)
    batch = tiny.inputs("bert", with_labels=False)
    with member_subset(calibrated, 1), torch.no_grad():
        output = calibrated(**batch)
    torch.testing.assert_close(output.logits, (output.member_logits[:, 0] / 2).log_softmax(-1))


def test_each_adapter_has_a_temperature_of_its_own():
    model = tiny.ensemble("bert")
    model.peft_config["default"].calibration_temperature = 2.0
    use_calibration(model)
    model.add_adapter("other", tiny.SigmaNormConfig(num_members=2))
    model.set_adapter("other")
    assert temperature_in_use(model) == 1
    with pytest.raises(ValueError, match="has no calibration_temperature"):
        use_calibration(model)
    model.set_adapter("default")
    assert temperature_in_use(model) == 2


def test_only_single_labels_have_a_temperature(tmp_path):
    model = tiny.ensemble("bert", problem_type="multi_label_classification", calibration_temperature=2.0)
    with pytest.raises(ValueError, match="for single labels"):
        use_calibration(model)
    with pytest.raises(ValueError, match="for single labels"):
        trainer_for(model, tmp_path, dataset("bert")).calibrate(dataset("bert"))
    use_calibration(model, False)


def test_a_failed_fit_leaves_the_adapter_as_it_was(tmp_path):
    model = tiny.ensemble("bert", calibration_temperature=2.0)
    use_calibration(model)
    trainer = trainer_for(model, tmp_path, dataset("bert"))
    with pytest.raises(ValueError, match="names none of the 3 classes"):
        trainer.calibrate(dataset("bert").map(lambda row: {"labels": -1}))
    assert temperature_in_use(model) == 2


@pytest.mark.parametrize(
    ("trainer_kwargs", "arguments"),
    [
        ({"preprocess_logits_for_metrics": lambda logits, labels: logits.softmax(-1)}, {}),
        ({}, {"prediction_loss_only": True}),
        ({}, {"eval_do_concat_batches": False}),
    ],
)
def test_settings_of_evaluations_do_not_reach_the_fit(trainer_kwargs, arguments, tmp_path):
    data = dataset("bert", 14)
    model = tiny.ensemble("bert")
    expected = trainer_for(model, tmp_path, data).calibrate(data)
    trainer = trainer_for(model, tmp_path, data, trainer_kwargs, **arguments)
    assert trainer.calibrate(data) == expected
    assert trainer.preprocess_logits_for_metrics == trainer_kwargs.get("preprocess_logits_for_metrics")
    assert all(getattr(trainer.args, name) == value for name, value in arguments.items())
    with pytest.raises(ValueError, match="have no labels"):
        trainer.calibrate(data.remove_columns("labels"))


def test_choices_that_are_not_there_count_nothing(tmp_path):
    """Batches with different numbers of choices are padded when they are joined."""
    batches = [tiny.inputs("bert-choice", 6, seed=seed) for seed in (1, 2)]
    rows = [{name: batch[name][i].tolist() for name in batch} for batch in batches for i in range(6)]
    for row in rows[6:]:
        row |= {name: row[name][:2] for name in ("input_ids", "attention_mask")} | {"labels": row["labels"] % 2}
    model = tiny.ensemble("bert-choice")
    logits, labels = [], []
    with torch.no_grad():
        for row in rows:
            labels.append(row["labels"])
            inputs = {name: torch.tensor([row[name]]) for name in ("input_ids", "attention_mask")}
            logits.append(model(**inputs).logits[0])
    padded = torch.nn.utils.rnn.pad_sequence(logits, batch_first=True, padding_value=-1e4)
    expected = fit_temperature(padded, labels)
    data = Dataset.from_list(rows).with_format("torch")
    for return_member_logits in (False, True):
        trainer = trainer_for(
            model, tmp_path, data, per_device_eval_batch_size=6, return_member_logits=return_member_logits
        )
        assert trainer.calibrate(data).temperature == pytest.approx(expected.temperature, rel=1e-3)


def test_further_training_takes_the_temperature_away(tmp_path):
    model = tiny.ensemble("bert", calibration_temperature=2.0)
    use_calibration(model)
    trainer_for(model, tmp_path, dataset("bert"), max_steps=1).train()
    assert model.peft_config["default"].calibration_temperature is None
    assert temperature_in_use(model) == 1


def test_models_of_one_config_have_temperatures_of_their_own():
    config = tiny.SigmaNormConfig(num_members=2, calibration_temperature=2.0)
    one, other = (tiny.get_peft_model(tiny.base_model("bert"), config) for _ in range(2))
    use_calibration(one)
    assert temperature_in_use(one) == 2
    assert temperature_in_use(other) == 1


def test_logits_at_the_ends_of_what_numbers_can_say():
    with pytest.warns(UserWarning, match="the wrong thing"):
        fit_temperature([[1e308, -1e308], [1.0, 0.0]], [1, 0])


def test_an_ordinary_fit_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_temperature(*synthetic(1.5, num_examples=300))
