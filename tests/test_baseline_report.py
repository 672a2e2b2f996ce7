import json

import baseline_costs
import numpy as np
import pytest
import scipy.stats
import torch
from baseline_report import LOGITS_FILE, METHODS, RUN_FILE, read_answers, report_of

from sigma_nens_hf import fit_temperature
from sigma_nens_hf.metrics import accuracy, negative_log_likelihood

NUM_EXAMPLES, SEEDS = 40, (0, 1, 2)
SIZES = {"norms": 1, "sigma": 2, "full": 1}
COSTS = {"training": {"norms": 1.0, "sigma": 2.5, "full": 1.5}, "inference": dict.fromkeys([*SIZES, "dropout"], 3.0)}


@pytest.fixture
def folder(tmp_path):
    """Answers as of trained models: right more often than not; the full fine-tune has one seed."""
    generator = torch.Generator().manual_seed(0)
    labels = {split: torch.randint(0, 2, (NUM_EXAMPLES,), generator=generator) for split in ("calibration", "report")}
    for kind, num_members in SIZES.items():
        for seed in SEEDS[:1] if kind == "full" else SEEDS:
            for index in range(1 if kind == "sigma" else 2):
                one = tmp_path / f"{kind}-seed{seed}-{index}"
                one.mkdir()
                answers = {}
                for split, right in labels.items():
                    signal = torch.nn.functional.one_hot(right, 2)[:, None] * (3.0 if kind == "sigma" else 1.5)
                    noise = 2 * torch.randn(NUM_EXAMPLES, num_members, 2, generator=generator)
                    answers |= {f"{split}/logits": (signal + noise).numpy(), f"{split}/labels": right.numpy()}
                    answers[f"{split}/dropout"] = answers[f"{split}/logits"].repeat(3, 1)
                np.savez(one / LOGITS_FILE, **answers)
                (one / RUN_FILE).write_text(json.dumps({"trained_parameters": 1000, "stored_bytes": 4096}))
    return tmp_path


def pooled(folder, names, split):
    runs = [np.load(folder / name / LOGITS_FILE) for name in names]
    members = torch.as_tensor(np.concatenate([run[f"{split}/logits"] for run in runs], 1)).double()
    return members.softmax(-1).mean(1), runs[0][f"{split}/labels"]


def cells(report, name, nth=0):
    lines = [line for line in report.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in lines[nth].strip("|").split("|")]


def with_interval(values):
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.3f} ± {half:.3f}"


def test_figures_are_means_over_seeds_with_intervals(folder):
    report = report_of(folder, SEEDS, 2, COSTS, resamples=50)
    assert f"**held-out sentences**, {NUM_EXAMPLES} examples" in report
    by_name = {
        "sigma-N-Ens": lambda seed: [f"sigma-seed{seed}-0"],
        "deep ensemble, tuned norms": lambda seed: [f"norms-seed{seed}-0", f"norms-seed{seed}-1"],
    }
    for name, models in by_name.items():
        predictions = [pooled(folder, models(seed), "report") for seed in SEEDS]
        row = cells(report, name)
        assert row[1] == "3"
        assert row[2] == with_interval([accuracy(*prediction) for prediction in predictions])
        assert row[3] == with_interval([negative_log_likelihood(*prediction) for prediction in predictions])
    assert cells(report, "deep ensemble, full fine-tunes")[1] == "1"
    assert "±" not in cells(report, "deep ensemble, full fine-tunes")[2]
    assert "LoRA" not in report  # there is none


def test_temperature_scaling_is_fitted_on_the_calibration_split_of_each_seed(folder):
    method = next(method for method in METHODS if method.name == "sigma-N-Ens")
    answers = read_answers(folder, method, SEEDS, 2, COSTS)
    for seed in SEEDS:
        probabilities, labels = pooled(folder, [f"sigma-seed{seed}-0"], "calibration")
        temperature = fit_temperature(probabilities.log(), labels).temperature
        assert answers.temperatures[seed] == pytest.approx(temperature)
        probabilities, labels = pooled(folder, [f"sigma-seed{seed}-0"], "report")
        scaled = probabilities ** (1 / temperature)
        scaled = (scaled / scaled.sum(1, keepdim=True)).numpy()
        found = answers.scaled["held-out sentences"][seed]
        np.testing.assert_allclose(found.label_probability, scaled[range(NUM_EXAMPLES), labels], rtol=1e-5)


def test_differences_are_over_the_seeds_that_both_have(folder):
    report = report_of(folder, SEEDS, 2, COSTS, resamples=50)
    ours = [negative_log_likelihood(*pooled(folder, [f"sigma-seed{seed}-0"], "report")) for seed in SEEDS]
    single = [negative_log_likelihood(*pooled(folder, [f"norms-seed{seed}-0"], "report")) for seed in SEEDS]
    full = negative_log_likelihood(*pooled(folder, ["full-seed0-0"], "report"))
    difference = cells(report, "single model, tuned norms", 1)[1]
    assert difference.startswith(f"{np.mean(ours) - np.mean(single):+.3f} [-")
    assert cells(report, "single model, full fine-tune", 1)[1].startswith(f"{ours[0] - full:+.3f} [")


def test_costs_of_a_deep_ensemble_are_those_of_all_its_models(folder):
    report = report_of(folder, SEEDS, 2, COSTS, resamples=50)
    assert cells(report, "single model, tuned norms", 2)[1:5] == ["1,000", "4 KiB", "1.00", "3.00"]
    assert cells(report, "deep ensemble, tuned norms", 2)[1:5] == ["2,000", "8 KiB", "2.00", "6.00"]
    assert cells(report, "sigma-N-Ens", 1)[1:5] == ["1,000", "4 KiB", "2.50", "3.00"]


def test_a_folder_without_a_finished_method_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no method"):
        report_of(tmp_path, SEEDS, 2, COSTS, resamples=50)


def test_costs_are_ratios_of_medians_to_the_first_model(monkeypatch):
    class Trainer:
        def __init__(self, seconds):
            self.seconds = iter(seconds)

        def create_optimizer(self):
            pass

    monkeypatch.setattr(baseline_costs, "ROUNDS", 3)
    monkeypatch.setattr(baseline_costs, "_seconds", lambda function, trainer, *rest: next(trainer.seconds))
    trainers = {"norms": Trainer([2, 4, 8, 1, 4, 8, 9, 5, 8]), "sigma": Trainer([5, 6, 6, 6, 90, 6])}
    costs = baseline_costs.measure_costs(trainers, [None] * 5, batch_size=2, dropout_passes=4)
    assert costs["training"] == {"norms": 1, "sigma": 6 / 2}
    assert costs["inference"] == {"norms": 1, "dropout": 8 / 4, "sigma": 6 / 4}
