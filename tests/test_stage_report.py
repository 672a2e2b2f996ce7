import dataclasses

import numpy as np
import pytest
import torch
from rich.console import Console
from stage_report import StageReport, load_examples, save_examples, table_of

from sigma_nens_hf.metrics import ExampleTable, calibration_report


def report_of(name, num_members, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(60) % 2
    signal = torch.stack([1 - labels, labels], -1)[:, None] * 2.0
    logits = signal + torch.randn(60, num_members, 2, generator=generator)
    table = ExampleTable.of_members(logits, labels)
    metrics = calibration_report(table, n_resamples=50)
    report = StageReport(
        name=name,
        num_members=num_members,
        metrics=metrics,
        scaled_metrics={metric: metrics[metric] for metric in ("nll", "ece")},
        temperature=1.25,
        calibration_nll=0.5,
        disagreement=float(table.disagreement.mean()),
        seconds=12.3,
        resumed=num_members > 1,
        adapter_bytes=2048,
        num_examples=len(table),
    )
    return report, table


def printed(*arguments):
    console = Console(width=140, record=True)
    console.print(table_of(*arguments))
    return console.export_text()


def test_two_models_are_set_side_by_side_with_their_difference():
    (single, single_examples), (ensemble, examples) = report_of("single", 1, 0), report_of("ensemble", 4, 1)
    text = printed([single, ensemble], [single_examples, examples], 7)
    accuracy = next(line for line in text.splitlines() if "accuracy" in line)
    for report in (single, ensemble):
        assert f"{report.metrics['accuracy']['value']:.4f} [{report.metrics['accuracy']['lower']:.3f}," in accuracy
    difference = ensemble.metrics["accuracy"]["value"] - single.metrics["accuracy"]["value"]
    assert f"{difference:+.4f} [" in accuracy
    floor = next(line for line in text.splitlines() if "if calibrated" in line)
    assert f"{single.metrics['ece']['noise_floor_mean']:.4f} (95%" in floor
    assert "12 s (resumed)" in text
    assert "60 held-out examples, seed 7" in text


def test_one_model_has_no_difference():
    report, examples = report_of("ensemble", 4, 1)
    text = printed([report], [examples], 7)
    assert "difference" not in text.partition("In brackets")[0]
    assert "+0." not in text


def test_examples_are_stored_whole(tmp_path):
    _, examples = report_of("ensemble", 4, 1)
    save_examples(tmp_path / "examples.npz", examples)
    assert [path.name for path in tmp_path.iterdir()] == ["examples.npz"]
    loaded = load_examples(tmp_path / "examples.npz")
    for field in dataclasses.fields(ExampleTable):
        np.testing.assert_array_equal(getattr(loaded, field.name), getattr(examples, field.name))
    examples = ExampleTable.of_members(torch.randn(3, 2, 2), keep_votes=False)
    save_examples(tmp_path / "examples.npz", examples)
    assert load_examples(tmp_path / "examples.npz").label is None


def test_models_over_other_examples_are_not_compared():
    (single, single_examples), (ensemble, examples) = report_of("single", 1, 0), report_of("ensemble", 4, 1)
    with pytest.raises(ValueError, match="same examples"):
        table_of([single, ensemble], [single_examples, examples.select(np.arange(60)[::-1])], 7)
