import copy

import pytest
import tiny
import torch
from datasets import ClassLabel, Dataset
from test_cached_training import cached, cached_trainer, keys_in, late, text_dataset

from sigma_nens_hf import SigmaNormConfig
from sigma_nens_hf.blocks import prefix_modules
from sigma_nens_hf.members import base_model_of
from sigma_nens_hf.staged_training import freeze_prefix


@pytest.fixture
def key_of(tmp_path):
    """The name of the cache of a model and a dataset."""
    numbers = iter(range(100))

    def key_of(model, data=None, collator=None, **arguments):
        folder = tmp_path / str(next(numbers))
        data = text_dataset() if data is None else data
        with cached(cached_trainer(model, folder, data, collator, **arguments)):
            pass
        (key,) = keys_in(folder)
        return key

    return key_of


def images(num_examples=6, seed=1, scale=1.0):
    pixels = tiny.inputs("vit", num_examples, seed=seed)["pixel_values"] * scale
    rows = {"pixel_values": pixels.tolist(), "labels": [i % 3 for i in range(num_examples)]}
    return Dataset.from_dict(rows).with_format("torch")


def changed(model, name):
    with torch.no_grad():
        base_model_of(model).get_parameter(name).view(-1)[0].add_(1e-3)
    return model


def test_weights_below_the_branch_count_and_no_others(key_of):
    key = key_of(late("bert"))
    for name in (
        "bert.embeddings.word_embeddings.weight",
        "bert.embeddings.LayerNorm.weight",
        "bert.encoder.layer.0.attention.self.query.weight",
        "bert.encoder.layer.0.output.LayerNorm.bias",
    ):
        assert key_of(changed(late("bert"), name)) != key, name
    for name in (
        "bert.encoder.layer.1.attention.self.query.weight",
        "bert.encoder.layer.1.output.LayerNorm.base_layer.bias",
        "bert.encoder.layer.1.output.LayerNorm.sigma_norm_scaler.default",
        "classifier.sigma_norm_head_weight.default",
    ):
        assert key_of(changed(late("bert"), name)) == key, name


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["bert", "deberta_v2", "modernbert"])
def test_every_weight_of_the_prefix_counts(architecture, key_of):
    model = late(architecture)
    key = key_of(model)
    names = [f"{name}.{kind}" for name, m in prefix_modules(base_model_of(model), 1).items() for kind, _ in _own(m)]
    assert len(names) > 5
    for name in names:
        assert key_of(changed(copy.deepcopy(model), name)) != key, name


def _own(module):
    return list(module.named_parameters(recurse=False))


def test_tuned_copies_of_the_prefix_count(key_of):
    def tuned(value, init_scaler=0.0):
        model = late("bert", prefix="staged", init_scaler=init_scaler)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "layer.0" in name and "scaler" in name:
                    parameter.fill_(value)
        freeze_prefix(model)
        return model

    key = key_of(tuned(0.3))
    assert key_of(tuned(0.3)) == key
    assert key_of(tuned(0.4)) != key
    assert key_of(tuned(0.3, init_scaler=0.5)) != key


def test_what_members_are_does_not_count(key_of):
    key = key_of(late("bert"))
    torch.manual_seed(9)
    assert key_of(late("bert", num_members=2, init_scaler_std=0.3, member_bias=False)) == key
    assert key_of(late("bert", member_heads="all", num_labels=5)) == key
    assert key_of(late("bert", modules_to_save=["pooler"], id2label={0: "a", 1: "b", 2: "c"})) == key
    assert key_of(late("bert"), seed=7, diversity_temperature=0.4, learning_rate=1.0, member_chunk_size=2) == key
    assert key_of(late("bert"), per_device_train_batch_size=3, per_device_eval_batch_size=2) == key
    model = late("bert")
    tiny.make_trainable_parts_random(model)
    assert key_of(model) == key
    model.add_adapter("other", SigmaNormConfig(branch_layer=1, num_members=3))
    model.set_adapter("other")
    assert key_of(model) == key
    model.add_adapter("everywhere", SigmaNormConfig())
    assert key_of(model) == key
    assert key_of(tiny.adapt(tiny.base_model("vit"), branch_layer=1), images()) == key_of(
        tiny.adapt(tiny.base_model("vit"), branch_layer=1, exclude_modules=["vit.layernorm"]), images()
    )


def test_another_branch_is_another_cache(key_of):
    base = {"num_hidden_layers": 3}
    assert len({key_of(late("bert", block, base)) for block in (1, 2)}) == 2
    assert key_of(late("bert", 1, base)) != key_of(late("bert"))


