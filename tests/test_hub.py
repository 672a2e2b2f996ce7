import json

import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import BeitModel, DINOv3ConvNextConfig, DINOv3ConvNextModel, PreTrainedTokenizerFast

from sigma_nens_hf import MemberHead, ensemble_from_pretrained, load_ensemble, predict
from sigma_nens_hf.members import base_model_of

LABELS = {0: "bad", 1: "fair", 2: "good"}


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_train_save_reload_predict(architecture, checkpoint_folder, tokenizer, tmp_path):
    folder = checkpoint_folder(architecture, encoder_only=True)
    model, processor = ensemble_from_pretrained(
        folder,
        tiny.task(architecture),
        num_members=3,
        init_scaler_std=1.0,
        **tiny.labels_config(architecture, LABELS),
    )
    assert isinstance(model, PeftModel)
    tiny.make_trainable_parts_random(model)
    model.save_pretrained(tmp_path / "adapter")
    image = Image.new("RGB", (20, 20), "red")
    inputs = [image, image] if architecture in tiny.IMAGE_ARCHITECTURES else ["a good film", "very dull"]
    if architecture in tiny.CHOICE_ARCHITECTURES:
        inputs = [(text, ["good", "bad"]) for text in inputs]
    loaded, loaded_processor = load_ensemble(tmp_path / "adapter")
    assert type(loaded_processor) is type(processor)
    if architecture.startswith("qwen2"):  # transformers makes another tokenizer of the file, which knows no words
        processor = loaded_processor = tokenizer
    expected = predict(model, processor, inputs)
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    assert predict(loaded, loaded_processor, inputs) == expected
    trainable, _ = load_ensemble(tmp_path / "adapter", is_trainable=True)
    assert {n for n, p in trainable.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@torch.no_grad()
def test_classifier_of_the_checkpoint_is_copied_into_every_member(architecture, checkpoint_folder):
    folder = checkpoint_folder(architecture)
    model, _ = ensemble_from_pretrained(folder, tiny.task(architecture), init_scaler_std=0.0)
    batch = tiny.inputs(architecture)
    expected = tiny.base_model(architecture)(**batch).logits
    for member in model(**batch).member_logits.unbind(1):
        assert tiny.relative_error(member, expected) < 1e-5
    assert model.peft_config["default"].head_init == "copy"
    assert model.peft_config["default"].shared_modules == []


def test_what_the_checkpoint_does_not_bring_is_trained(checkpoint_folder, tmp_path):
    bert = tiny.base_model("bert").bert
    bert.pooler = None
    bert.save_pretrained(tmp_path / "without_pooler")
    model, processor = ensemble_from_pretrained(tmp_path / "without_pooler", "text-classification", num_labels=2)
    assert processor is None
    assert model.peft_config["default"].shared_modules == ["bert.pooler.dense"]
    assert model.peft_config["default"].head_init == "fresh"
    model.save_pretrained(tmp_path / "adapter")
    batch = tiny.inputs("bert", num_labels=2)
    loaded, _ = load_ensemble(tmp_path / "adapter")
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    with_pooler, _ = ensemble_from_pretrained(
        checkpoint_folder("bert", encoder_only=True), "text-classification", num_labels=2
    )
    assert with_pooler.peft_config["default"].shared_modules == []  # it came with the checkpoint


def test_absent_norm_of_a_pooler_becomes_the_members(tmp_path):
    """A BEiT that was only pretrained has no pooler, whose norm is the last before the classifier."""
    BeitModel(tiny.base_model("beit").config, add_pooling_layer=False).save_pretrained(tmp_path / "pretrained")
    model, _ = ensemble_from_pretrained(tmp_path / "pretrained", "image-classification", id2label=LABELS)
    config = model.peft_config["default"]
    assert config.shared_modules == []
    assert config.num_adapted_norms == 5
    tiny.make_trainable_parts_random(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded, _ = load_ensemble(tmp_path / "adapter")
    batch = tiny.inputs("beit")
    assert torch.equal(loaded(**batch).logits, model.eval()(**batch).logits)


def test_decoder_without_padding_token_gets_one_that_its_adapter_keeps(tmp_path, tokenizer):
    """As GPT-2, Llama and Qwen are published: neither model nor tokenizer can pad, both know an end of text."""
    base = tiny.base_model("llama", pad_token_id=None)
    base.model.save_pretrained(tmp_path / "base")
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    without_padding = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="[SEP]", unk_token="[UNK]", model_max_length=32
    )
    without_padding.save_pretrained(tmp_path / "base")
    model, processor = ensemble_from_pretrained(tmp_path / "base", "text-classification", id2label=LABELS)
    assert processor.pad_token == "[SEP]"
    assert model.peft_config["default"].pad_token_id == processor.eos_token_id
    tiny.make_trainable_parts_random(model)
    texts = ["a good film", "very dull", "bad"]
    expected = predict(model, processor, texts)
    (alone,) = predict(model, processor, texts[1])
    assert alone.probability == pytest.approx(expected[1].probability, rel=1e-4)
    model.save_pretrained(tmp_path / "adapter")
    loaded, loaded_processor = load_ensemble(tmp_path / "adapter")
    assert predict(loaded, loaded_processor, texts) == expected


def test_task_that_transformers_has_no_model_for_is_named(tmp_path):
    DINOv3ConvNextModel(DINOv3ConvNextConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no DINOv3ConvNext model for AutoModelForImageClassification"):
        ensemble_from_pretrained(tmp_path, "image-classification", num_labels=2)


def test_head_of_another_size_is_made_anew(checkpoint_folder):
    model, _ = ensemble_from_pretrained(checkpoint_folder("roberta"), "text-classification", num_labels=5)
    heads = [module for module in model.modules() if isinstance(module, MemberHead)]
    assert heads[0].sigma_norm_head_weight["default"].shape[:2] == (4, 5)
    assert model.peft_config["default"].shared_modules == []  # the dense layer came with the checkpoint
    assert model.peft_config["default"].head_init == "fresh"
    assert not any(p.is_meta or p.isnan().any() for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "summarization"}, "task must be one of"),
        ({"task": "text-classification"}, "brings no classifier .* pass num_labels"),
        ({"task": "text-classification", "num_labels": 2, "num_members": 0}, "num_members"),
        ({"task": "text-classification", "num_labels": 2, "head_init": "copy"}, "brings no classifier .* to copy"),
        ({"task": "text-classification", "num_labels": 2, "modules_to_save": ["nowhere"]}, "no such module"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, checkpoint_folder):
    with pytest.raises(ValueError, match=message):
        ensemble_from_pretrained(checkpoint_folder("bert", encoder_only=True), **arguments)


def test_checkpoint_without_its_backbone_is_refused(checkpoint_folder):
    folder = checkpoint_folder("bert", encoder_only=True)
    file = folder / "model.safetensors"
    tensors = {key: tensor for key, tensor in load_file(file).items() if "encoder.layer.1" not in key}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights of .* backbone.*encoder\.layer\.1"):
        ensemble_from_pretrained(folder, "text-classification", num_labels=2)


@pytest.fixture
def adapter(checkpoint_folder, tmp_path):
    folder = checkpoint_folder("bert", encoder_only=True)
    model, _ = ensemble_from_pretrained(folder, "text-classification", id2label=LABELS)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_adapter_file_cut_in_half_is_named(adapter):
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is damaged or cut off"):
        load_ensemble(adapter)


def test_pickled_weights_are_never_opened(adapter):
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="Only safetensors files are opened"):
        load_ensemble(adapter)


