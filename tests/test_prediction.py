from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset
from PIL import Image
from transformers import ViTImageProcessor, pipeline

from sigma_nens_hf import RegressionPrediction, decompose_uncertainty, load_ensemble, predict
from sigma_nens_hf.encoding import max_input_length

LABELS = {0: "bad", 1: "fair", 2: "good"}
SENTENCES = ["a very good film", "dull", "bad bad film very dull", "fine"]


@torch.no_grad()
def test_every_field_follows_from_the_members_logits(tokenizer):
    model = tiny.ensemble("bert", id2label=LABELS)
    predictions = predict(model, tokenizer, SENTENCES, batch_size=3)
    for sentence, prediction in zip(SENTENCES, predictions, strict=True):
        member_logits = model(**tokenizer(sentence, return_tensors="pt")).member_logits
        p = member_logits.softmax(-1).mean(1)[0]
        assert prediction.label == LABELS[p.argmax().item()]
        assert prediction.probability == pytest.approx(p.max().item(), rel=1e-4)
        assert list(prediction.probabilities) == ["bad", "fair", "good"]
        np.testing.assert_allclose(list(prediction.probabilities.values()), p, rtol=1e-3, atol=1e-6)
        parts = [part.item() for part in decompose_uncertainty(member_logits)]
        assert prediction.predictive_entropy == pytest.approx(parts[0], rel=1e-3, abs=1e-5)
        assert prediction.expected_entropy == pytest.approx(parts[1], rel=1e-3, abs=1e-5)
        assert prediction.modulation_uncertainty == pytest.approx(parts[2], rel=1e-3, abs=1e-5)
        assert prediction.member_votes == [LABELS[i] for i in member_logits[0].argmax(-1).tolist()]


def test_single_inputs_pairs_and_empty_lists(tokenizer):
    model = tiny.ensemble("bert", id2label=LABELS)
    assert predict(model, tokenizer, []) == []
    (alone,) = predict(model, tokenizer, SENTENCES[0])
    assert alone.label == predict(model, tokenizer, SENTENCES)[0].label
    (pair,) = predict(model, tokenizer, ("good film", "dull film"))
    assert predict(model, tokenizer, [("good film", "dull film")] * 2)[1].label == pair.label


def test_iterables_of_texts(tokenizer):
    model = tiny.ensemble("bert", id2label=LABELS)
    expected = predict(model, tokenizer, SENTENCES)
    for inputs in (iter(SENTENCES), tuple(SENTENCES), np.array(SENTENCES), Dataset.from_dict({"t": SENTENCES})["t"]):
        assert predict(model, tokenizer, inputs) == expected


@pytest.mark.parametrize(
    "inputs",
    [None, 3, {"text": "good"}, {"good"}, ["good", None], ["good", ("a", "b")], [("a", "b", "c")], [["a"]], b"x"],
)
def test_inputs_of_no_known_kind_are_named(inputs, tokenizer):
    with pytest.raises(ValueError, match=f"inputs must be a text, .* got {type(inputs).__name__}"):
        predict(tiny.ensemble("bert"), tokenizer, inputs)


def test_images(tmp_path):
    model = tiny.ensemble("vit", id2label=LABELS)
    processor = ViTImageProcessor(size={"height": tiny.IMAGE_SIZE, "width": tiny.IMAGE_SIZE})
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8))
    image.save(tmp_path / "image.png")
    expected = model(**processor(image, return_tensors="pt")).logits.softmax(-1)[0]
    array = np.asarray(image)
    for inputs in (image, [image], str(tmp_path / "image.png"), tmp_path / "image.png", array, array[None], (array,)):
        (prediction,) = predict(model, processor, inputs)
        np.testing.assert_allclose(list(prediction.probabilities.values()), expected.detach(), rtol=1e-4)


@pytest.mark.parametrize("architecture", ["vit", "clip", "siglip", "dinov2", "swin", "convnext"])
def test_images_of_another_size_than_the_checkpoints(architecture):
    model = tiny.ensemble(architecture, id2label=LABELS)
    larger = ViTImageProcessor(size={"height": 2 * tiny.IMAGE_SIZE, "width": 2 * tiny.IMAGE_SIZE})
    (prediction,) = predict(model, larger, Image.new("RGB", (20, 20), "red"))
    assert sum(prediction.probabilities.values()) == pytest.approx(1)


def test_images_of_other_modes():
    model = tiny.ensemble("vit", id2label=LABELS)
    processor = ViTImageProcessor(size={"height": tiny.IMAGE_SIZE, "width": tiny.IMAGE_SIZE})
    for mode in ("L", "RGBA"):
        assert len(predict(model, processor, [Image.new(mode, (20, 20))] * 2)) == 2


def test_disabled_adapter_is_named(tokenizer):
    model = tiny.ensemble("bert")
    with model.disable_adapter(), pytest.raises(ValueError, match="adapter is disabled"):
        predict(model, tokenizer, SENTENCES)


