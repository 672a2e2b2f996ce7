import os

import image_assets
import numpy as np
import pytest
import run_imagenet_vit
import torch
from datasets import ClassLabel, Dataset, Features, Image
from script_runs import COLOURS, NUM_REPORT, NUM_TRAIN, coloured_image, command_line, parse
from transformers import AutoImageProcessor, BitImageProcessorPil

from sigma_nens_hf import ensemble_from_pretrained, load_ensemble, predict
from sigma_nens_hf.data.images import (
    IMAGE,
    LABELS,
    TRAINING_IMAGE,
    ImageArguments,
    forward_arguments,
    resized_processor,
)
from sigma_nens_hf.metrics import accuracy, negative_log_likelihood


@pytest.fixture
def vit_folder(checkpoint_folder):
    return checkpoint_folder("vit", encoder_only=True)


@pytest.fixture
def arguments(vit_folder, tmp_path):
    return [*command_line("image", tmp_path, vit_folder), "--compare_single", "False"]


def parquet_file(path, names, numbers, columns=("img", "fine_label")):
    """Write images of several modes, as ImageNet has them."""
    modes = ["RGB", "L", "RGBA", "P"]
    images = [coloured_image(i).convert("RGB").convert(modes[i % 4]) for i in numbers]
    features = Features({columns[0]: Image(), columns[1]: ClassLabel(names=names)})
    data = {columns[0]: images, columns[1]: [i % 3 for i in numbers]}
    Dataset.from_dict(data, features=features).to_parquet(path)
    return str(path)


def test_folder_to_reports_and_a_loadable_adapter(arguments, tmp_path):
    (ensemble,) = run_imagenet_vit.main([*arguments, "--num_train_epochs", "6", "--augmentation", "flip"])
    assert ensemble.num_examples == NUM_REPORT
    assert ensemble.metrics["accuracy"]["value"] > 0.7  # the task is a matter of colour
    model, processor = load_ensemble(tmp_path / "out" / "ensemble" / "adapter")
    numbers = range(NUM_TRAIN, NUM_TRAIN + NUM_REPORT)
    predictions = predict(model, processor, [coloured_image(i) for i in numbers])
    p = torch.tensor([[prediction.probabilities[name] for name in COLOURS] for prediction in predictions])
    labels = [i % 3 for i in numbers]
    assert ensemble.metrics["accuracy"]["value"] == pytest.approx(accuracy(p, labels))
    assert ensemble.metrics["nll"]["value"] == pytest.approx(negative_log_likelihood(p, labels), rel=1e-3)


def test_files_with_images_of_any_mode_and_the_checkpoints_own_head(arguments, checkpoint_folder, tmp_path, capsys):
    names = list(COLOURS)
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    files = ["--train_file", parquet_file(tmp_path / "train.parquet", names, range(24))]
    files += ["--report_file", parquet_file(tmp_path / "report.parquet", names, range(24, 31))]
    model = ["--model_name_or_path", str(checkpoint_folder("vit", **labels)), "--init_scaler_std", "0"]
    nothing_learned = ["--max_steps", "1", "--learning_rate", "0", "--scaler_learning_rate", "0"]
    (copied,) = run_imagenet_vit.main([*arguments, *files, *model, *nothing_learned])
    assert copied.num_examples == 7
    assert copied.disagreement == 0  # every member has the checkpoint's head
    assert "head is not copied" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--image_column", "nowhere"], r"train split has no column \['nowhere'\]"),
        (["--label_column", "nowhere"], r"train split has no column \['nowhere'\]"),
        (["--report_split", "test"], r"has no split \['test'\], only \['train', 'validation'\]"),
        (["--crop_scale", "0"], r"share of the image in \(0, 1\]"),
    ],
)
@pytest.mark.parametrize("how", [[], ["--streaming", "--max_steps", "1"]], ids=["in memory", "streamed"])
def test_what_cannot_be_is_named(arguments, changes, message, how):
    with pytest.raises(ValueError, match=message):
        run_imagenet_vit.main([*arguments, *changes, *how])


def test_checkpoint_without_a_processor_is_refused(arguments, vit_folder):
    os.remove(vit_folder / "preprocessor_config.json")
    with pytest.raises(ValueError, match=r"no preprocessor_config\.json"):
        run_imagenet_vit.main(arguments)