def test_texts_count_and_their_labels_do_not(key_of):
    key = key_of(late("bert"))
    data = text_dataset()
    other_labels = data.remove_columns("labels").add_column("labels", [0] * len(data)).with_format("torch")
    assert key_of(late("bert"), other_labels) == key
    assert key_of(late("bert"), data.select(range(len(data)))) == key
    assert key_of(late("bert"), data.select([*range(1, len(data)), 0])) != key
    assert key_of(late("bert"), data.select(range(len(data) - 1))) != key
    last = data[len(data) - 2]["input_ids"].tolist()
    rows = data.with_format(None).to_list()
    rows[-2]["input_ids"] = [last[0], 7, *last[2:]]
    assert key_of(late("bert"), Dataset.from_list(rows).with_format("torch")) != key


def test_images_count(key_of):
    key = key_of(late("vit"), images())
    assert key_of(late("vit"), images()) == key
    assert key_of(late("vit"), images(seed=2)) != key
    assert key_of(late("vit"), images(5)) != key
    assert key_of(late("vit"), images(scale=0.9)) != key  # as with another mean or deviation


def test_what_a_collator_makes_of_images_counts(key_of):
    def collate(shift, size=tiny.IMAGE_SIZE, labels=0):
        def collator(examples):
            pixels = torch.stack([example["pixel_values"] for example in examples])[..., :size, :size]
            return {"pixel_values": pixels + shift, "labels": torch.tensor([labels] * len(examples))}

        return collator

    key = key_of(late("convnext"), images(), collate(0))
    assert key_of(late("convnext"), images(), collate(0)) == key
    for other in (collate(0.1), collate(0, size=8), collate(0, labels=1)):  # labels are kept beside the features
        assert key_of(late("convnext"), images(), other) != key


def test_padding_to_the_other_side_counts(key_of):
    key = key_of(late("roberta-token"), text_dataset("roberta-token"))
    assert key_of(late("roberta-token"), text_dataset("roberta-token", padding="left")) != key


@pytest.mark.parametrize("name", ["sigma_nens_hf.prefix_cache_key.__version__", "torch.__version__"])
def test_another_version_is_another_cache(name, key_of, monkeypatch):
    key = key_of(late("bert"))
    monkeypatch.setattr(name, "9.9.9")
    assert key_of(late("bert")) != key


def test_another_version_of_transformers_is_another_cache(key_of, monkeypatch):
    key = key_of(late("bert"))
    monkeypatch.setattr("sigma_nens_hf.prefix_cache_key.transformers.__version__", "9.9.9")
    assert key_of(late("bert")) != key


def test_another_precision_is_another_cache(key_of):
    key = key_of(late("bert"))
    assert key_of(late("bert"), bf16=True) != key
    assert key_of(late("bert", dtype=torch.bfloat16)) not in (key, key_of(late("bert"), bf16=True))


@pytest.mark.slow
def test_config_of_the_backbone_counts_and_names_of_labels_do_not(key_of):
    key = key_of(late("bert"))
    assert key_of(late("bert", base={"hidden_act": "relu"})) != key
    assert key_of(late("bert", base={"layer_norm_eps": 1e-3})) != key
    model = late("bert")
    model.config._name_or_path = "elsewhere"
    assert key_of(model) == key


def test_names_of_classes_in_a_dataset_of_texts_do_not_count(key_of):
    key = key_of(late("bert"))
    named = text_dataset().cast_column("labels", ClassLabel(names=["a", "b", "c"]))
    assert key_of(late("bert"), named) == key


@pytest.mark.slow
def test_another_process_finds_the_same_cache(key_of, run_python, tmp_path):
    code = """
        import sys
        import transformers
        transformers.logging.set_verbosity_error()
        from test_cached_training import cached, cached_trainer, keys_in, late, text_dataset
        from test_prefix_cache_key import images
        for architecture, data in (("bert", text_dataset()), ("vit", images())):
            folder = sys.argv[1] + "/" + architecture
            with cached(cached_trainer(late(architecture), folder, data)):
                pass
            print("key", *keys_in(folder))
        """
    found = [line.split()[1] for line in run_python(code, tmp_path / "process").splitlines() if line[:4] == "key "]
    assert found == [key_of(late("bert")), key_of(late("vit"), images())]


def test_of_trained_copies_the_one_in_use_counts(key_of):
    def copies(active, value=0.5):
        model = late("bert", modules_to_save=["word_embeddings"])
        model.add_adapter("other", SigmaNormConfig(branch_layer=1, modules_to_save=["word_embeddings"]))
        model.set_adapter(active)
        wrapper = base_model_of(model).bert.embeddings.word_embeddings
        with torch.no_grad():
            wrapper.modules_to_save["other"].weight.fill_(value)
        wrapper.requires_grad_(False)
        return model

    key = key_of(copies("default"))
    assert key_of(copies("default", 0.7)) == key
    assert key_of(copies("other")) != key
    assert key_of(copies("other", 0.7)) != key_of(copies("other"))


def test_weights_that_stand_behind_the_blocks_count(key_of):
    data = text_dataset("deberta_v3")
    key = key_of(late("deberta_v3"), data)
    assert key_of(changed(late("deberta_v3"), "deberta.encoder.rel_embeddings.weight"), data) != key