def test_training_mode_is_restored(tokenizer):
    model = tiny.ensemble("bert").train()
    first, second = (predict(model, tokenizer, SENTENCES) for _ in range(2))
    assert first == second  # no dropout in between
    assert model.training


def test_modes_of_single_modules_are_restored(tokenizer):
    model = tiny.ensemble("bert").train()
    model.get_base_model().bert.eval()
    before = [module.training for module in model.modules()]
    predict(model, tokenizer, SENTENCES)
    assert [module.training for module in model.modules()] == before


def test_text_without_a_token_is_named(tokenizer):
    model = tiny.ensemble("bert", id2label=LABELS)
    for inputs in ("", ["good", ""]):
        with pytest.raises(ValueError, match="makes no token of ''"):
            predict(model, tokenizer, inputs)


def test_images_of_16_bits_are_not_cut_off_at_255():
    processor = ViTImageProcessor(size={"height": tiny.IMAGE_SIZE, "width": tiny.IMAGE_SIZE})
    model = tiny.ensemble("vit", id2label=LABELS)
    grey = np.random.default_rng(0).integers(0, 255, (20, 20), dtype=np.uint8)
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    assert deep.mode.startswith("I;16")
    expected = predict(model, processor, Image.fromarray(grey))
    assert predict(model, processor, deep) == expected
    assert predict(model, processor, grey) == expected  # an array without channels
    with pytest.raises(ValueError, match="mode 'F' does not tell which values are black and white"):
        predict(model, processor, Image.new("F", (20, 20)))


@pytest.mark.parametrize("inputs", [3, [3], [None], {"a": 1}])
def test_what_is_no_image_is_named(inputs):
    model = tiny.ensemble("vit", id2label=LABELS)
    with pytest.raises(ValueError, match="inputs must be an image"):
        predict(model, ViTImageProcessor(), inputs)


def test_long_input_is_cut(tokenizer):
    model = tiny.ensemble("bert", base={"max_position_embeddings": 16})
    assert max_input_length(model.get_base_model(), tokenizer) == 16
    assert len(predict(model, tokenizer, ["good " * 50])) == 1
    roberta = tiny.ensemble("roberta", base={"max_position_embeddings": 16})
    assert max_input_length(roberta.get_base_model(), tokenizer) == 14
    assert len(predict(roberta, tokenizer, ["good " * 50])) == 1


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({}, {"processor": None}, "tokenizer or image processor"),
        ({}, {"batch_size": 0}, "batch_size"),
    ],
)
def test_wrong_use_is_named(fields, arguments, message, tokenizer):
    model = tiny.ensemble("bert", **fields)
    with pytest.raises(ValueError, match=message):
        predict(**{"model": model, "processor": tokenizer, "inputs": SENTENCES, **arguments})


def test_tokens_are_predicted_where_they_stand(tokenizer):
    model = tiny.ensemble("bert-token", id2label=LABELS)
    texts = ["a very  good film", "dull"]
    predictions = predict(model, tokenizer, texts)
    for text, of_text in zip(texts, predictions, strict=True):
        assert [prediction.token for prediction in of_text] == text.split()
        logits = model(**tokenizer(text, return_tensors="pt")).member_logits
        for position, prediction in enumerate(of_text):
            assert text[prediction.start : prediction.end] == prediction.token
            p = logits[0, :, position].softmax(-1).mean(0)
            np.testing.assert_allclose(list(prediction.probabilities.values()), p.detach(), rtol=1e-3, atol=1e-6)
            assert prediction.label == LABELS[p.argmax().item()]
            assert prediction.member_votes == [LABELS[i] for i in logits[0, :, position].argmax(-1).tolist()]


def test_tokenizer_that_cannot_tell_where_tokens_are_is_named():
    slow = SimpleNamespace(is_fast=False)
    with pytest.raises(ValueError, match="where they stand in the text; use a fast tokenizer"):
        predict(tiny.ensemble("bert-token"), slow, SENTENCES)


def test_choices_of_any_number_in_one_call(tokenizer):
    model = tiny.ensemble("bert-choice")
    items = [("a film", ["good", "bad"]), ("very", ["dull", "fine", "good film"]), ("a", ["bad", "fine"])]
    predictions = predict(model, tokenizer, items)
    for (text, choices), prediction in zip(items, predictions, strict=True):
        encoded = tokenizer([text] * len(choices), choices, padding=True, return_tensors="pt")
        logits = model(**{name: tensor[None] for name, tensor in encoded.items()}).member_logits
        p = logits.softmax(-1).mean(1)[0]
        assert list(prediction.probabilities) == choices
        np.testing.assert_allclose(list(prediction.probabilities.values()), p.detach(), rtol=1e-3, atol=1e-6)
        assert prediction.label == choices[p.argmax()]
        assert prediction.modulation_uncertainty == pytest.approx(decompose_uncertainty(logits)[2].item(), abs=1e-5)
    assert predict(model, tokenizer, items[0])[0].label == predictions[0].label


