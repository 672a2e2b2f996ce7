import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset
from PIL import Image
from transformers import ViTImageProcessor, pipeline

from sigma_nens_hf import decompose_uncertainty, predict
from sigma_nens_hf.prediction import max_input_length

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
        ({"problem_type": "regression"}, {}, "single-label classification, this model is for regression"),
        ({}, {"processor": None}, "tokenizer or image processor"),
        ({}, {"batch_size": 0}, "batch_size"),
    ],
)
def test_wrong_use_is_named(fields, arguments, message, tokenizer):
    model = tiny.ensemble("bert", **fields)
    with pytest.raises(ValueError, match=message):
        predict(**{"model": model, "processor": tokenizer, "inputs": SENTENCES, **arguments})


def test_pipeline_gives_the_ensembles_probabilities(tokenizer):
    model = tiny.ensemble("bert", id2label=LABELS)
    expected = predict(model, tokenizer, SENTENCES)
    scores = pipeline("text-classification", model=model, tokenizer=tokenizer)(SENTENCES)
    for score, prediction in zip(scores, expected, strict=True):
        assert score["label"] == prediction.label
        assert score["score"] == pytest.approx(prediction.probability, rel=1e-3)
