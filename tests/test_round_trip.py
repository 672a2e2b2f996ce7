"""Every architecture through the file system: made in one fresh process, loaded in another, taken apart in a third."""

import json

import pytest
import tiny
import torch
import transformers
from peft import (
    AutoPeftModel,
    AutoPeftModelForSequenceClassification,
    AutoPeftModelForTokenClassification,
    PeftModel,
    get_peft_model,
)
from safetensors.torch import load_file

import sigma_nens_hf
from sigma_nens_hf import SigmaNormConfig, extract_member

LABELS = {0: "bad", 1: "fair", 2: "good"}
BASES = ("classifier", "encoder")  # a 2-label classifier, and no classifier at all


def make_adapters(folder):
    """Save a base, a 3-label adapter over it, a batch, what comes out, and two plain members, for all architectures."""
    for architecture in tiny.ARCHITECTURES:
        base = tiny.base_model(architecture, num_labels=2)
        base.save_pretrained(folder / architecture / "classifier")
        tiny.encoder_of(base).save_pretrained(folder / architecture / "encoder")
        batch = tiny.inputs(architecture)
        torch.save(batch, folder / architecture / "batch.pt")
        for name in BASES:
            loaded = tiny.model_class(architecture).from_pretrained(folder / architecture / name)
            torch.manual_seed(3)
            labels = tiny.labels_config(architecture, LABELS)
            config = SigmaNormConfig(init_scaler_std=1.0, task_type=tiny.task_type(architecture), **labels)
            model = get_peft_model(loaded, config).eval()
            tiny.make_trainable_parts_random(model)
            model.save_pretrained(folder / architecture / f"{name}-adapter")
            with torch.no_grad():
                torch.save(dict(model(**batch)), folder / architecture / f"{name}-output.pt")
        extract_member(model, 2).save_pretrained(folder / architecture / "extracted")
        model.merge_and_unload(member=1, safe_merge=True).save_pretrained(folder / architecture / "merged")