def test_missing_shared_module_is_named(tmp_path, checkpoint_folder):
    folder = checkpoint_folder("roberta", encoder_only=True)
    model, _ = ensemble_from_pretrained(folder, "text-classification", num_labels=2)
    model.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = {key: tensor for key, tensor in load_file(file).items() if "classifier.dense.bias" not in key}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks the weights .*classifier\.dense\.bias"):
        load_ensemble(tmp_path / "adapter")


def test_base_of_another_size_is_refused(adapter, tmp_path):
    tiny.base_model("bert", hidden_size=64).bert.save_pretrained(tmp_path / "larger")
    with pytest.raises(ValueError, match="does not have the weights that the adapter was trained over"):
        load_ensemble(adapter, base_model=str(tmp_path / "larger"))


def test_base_without_the_frozen_part_of_a_copied_head_is_refused(tmp_path, checkpoint_folder):
    model, _ = ensemble_from_pretrained(checkpoint_folder("roberta"), "text-classification")
    assert model.peft_config["default"].head_init == "copy"
    model.save_pretrained(tmp_path / "adapter")
    load_ensemble(tmp_path / "adapter")
    encoder = checkpoint_folder("roberta", encoder_only=True)
    with pytest.raises(ValueError, match=r"lacks \['classifier.dense'\]"):
        load_ensemble(tmp_path / "adapter", base_model=str(encoder))