@pytest.mark.parametrize("inputs", ["a text", ("a", "b"), ("a", []), ("a", ["b", "b"]), ("a", ["b", 3]), [("a", "b")]])
def test_what_is_no_choice_is_named(inputs, tokenizer):
    with pytest.raises(ValueError, match="inputs must be a tuple of a text and a list of different choices"):
        predict(tiny.ensemble("bert-choice"), tokenizer, inputs)


def test_labels_that_do_not_exclude_each_other(tokenizer):
    model = tiny.ensemble("bert", id2label=LABELS, problem_type="multi_label_classification")
    predictions = predict(model, tokenizer, SENTENCES)
    for sentence, prediction in zip(SENTENCES, predictions, strict=True):
        logits = model(**tokenizer(sentence, return_tensors="pt")).member_logits[0].detach().double()
        p = logits.sigmoid().mean(0)
        np.testing.assert_allclose(list(prediction.probabilities.values()), p, rtol=1e-3, atol=1e-6)
        assert prediction.labels == [LABELS[i] for i in range(3) if p[i] > 0.5]
        assert prediction.member_votes == [[LABELS[i] for i in range(3) if row[i] > 0] for row in logits]

        def entropy(q):
            return torch.special.entr(q).sum() + torch.special.entr(1 - q).sum()

        expected = torch.stack([entropy(row.sigmoid()) for row in logits]).mean()
        assert prediction.predictive_entropy == pytest.approx(entropy(p).item(), rel=1e-3, abs=1e-4)
        assert prediction.expected_entropy == pytest.approx(expected.item(), rel=1e-3, abs=1e-4)
        assert prediction.modulation_uncertainty == pytest.approx((entropy(p) - expected).item(), abs=1e-3)


def test_numbers_with_their_spread_over_members(tokenizer):
    model = tiny.ensemble("bert", id2label={0: "stars", 1: "length"}, problem_type="regression")
    for sentence, prediction in zip(SENTENCES, predict(model, tokenizer, SENTENCES), strict=True):
        assert isinstance(prediction, RegressionPrediction)
        values = model(**tokenizer(sentence, return_tensors="pt")).member_logits[0].detach().numpy()
        np.testing.assert_allclose(list(prediction.values.values()), values.mean(0), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(list(prediction.standard_deviations.values()), values.std(0), rtol=1e-3, atol=1e-5)
        assert [list(member) for member in prediction.member_values] == [["stars", "length"]] * 4


@pytest.fixture
def reloaded(tmp_path, checkpoint_folder):
    def reload(architecture):
        base = checkpoint_folder(architecture)
        model = tiny.ensemble(architecture, id2label=LABELS, task_type=tiny.task_type(architecture))
        tiny.make_trainable_parts_random(model)
        model.peft_config["default"].base_model_name_or_path = str(base)
        model.save_pretrained(tmp_path / "adapter")
        return load_ensemble(tmp_path / "adapter")

    return reload


def test_text_pipeline_gives_the_ensembles_probabilities(reloaded):
    model, tokenizer = reloaded("bert")
    expected = predict(model, tokenizer, SENTENCES)
    scores = pipeline("text-classification", model=model, tokenizer=tokenizer)(SENTENCES)
    for score, prediction in zip(scores, expected, strict=True):
        assert score["label"] == prediction.label
        assert score["score"] == pytest.approx(prediction.probability, rel=1e-3)


def test_token_pipeline_gives_the_ensembles_probabilities(reloaded):
    model, tokenizer = reloaded("bert-token")
    ((*expected,),) = predict(model, tokenizer, [SENTENCES[0]])
    found = pipeline("token-classification", model=model, tokenizer=tokenizer, ignore_labels=[])(SENTENCES[0])
    assert [entry["word"] for entry in found] == SENTENCES[0].split()
    for entry, prediction in zip(found, expected, strict=True):
        assert entry["entity"] == prediction.label
        assert entry["score"] == pytest.approx(prediction.probability, rel=1e-3)
        assert (entry["start"], entry["end"]) == (prediction.start, prediction.end)


@pytest.mark.parametrize("architecture", ["vit", "convnext", "deit-teacher", "clip"])
def test_image_pipeline_gives_the_ensembles_probabilities(architecture, reloaded):
    model, processor = reloaded(architecture)
    pixels = np.random.default_rng(0).integers(0, 255, (tiny.IMAGE_SIZE, tiny.IMAGE_SIZE, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    (expected,) = predict(model, processor, image)
    scores = pipeline("image-classification", model=model, image_processor=processor)(image)
    assert scores[0]["label"] == expected.label
    for score in scores:
        assert score["score"] == pytest.approx(expected.probabilities[score["label"]], rel=1e-3)