def load_adapters(folder):
    """Load every adapter in both ways that peft has for it, and save what comes out."""
    for architecture in tiny.ARCHITECTURES:
        batch = torch.load(folder / architecture / "batch.pt")
        for name in BASES:
            for low_cpu_mem_usage in (False, True):
                base = tiny.model_class(architecture).from_pretrained(folder / architecture / name)
                adapter = folder / architecture / f"{name}-adapter"
                model = PeftModel.from_pretrained(base, adapter, low_cpu_mem_usage=low_cpu_mem_usage)
                if architecture not in tiny.CHOICE_ARCHITECTURES:
                    assert model.config.id2label == LABELS, model.config.id2label
                    assert model.config.num_labels == model.get_base_model().num_labels == 3
                with torch.no_grad():
                    output = model(**batch)
                torch.save(dict(output), folder / architecture / f"{name}-loaded-{low_cpu_mem_usage}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run_python):
    folder = tmp_path_factory.mktemp("round_trip")
    call = "import sys, pathlib, test_round_trip\ntest_round_trip.{}(pathlib.Path(sys.argv[1]))"
    run_python(call.format("make_adapters"), folder)
    run_python(call.format("load_adapters"), folder)
    run_python(
        """
        import json, pathlib, sys, transformers
        folder = pathlib.Path(sys.argv[1])
        for path in [*folder.glob("*/extracted"), *folder.glob("*/merged")]:
            text = (path / "config.json").read_text()
            assert "member_logits" not in text and "sigma" not in text
            name = json.loads(text)["architectures"][0]
            if hasattr(transformers, name):
                model = getattr(transformers, name).from_pretrained(path)
            else:  # the class that transformers lacks is in the folder
                model = transformers.AutoModelForImageClassification.from_pretrained(path, trust_remote_code=True)
            batch = torch.load(path.parent / "batch.pt")
            with torch.no_grad():
                torch.save((model(**batch).logits, model.config.id2label), path / "output.pt")
        assert not [name for name in sys.modules if name.startswith("sigma_nens")]
        """,
        folder,
    )
    return folder


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_reload_in_a_fresh_process_is_bit_equal(architecture, base, low_cpu_mem_usage, folder):
    expected = torch.load(folder / architecture / f"{base}-output.pt")
    loaded = torch.load(folder / architecture / f"{base}-loaded-{low_cpu_mem_usage}.pt")
    assert loaded.keys() == expected.keys()
    for name in {"logits", "member_logits", "loss"} & expected.keys():
        assert torch.equal(loaded[name], expected[name]), name


@pytest.mark.parametrize(("form", "member"), [("extracted", 2), ("merged", 1)])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_plain_member_needs_no_package(architecture, form, member, folder):
    expected = torch.load(folder / architecture / "encoder-output.pt")["member_logits"][:, member]
    logits, id2label = torch.load(folder / architecture / form / "output.pt")
    assert tiny.relative_error(logits, expected) < 1e-5
    if architecture not in tiny.CHOICE_ARCHITECTURES:
        assert id2label == LABELS


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_file_pulled_apart_by_hand_holds_the_members_and_nothing_else(architecture, folder):
    adapter = folder / architecture / "encoder-adapter"
    files = {path.name for path in adapter.iterdir()}
    assert files == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    weights = load_file(folder / architecture / "classifier" / "model.safetensors")
    head = sigma_nens_hf.architectures.ARCHITECTURES[tiny.model_class(architecture).__name__]
    assert config["peft_type"] == "SIGMA_NORM"
    assert config["base_model_class"] == tiny.model_class(architecture).__name__
    assert config["target_modules"] is None
    assert config["modules_to_save"] == list(head.before)
    expected = {key: weights[key].shape for key in weights if key.rpartition(".")[0] in head.before}
    for name in head.outputs:
        outputs = 1 if architecture in tiny.CHOICE_ARCHITECTURES else 3
        expected[f"{name}.sigma_norm_head_weight"] = (4, outputs, weights[f"{name}.weight"].shape[1])
        if f"{name}.bias" in weights:
            expected[f"{name}.sigma_norm_head_bias"] = (4, outputs)
    actual = {key.removeprefix("base_model.model."): tuple(tensor.shape) for key, tensor in tensors.items()}
    ends = (".sigma_norm_scaler", ".sigma_norm_scale", ".sigma_norm_bias")
    norms = {key: actual.pop(key) for key in list(actual) if key.endswith(ends)}
    assert actual == {key: tuple(shape) for key, shape in expected.items()}
    for end in ("scaler", "scale"):
        assert sum(key.endswith(end) for key in norms) == config["num_adapted_norms"]
    has_rms_norms = architecture.partition("-")[0] in ("llama", "qwen2", "qwen3", "modernbert")  # without biases
    assert sum(key.endswith("bias") for key in norms) == (0 if has_rms_norms else config["num_adapted_norms"])
    assert all(len(shape) == 2 for shape in norms.values())
    assert all(shape[0] == (1 if key.endswith("scale") else 4) for key, shape in norms.items())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    size = sum(tensor.numel() * 4 for tensor in tensors.values())
    assert size < (adapter / "adapter_model.safetensors").stat().st_size < size + 20_000  # and its table of contents
    print(f"{architecture}: {size} bytes in {len(tensors)} tensors")


@pytest.mark.parametrize("architecture", ["bert", "llama", "bert-token"])
def test_auto_classes_of_peft_find_the_base(architecture, folder, tmp_path):
    """Also the decoder's, whose base knows no padding token: the adapter does."""
    base = tmp_path / "base"
    model = tiny.model_class(architecture).from_pretrained(folder / architecture / "encoder")
    model.config.pad_token_id = None
    model.base_model.save_pretrained(base)
    is_token = architecture in tiny.TOKEN_ARCHITECTURES
    auto = AutoPeftModelForTokenClassification if is_token else AutoPeftModelForSequenceClassification
    adapter = folder / architecture / "encoder-adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(base)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    loaded = auto.from_pretrained(tmp_path)
    expected = torch.load(folder / architecture / "encoder-output.pt")
    with torch.no_grad():
        output = loaded(**torch.load(folder / architecture / "batch.pt"))
    assert torch.equal(output.member_logits, expected["member_logits"])


@pytest.mark.parametrize("architecture", ["vit", "bert-choice", "clip"])
def test_auto_peft_model_finds_the_base_of_tasks_unknown_to_peft(architecture, folder):
    loaded = AutoPeftModel.from_pretrained(folder / architecture / "classifier-adapter")
    expected = torch.load(folder / architecture / "classifier-output.pt")
    with torch.no_grad():
        output = loaded(**torch.load(folder / architecture / "batch.pt"))
    assert torch.equal(output.member_logits, expected["member_logits"])


def test_decoder_without_padding_token_is_named():
    with pytest.raises(ValueError, match=r"names no padding token. Set `model\.config\.pad_token_id`"):
        tiny.ensemble("llama", base={"pad_token_id": None})
    assert transformers.LlamaConfig().pad_token_id is None  # as it is published


@pytest.mark.parametrize("architecture", ["bert", "modernbert", "convnext"])
@torch.no_grad()
def test_bounded_gates_and_a_trained_scale_come_back_and_members_can_be_taken_out(architecture, tmp_path):
    model = tiny.ensemble(architecture, gate_depth=0.4, train_scale=True)
    tiny.make_trainable_parts_random(model)
    batch = tiny.inputs(architecture)
    expected = model(**batch).member_logits
    paper = tiny.ensemble(architecture)(**batch).member_logits
    assert tiny.relative_error(expected, paper) > 1e-2
    for k in (0, 3):
        assert tiny.relative_error(extract_member(model, k)(**batch).logits, expected[:, k]) < 1e-5
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny.base_model(architecture), tmp_path)
    assert torch.equal(loaded(**batch).member_logits, expected)