def test_image_adapter_with_a_task_type_finds_its_base(tmp_path, checkpoint_folder):
    model, _ = ensemble_from_pretrained(checkpoint_folder("vit"), "image-classification", task_type="SEQ_CLS")
    model.save_pretrained(tmp_path / "adapter")
    loaded, _ = load_ensemble(tmp_path / "adapter")
    batch = tiny.inputs("vit")
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


def test_adapter_is_not_taken_for_a_checkpoint(adapter):
    with pytest.raises(ValueError, match="is an adapter, not a checkpoint; load it with `load_ensemble`"):
        ensemble_from_pretrained(adapter, "text-classification")


@pytest.mark.parametrize("content", ["", '{"peft_type": "SIGMA_NORM"', "[]", "{}"])
def test_damaged_config_is_named(content, adapter):
    (adapter / "adapter_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"adapter_config\.json in .* is damaged"):
        load_ensemble(adapter)


def test_adapter_of_a_method_that_peft_does_not_know_is_refused(adapter):
    (adapter / "adapter_config.json").write_text('{"peft_type": "FOO"}')
    with pytest.raises(ValueError, match="holds an adapter of type FOO, not a sigma-norm ensemble"):
        load_ensemble(adapter)


def test_base_that_is_gone_is_named(adapter):
    with pytest.raises(ValueError, match=r"base model /nowhere/at_all cannot be loaded; .* pass base_model"):
        load_ensemble(adapter, base_model="/nowhere/at_all")


def test_base_without_what_the_adapter_relies_on_is_refused(adapter, tmp_path):
    bert = tiny.base_model("bert").bert
    bert.pooler = None
    bert.save_pretrained(tmp_path / "without_pooler")
    with pytest.raises(ValueError, match="trained over another checkpoint"):
        load_ensemble(adapter, base_model=str(tmp_path / "without_pooler"))


def test_folder_without_an_ensemble_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        load_ensemble(tmp_path)
    get_peft_model(tiny.base_model("bert"), LoraConfig(target_modules=["query"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not a sigma-norm ensemble"):
        load_ensemble(tmp_path)


def test_adapter_must_say_what_its_base_is(adapter):
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text())
    folder, config["base_model_name_or_path"] = config["base_model_name_or_path"], None
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="pass base_model"):
        load_ensemble(adapter)
    model, _ = load_ensemble(adapter, base_model=folder)
    assert base_model_of(model).config.id2label == LABELS


def test_class_named_by_a_strangers_file_is_not_looked_up(adapter):
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text())
    config["base_model_class"] = "system"
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="of class system, which is not supported"):
        load_ensemble(adapter)


def test_processor_is_the_adapters_own_if_it_has_one(adapter, tokenizer):
    tokenizer.model_max_length = 7
    tokenizer.save_pretrained(adapter)
    tokenizer.model_max_length = 32
    _, processor = load_ensemble(adapter)
    assert processor.model_max_length == 7


def test_tokenizer_and_decoder_that_pad_differently_are_brought_together(tmp_path, tokenizer):
    base = tiny.base_model("gpt2", pad_token_id=2)
    base.transformer.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model, processor = ensemble_from_pretrained(tmp_path / "base", "text-classification", id2label=LABELS)
    assert model.config.pad_token_id == processor.pad_token_id == tiny.PADDING
    (alone,) = predict(model, processor, "good film")
    together = predict(model, processor, ["good film", "a very very very dull bad film"])
    assert alone.probability == pytest.approx(together[0].probability, rel=1e-4)


def test_classes_in_another_order_are_not_put_on_a_copied_head(tmp_path, tokenizer):
    base = tiny.base_model("bert", id2label={0: "Negative", 1: "Positive"}, num_labels=2)
    base.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has its classes in another order"):
        ensemble_from_pretrained(tmp_path, "text-classification", id2label={0: "positive", 1: "negative"})
    ensemble_from_pretrained(
        tmp_path, "text-classification", id2label={0: "positive", 1: "negative"}, head_init="fresh"
    )
    model, _ = ensemble_from_pretrained(tmp_path, "text-classification", id2label={0: "negative", 1: "positive"})
    assert model.peft_config["default"].head_init == "copy"


def test_electra_without_its_projection(tmp_path):
    base = tiny.base_model("electra-choice", summary_use_proj=False)
    for member_heads in (None, "all", []):
        model = tiny.adapt(tiny.base_model("electra-choice", summary_use_proj=False), member_heads=member_heads)
        assert model(**tiny.inputs("electra-choice")).loss.isfinite()
    base.electra.save_pretrained(tmp_path)
    model, _ = ensemble_from_pretrained(tmp_path, "multiple-choice")
    assert model.peft_config["default"].shared_modules == []
