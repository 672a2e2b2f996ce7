import evaluate_tiny
import pytest
import tiny
import torch
import transformers
from typer.testing import CliRunner

from sigma_nens_hf import extract_mean, load_ensemble
from sigma_nens_hf.cli import app
from sigma_nens_hf.extraction import extract_to_folder


def run(*arguments):
    return CliRunner().invoke(app, ["extract", *map(str, arguments)])


@pytest.fixture(scope="module", params=["bert", "vit"])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("extraction")
    evaluate_tiny.save_adapter(folder, request.param)
    return request.param, folder / "adapter"


def plain(architecture, folder):
    """What transformers loads by itself: the model, and the labels that its pipeline gives."""
    classes = {"bert": transformers.AutoModelForSequenceClassification}
    model = classes.get(architecture, transformers.AutoModelForImageClassification).from_pretrained(folder)
    assert model.config.id2label == evaluate_tiny.LABELS
    task = tiny.task(architecture)
    one = "a good film" if architecture == "bert" else evaluate_tiny.dataset("vit", 1)[0]["image"]
    assert transformers.pipeline(task, model=str(folder))(one)[0]["label"] in evaluate_tiny.LABELS.values()
    return model


def test_member_is_that_member(saved, tmp_path):
    architecture, adapter = saved
    result = run(adapter, tmp_path / "new" / "out", "--member", 2)
    assert result.exit_code == 0
    assert "Member 2 is in" in result.output
    batch = tiny.inputs(architecture, with_labels=False)
    expected = load_ensemble(adapter)[0](**batch).member_logits[:, 2]
    torch.testing.assert_close(plain(architecture, tmp_path / "new" / "out")(**batch).logits, expected)


def test_mean_is_the_mean_and_no_ensemble(saved, tmp_path):
    architecture, adapter = saved
    (tmp_path / "out").mkdir()
    result = run(adapter, tmp_path / "out", "--mean")
    assert result.exit_code == 0
    assert "one model and no ensemble" in " ".join(result.output.split())
    batch = tiny.inputs(architecture, with_labels=False)
    expected = extract_mean(load_ensemble(adapter)[0])(**batch).logits
    torch.testing.assert_close(plain(architecture, tmp_path / "out")(**batch).logits, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "either --member K or --mean"),
        (("--mean", "--member", 1), "either --member K or --mean"),
        (("--member", 3), "member must be from 0 to 2"),
    ],
)
def test_what_is_to_be_extracted_must_be_said(saved, options, message, tmp_path):
    result = run(saved[1], tmp_path / "out", *options)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_touched(saved, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for target in ("out", "file"):
        with pytest.raises(ValueError, match="is there already and is no empty folder"):
            extract_to_folder(saved[1], tmp_path / target, 0)
    assert (tmp_path / "out" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"


def test_failure_leaves_nothing(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        extract_to_folder(saved[1], tmp_path / "out", 0)
    assert not list(tmp_path.iterdir())
