import json

import pytest
import run_sst2
import torch
from script_runs import NUM_REPORT, NUM_TRAIN, command_line, rows

from sigma_nens_hf import load_ensemble, predict
from sigma_nens_hf.metrics import accuracy, negative_log_likelihood


def test_files_to_reports_and_a_loadable_adapter(checkpoint_folder, tmp_path, capsys):
    arguments = command_line("text", tmp_path, checkpoint_folder("bert", encoder_only=True))
    single, ensemble = run_sst2.main([*arguments, "--num_train_epochs", "30", "--scale_learning_rate", "0.1"])
    assert (single.name, single.num_members) == ("single", 1)
    assert (ensemble.name, ensemble.num_members) == ("ensemble", 3)
    assert single.num_examples == ensemble.num_examples == NUM_REPORT
    assert ensemble.metrics["accuracy"]["value"] > 0.7  # the task is a matter of single words
    printed = capsys.readouterr().out
    for name in ("accuracy", "NLL", "ECE", "Brier", "training time", "stored adapter"):
        assert name in printed
    adapter = tmp_path / "out" / "ensemble" / "adapter"
    assert ensemble.adapter_bytes == (adapter / "adapter_model.safetensors").stat().st_size
    model, tokenizer = load_ensemble(adapter)
    report = list(rows(NUM_REPORT, NUM_TRAIN))
    predictions = predict(model, tokenizer, [row["text"] for row in report])
    names = {"negative": 0, "positive": 1}
    p = torch.tensor([[prediction.probabilities[name] for name in names] for prediction in predictions])
    labels = [names[row["mood"]] for row in report]
    assert ensemble.metrics["accuracy"]["value"] == pytest.approx(accuracy(p, labels))
    assert ensemble.metrics["nll"]["value"] == pytest.approx(negative_log_likelihood(p, labels), rel=1e-3)
    written = json.loads((tmp_path / "out" / "ensemble" / "report.json").read_text())
    assert written["metrics"] == ensemble.metrics