def test_batches_are_preprocessed_by_the_checkpoints_processor_and_augmented_in_training_only(arguments, vit_folder):
    _, data_args, _ = parse("image", arguments)
    model, processor = ensemble_from_pretrained(vit_folder, "image-classification", num_labels=3)
    processor.image_mean, processor.image_std = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
    images = [coloured_image(i) for i in range(4)]
    features = Features({IMAGE: Image(), LABELS: ClassLabel(num_classes=3)})
    split = Dataset.from_dict({IMAGE: images, LABELS: [0, 1, 2, 0]}, features=features)
    split = split.cast_column(IMAGE, Image(decode=False))
    collate = data_args.collator(model, processor)
    evaluated = collate(list(data_args.encode(split, processor, is_training=False)))
    assert evaluated.keys() == {"pixel_values", LABELS}
    assert evaluated[LABELS].tolist() == [0, 1, 2, 0]
    expected = processor(images, return_tensors="pt")["pixel_values"]
    assert torch.equal(evaluated["pixel_values"], expected)
    by_hand = np.asarray(images[0].resize((16, 16), resample=2), np.float32) / 255
    by_hand = (by_hand - processor.image_mean) / processor.image_std
    assert np.allclose(evaluated["pixel_values"][0].permute(1, 2, 0), by_hand, atol=1e-5)
    trained = collate(list(data_args.encode(split, processor, is_training=True)))
    assert trained["pixel_values"].shape == expected.shape
    assert not torch.equal(trained["pixel_values"], expected)
    data_args.augmentation = "none"
    collate = data_args.collator(model, processor)
    assert torch.equal(collate([{TRAINING_IMAGE: row[IMAGE], LABELS: 0} for row in split])["pixel_values"], expected)


@pytest.mark.parametrize("architecture", ["vit", "dinov2"])
def test_other_image_size(architecture, checkpoint_folder):
    folder = checkpoint_folder(architecture, encoder_only=True)
    model, processor = ensemble_from_pretrained(folder, "image-classification", num_labels=3)
    assert forward_arguments(model, processor) == {}
    larger = ImageArguments(image_size=24).adjust(model, processor)
    assert processor.size["height"] == 16
    assert larger([coloured_image(0)], return_tensors="pt")["pixel_values"].shape == (1, 3, 24, 24)
    wanted = {"interpolate_pos_encoding": True} if architecture == "vit" else {}
    assert forward_arguments(model, larger) == wanted
    with pytest.raises(ValueError, match=r"takes no images of \(2, 2\) pixels"):
        forward_arguments(model, resized_processor(processor, 2))


def test_other_image_size_of_a_processor_that_crops():
    processor = BitImageProcessorPil(size={"shortest_edge": 64}, crop_size={"height": 56, "width": 56})
    resized = resized_processor(processor, 28)
    assert (resized.size["shortest_edge"], resized.crop_size["height"], resized.crop_size["width"]) == (32, 28, 28)
    assert resized([coloured_image(0)], return_tensors="pt")["pixel_values"].shape == (1, 3, 28, 28)


def test_run_at_another_image_size(arguments, tmp_path):
    (ensemble,) = run_imagenet_vit.main([*arguments, "--image_size", "24", "--max_steps", "2"])
    assert ensemble.num_examples == NUM_REPORT
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out" / "ensemble" / "adapter")
    assert processor.size["height"] == 24


def test_offline_assets_bring_their_own_defaults_which_the_command_line_overrides(arguments, monkeypatch, vit_folder):
    pytest.importorskip("onnx")
    import vit_asset

    monkeypatch.setattr(image_assets, "fashion_folder", lambda: None)
    monkeypatch.setattr(vit_asset, "vit_folder", lambda: vit_folder)
    without_model = arguments[arguments.index("--output_dir") :]
    cut = ["--max_train_samples", "24", "--max_report_samples", "30"]
    (ensemble,) = run_imagenet_vit.main(["--offline_assets", *without_model, *cut])
    assert ensemble.num_examples == 30
    assert ensemble.num_members == 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_real_vit_on_digits_is_far_above_chance(tmp_path, monkeypatch):
    monkeypatch.setattr(image_assets, "fashion_folder", lambda: None)
    arguments = ["--offline_assets", "--max_train_samples", "1000", "--num_members", "2", "--disable_tqdm", "True"]
    single, ensemble = run_imagenet_vit.main([*arguments, "--output_dir", str(tmp_path)])
    assert single.num_examples == ensemble.num_examples == 450
    assert min(report.metrics["accuracy"]["value"] for report in (single, ensemble)) > 0.6


def test_image_that_cannot_be_read_is_named(checkpoint_folder, tmp_path):
    model, processor = ensemble_from_pretrained(checkpoint_folder("vit"), "image-classification")
    collate = ImageArguments().collator(model, processor)
    path = tmp_path / "cut.png"
    coloured_image(0).save(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"cut\.png cannot be read"):
        collate([{IMAGE: {"path": str(path), "bytes": None}, LABELS: 0}])
