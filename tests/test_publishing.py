import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import evaluate_tiny
import numpy as np
import pytest
import tiny
import transformers
from datasets import Dataset
from hub_server import HubServer, skip_waits
from huggingface_hub import ModelCard, ModelCardData
from peft import LoraConfig, PeftModel, get_peft_model
from typer.testing import CliRunner

from sigma_nens_hf import (
    SigmaNEnsTrainer,
    SigmaNEnsTrainingArguments,
    SigmaNormConfig,
    ensemble_from_pretrained,
    load_ensemble,
    predict,
)
from sigma_nens_hf.adapter_info import adapter_infos
from sigma_nens_hf.cli import app
from sigma_nens_hf.publishing import push_adapter, push_model
from sigma_nens_hf.publishing.base import PublishedBase
from sigma_nens_hf.publishing.card_evaluation import public_name, read_evaluation
from sigma_nens_hf.publishing.model_card import MARKER, escaped, model_card

BASE, REPO = "maker/base", "user/repo"
TEXTS = ["a very good film", "dull", "bad film"]
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors", "README.md", ".gitattributes"}
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    evaluate_tiny.save_adapter(folder)
    evaluate_tiny.dataset("bert", 45).to_csv(folder / "texts.csv")
    return folder


@pytest.fixture(scope="module")
def evaluated(saved):
    """The folder of an adapter with its evaluation, and that of a single model."""
    evaluate_tiny.tiny.base_model("bert").save_pretrained(saved / "other")
    options = ["--dataset", saved / "texts.csv", "--resamples", 20, "--batch-size", 16]
    single = tiny.ensemble("bert", num_members=1, id2label=evaluate_tiny.LABELS)
    single.peft_config["default"].base_model_name_or_path = str(saved / "base")
    single.save_pretrained(saved / "single")
    for name in ("adapter", "single"):
        arguments = ["evaluate", saved / name, "--output-dir", saved / f"{name}-evaluation", *options]
        result = CliRunner().invoke(app, [*map(str, arguments)])
        assert result.exit_code == 0, result.output
    return saved


@pytest.fixture
def adapter(saved, tmp_path):
    return Path(shutil.copytree(saved / "adapter", tmp_path / "adapter"))


@pytest.fixture
def hub(saved, tmp_path, monkeypatch):
    with HubServer() as server:
        files = {path.name: path.read_bytes() for path in (saved / "base").iterdir()}
        card = b"---\nlicense: mit\nlanguage: en\n---\nA base model."
        server.base_sha = server.add_repo(BASE, files | {"README.md": card})
        server.use(monkeypatch, tmp_path / "cache")
        yield server


def push(folder, repo=REPO, **kwargs):
    return push_adapter(folder, repo, **({"base_model": BASE} | kwargs))


def card_of(hub, repo=REPO, revision="main"):
    return ModelCard(hub.files(repo, revision)["README.md"].decode())


def test_exactly_what_is_needed_leaves(hub, adapter, saved):
    for name in ("training_args.bin", "optimizer.pt", "model.safetensors", "notes.txt"):
        (adapter / name).write_bytes(b"secret")
    commit = push(adapter)
    files = hub.files(REPO)
    assert files.keys() == ADAPTER_FILES | TOKENIZER_FILES
    assert files["adapter_model.safetensors"] == (saved / "adapter" / "adapter_model.safetensors").read_bytes()
    config = json.loads(files["adapter_config.json"])
    assert (config["base_model_name_or_path"], config["revision"]) == (BASE, hub.base_sha)
    own = json.loads((adapter / "adapter_config.json").read_text())
    changed = {key for key in own if own[key] != config.get(key)}
    assert changed == {"base_model_name_or_path", "revision"}
    assert config.keys() == own.keys()
    assert commit.oid == hub.commits(REPO)[0][0]
    assert [message for _, message in hub.commits(REPO)] == ["Upload a sigma-N-Ens adapter", "initial commit"]
    for name, content in files.items():
        assert not any(str(folder).encode() in content for folder in (saved, adapter.parent)), name


def test_stranger_gets_the_same_logits_bit_for_bit(hub, adapter, saved, tmp_path):
    model, tokenizer = load_ensemble(adapter)
    expected = predict(model, tokenizer, TEXTS)
    logits = model(**tiny.inputs("bert", with_labels=False)).member_logits
    push(adapter)
    np.save(tmp_path / "expected.npy", logits.detach().numpy())
    # With nothing in its cache, nor anything of this machine, and once more without a connection.
    code = """
import sys, json, numpy as np, tiny, transformers, sigma_nens_hf
from peft import AutoPeftModelForSequenceClassification, PeftModel
expected = np.load(sys.argv[1])
model, tokenizer = sigma_nens_hf.load_ensemble("user/repo")
base = transformers.AutoModelForSequenceClassification.from_pretrained("maker/base", num_labels=3)
for loaded in (model, PeftModel.from_pretrained(base, "user/repo").eval()):
    found = loaded(**tiny.inputs("bert", with_labels=False)).member_logits
    assert np.array_equal(found.detach().numpy(), expected)
pipe = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
assert model.config.id2label == {0: "bad", 1: "fair", 2: "good"}
texts = json.loads(sys.argv[2])
print(json.dumps([[p.label, p.probability] for p in sigma_nens_hf.predict(model, tokenizer, texts)]))
print(json.dumps([p["label"] for p in pipe(texts)]))
"""
    environment = {**hub.environment(tmp_path / "empty", token=""), "PYTHONPATH": str(Path(tiny.__file__).parent)}
    environment |= {"PATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(tmp_path / "expected.npy"), json.dumps(TEXTS)]
    for offline in ("0", "1"):
        done = subprocess.run(command, capture_output=True, text=True, env=environment | {"HF_HUB_OFFLINE": offline})
        assert done.returncode == 0, done.stderr
        predicted, piped = map(json.loads, done.stdout.splitlines()[-2:])
        assert [label for label, _ in predicted] == piped == [found.label for found in expected]
        np.testing.assert_allclose([p for _, p in predicted], [found.probability for found in expected], rtol=1e-5)


def test_base_that_has_changed_since_is_refused_but_its_pinned_revision_is_not(hub, adapter):
    push(adapter)
    changed = {name: content for name, content in hub.files(BASE).items() if name != "model.safetensors"}
    other = tiny.base_model("bert", seed=9)
    other.save_pretrained(adapter.parent / "other")
    weights = (adapter.parent / "other" / "model.safetensors").read_bytes()
    newer = hub.add_repo(BASE, changed | {"model.safetensors": weights})
    load_ensemble(REPO)
    config = json.loads(hub.files(REPO)["adapter_config.json"]) | {"revision": newer}
    hub.add_repo("user/moved", hub.files(REPO) | {"adapter_config.json": json.dumps(config).encode()})
    with pytest.raises(ValueError, match="does not have the weights that the adapter was trained over"):
        load_ensemble("user/moved")


def test_what_cannot_be_pulled_is_named(hub, adapter, monkeypatch):
    push(adapter)
    files = hub.files(REPO)
    hub.add_repo("user/gated", files, gated=True)
    hub.add_repo("user/pickle", {name.replace(".safetensors", ".bin"): content for name, content in files.items()})
    monkeypatch.setenv("HF_TOKEN", hub.read_token)
    with pytest.raises(ValueError, match="Access to user/gated on the Hub is restricted"):
        load_ensemble("user/gated")
    with pytest.raises(ValueError, match=r"never adapter_model\.bin"):
        load_ensemble("user/pickle")
    with pytest.raises(ValueError, match="There is no folder user/missing here, and no adapter of that name"):
        load_ensemble("user/missing")
    with pytest.raises(ValueError, match="user/repo on the Hub has no revision 'v9'"):
        load_ensemble(REPO, revision="v9")


def test_local_base_without_an_id_is_refused(hub, adapter):
    with pytest.raises(ValueError, match=r"The base model is the local folder .*--base-model organisation/name"):
        push_adapter(adapter, REPO)
    with pytest.raises(ValueError, match="There is no base model maker/other on the Hub"):
        push(adapter, base_model="maker/other")
    config = json.loads(hub.files(BASE)["config.json"]) | {"model_type": "roberta"}
    hub.add_repo("maker/roberta", {"config.json": json.dumps(config).encode()})
    with pytest.raises(ValueError, match="maker/roberta is of type 'roberta', the adapter is for 'bert'"):
        push(adapter, base_model="maker/roberta")
    assert hub.repo_ids() == [BASE, "maker/roberta"]


@pytest.mark.parametrize("name", ["user/re po", "user/répo", "a/b/c", "user/repo.git", "user/..", "-x"])
def test_name_that_no_repository_can_have(hub, adapter, name):
    with pytest.raises(ValueError, match="is no name for a repository: letters, digits"):
        push(adapter, name)
    assert hub.repo_ids() == [BASE]


def test_damaged_and_missing_adapters_send_nothing(hub, adapter):
    with pytest.raises(ValueError, match="There is no folder"):
        push(adapter / "nothing")
    weights = adapter / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors does not hold the weights"):
        push(adapter)
    weights.write_bytes(content[:-9])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is damaged or cut off"):
        push(adapter)
    assert hub.repo_ids() == [BASE]
    assert not any(method in ("POST", "PUT") for method, _ in hub.requests)


def test_several_adapters_are_pushed_one_by_one(hub, adapter):
    parent = adapter.parent / "several"
    shutil.copytree(adapter, parent / "first")
    shutil.copytree(adapter, parent / "second")
    with pytest.raises(ValueError, match=r"Push one of them: .*first, .*second"):
        push(parent)
    push(parent / "second")
    assert "adapter_model.safetensors" in hub.files(REPO)


@pytest.mark.parametrize("pattern", ["PUT /lfs", "POST .*/info/lfs", "POST .*/preupload", "POST .*/commit/"])
def test_failure_in_mid_upload_leaves_no_half_made_commit_and_can_be_repeated(hub, adapter, pattern, monkeypatch):
    skip_waits(monkeypatch)
    push(adapter)
    before, commits = hub.files(REPO), hub.commits(REPO)
    model, tokenizer = load_ensemble(adapter, is_trainable=True)
    tiny.make_trainable_parts_random(model, seed=1)
    hub.fail_next(pattern, 503, times=6 if "commit" not in pattern else 1)
    with pytest.raises(
        OSError, match=r"The push to user/repo failed\. Push again: a commit is there whole or not at all"
    ):
        push_model(model, REPO, tokenizer, base_model=BASE)
    assert (hub.files(REPO), hub.commits(REPO)) == (before, commits)
    push_model(model, REPO, tokenizer, base_model=BASE)
    assert hub.files(REPO).keys() == before.keys()
    assert hub.files(REPO)["adapter_model.safetensors"] != before["adapter_model.safetensors"]


def test_token_without_rights(hub, adapter):
    push(adapter)
    commits = hub.commits(REPO)
    with pytest.raises(OSError, match="Your token may not do that"):
        push(adapter, token=hub.read_token)
    with pytest.raises(OSError, match="Your token may not do that"):
        push(adapter, "user/other", token=hub.read_token)
    assert hub.commits(REPO) == commits
    assert hub.repo_ids() == [BASE, REPO]


def test_two_pushes_at_once_are_two_whole_commits(hub, adapter, saved):
    push(adapter)
    first, second = push(adapter, commit_message="1", run_as_future=True), None
    with ThreadPoolExecutor() as pool:
        second = pool.submit(push, adapter, license="mit", commit_message="2", tags=["twice"])
    assert {first.result().oid, second.result().oid} <= {sha for sha, _ in hub.commits(REPO)}
    assert hub.files(REPO).keys() == ADAPTER_FILES | TOKENIZER_FILES
    load_ensemble(REPO)


def test_private_revision_pull_request_message_and_short_name(hub, adapter):
    push(adapter, "repo", private=True, commit_message="Mine", commit_description="Because")
    assert hub.is_private(REPO)
    assert hub.commits(REPO)[0][1] == "Mine"
    push(adapter, revision="v2", tags=["second"])
    assert "second" in card_of(hub, revision="v2").data.tags
    assert "second" not in card_of(hub).data.tags
    commit = push(adapter, create_pr=True, tags=["third"])
    assert commit.pr_url.endswith("/discussions/1")
    assert "third" not in card_of(hub).data.tags
    assert load_ensemble(REPO, revision="v2")[0].peft_config["default"].num_members == 3


def test_card_is_as_expected(evaluated):
    folder = evaluated / "adapter"
    info, config = adapter_infos(folder)[0], SigmaNormConfig.from_pretrained(str(folder))
    recipe = {
        "dataset": "sst2", "train_examples": 3_000, "diversity_weight": 0.15, "diversity_temperature": 0.1, "seed": 7,
        "diversity_layers": None,
    }  # fmt: skip
    versions = {"sigma_nens_hf": "0.1.0", "transformers": "5.25.0", "peft": "0.21.2"}
    info = type(info)(**{**vars(info), "training_recipe": recipe, "versions": versions, "sharing": 1.5,
                         "calibration_temperature": 1.25, "labels": ["b*d", "<fair>", "a|b\nc"]})  # fmt: skip
    evaluation = read_evaluation(evaluated / "adapter-evaluation", evaluated / "single-evaluation", 3)
    base = PublishedBase(BASE, "0123456789abcdef", license="mit")
    card = model_card(REPO, info, config, base, evaluation, {"language": "en", "datasets": ["stanfordnlp/sst2"]})
    expected = (Path(__file__).parent / "expected_card.md").read_text(encoding="utf-8")
    # The figures are checked against the evaluation's own below.
    found = re.sub(r"[-+]?\d\.\d{4,}(e-\d+)?", "#", str(card))
    assert found == expected
    report = json.loads((evaluated / "adapter-evaluation" / "metrics.json").read_text())["metrics"]
    assert {r.metric_type: r.metric_value for r in card.data.eval_results} == {n: f["value"] for n, f in report.items()}
    single = json.loads((evaluated / "single-evaluation" / "metrics.json").read_text())["metrics"]
    for name, figures in report.items():
        row = next(line for line in card.text.splitlines() if f"{figures['value']:.4f} |" in line)
        assert f"{figures['value'] - single[name]['value']:+.4f}" in row
        if "noise_floor_95" in figures:
            assert f"| {figures['lower']:.4f} to {figures['upper']:.4f} | {figures['noise_floor_95']:.4f} |" in row


def test_card_is_valid_on_the_hub_and_brings_its_picture(hub, evaluated):
    push(evaluated / "adapter", evaluation=evaluated / "adapter-evaluation", license="apache-2.0", datasets=["a/b"])
    assert hub.files(REPO).keys() == ADAPTER_FILES | TOKENIZER_FILES | {"reliability.png"}
    card = card_of(hub)
    card.validate()
    assert card.data.license == "apache-2.0"
    assert card.data.base_model == BASE
    assert card.data.library_name == "peft"
    assert card.data.pipeline_tag == "text-classification"
    assert card.data.datasets == ["a/b"]
    assert {result.dataset_name for result in card.data.eval_results} == {"texts.csv"}
    assert "![Reliability diagram](reliability.png)" in card.text
    assert str(evaluated) not in str(card)
    push(evaluated / "adapter", evaluation=False)
    assert "reliability.png" not in hub.files(REPO)  # it was of another evaluation
    assert "nothing is known of how good or how calibrated it is" in card_of(hub).text
    with pytest.raises(ValueError, match="is of 1 members, the adapter has 3"):
        push(evaluated / "adapter", evaluation=evaluated / "single-evaluation")
    with pytest.raises(ValueError, match="holds no whole evaluation"):
        push(evaluated / "adapter", evaluation=evaluated / "base")


def test_card_of_the_user_is_kept(hub, adapter):
    push(adapter)
    assert MARKER in card_of(hub).content
    own = "---\nlicense: cc-by-4.0\ntags:\n- mine\n---\n# My own words\n"
    (adapter / "README.md").write_text(own)
    push(adapter)
    card = card_of(hub)
    assert "My own words" in card.text
    assert card.data.license == "cc-by-4.0"
    assert card.data.base_model == BASE
    assert {"mine", "sigma-n-ens"} <= set(card.data.tags)
    (adapter / "README.md").unlink()
    push(adapter, commit_message="Again")  # now it is the one on the Hub
    assert "My own words" in card_of(hub).text


@pytest.mark.parametrize(
    "label", ["a|b", "*x*", "<b>", "[l](u)", "two\nlines", "`c`", "émoji 🎬", "{{ x }}", "---", "{% raw"]
)
def test_labels_with_odd_characters(hub, label, tmp_path):
    model = tiny.ensemble("bert", id2label={0: label, 1: "no", 2: "yes"})
    push_model(model, REPO, tiny.tokenizer(), base_model=BASE)
    card = card_of(hub)
    card.validate()
    row = next(line for line in card.text.splitlines() if line.startswith("| classes"))
    assert row == f"| classes | {escaped(label)}, no, yes |"
    assert len(re.findall(r"(?<!\\)\|", row)) == 3
    assert load_ensemble(REPO)[0].config.id2label[0] == label


def test_paths_of_this_machine_are_left_out_of_processor_files(hub, adapter):
    push(adapter)
    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained(adapter)
    path = adapter / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"name_or_path": "/home/me/x", "nested": {"a": r"C:\Users\me\x", "b": "/"}}))
    push(adapter)
    found = json.loads(hub.files(REPO)["tokenizer_config.json"])
    assert "home" not in json.dumps(found)
    assert "Users" not in json.dumps(found)


def test_peft_model_pushes_itself_and_other_methods_as_ever(hub, saved):
    model, tokenizer = load_ensemble(saved / "adapter")
    commit = model.push_to_hub(REPO, processor=tokenizer, base_model=BASE, commit_message="From the model")
    assert hub.commits(REPO)[0] == (commit.oid, "From the model")
    assert hub.files(REPO).keys() == ADAPTER_FILES | TOKENIZER_FILES
    base = tiny.base_model("bert")
    base.name_or_path = BASE
    lora = get_peft_model(base, LoraConfig(task_type="SEQ_CLS"))
    lora.push_to_hub("user/lora")
    assert "LORA" in hub.files("user/lora")["adapter_config.json"].decode()
    model = PeftModel.from_pretrained(tiny.base_model("bert"), saved / "adapter", adapter_name="named")
    model.push_to_hub("user/named", base_model=BASE)
    assert hub.files("user/named").keys() == ADAPTER_FILES | TOKENIZER_FILES  # those of the base model


def trainer_for(folder, **arguments):
    torch_free = {"report_to": "none", "use_cpu": True, "num_train_epochs": 1, "per_device_train_batch_size": 4}
    model = tiny.ensemble("bert", id2label=evaluate_tiny.LABELS)
    batch = tiny.inputs("bert", 12)
    rows = Dataset.from_dict({name: tensor.tolist() for name, tensor in batch.items()})
    args = SigmaNEnsTrainingArguments(str(folder), **(torch_free | arguments))
    return SigmaNEnsTrainer(
        model=model, args=args, train_dataset=rows, eval_dataset=rows, processing_class=tiny.tokenizer()
    )


def test_trainer_pushes_the_adapter_alone_with_its_last_figures(hub, tmp_path):
    trainer = trainer_for(
        tmp_path / "repo", push_to_hub=True, hub_base_model=BASE, save_strategy="epoch", hub_private_repo=True
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.push_to_hub(language="en", dataset_tags="a/b", finetuned_from="x", tags="mine")
    assert hub.repo_ids() == [BASE, REPO]
    assert hub.is_private(REPO)
    assert hub.files(REPO).keys() == ADAPTER_FILES | TOKENIZER_FILES
    messages = [message for _, message in hub.commits(REPO)]
    assert messages == ["End of training", "Training in progress, epoch 1", "initial commit"]
    card = card_of(hub)
    assert {r.metric_type: r.metric_value for r in card.data.eval_results}["nll"] == metrics["eval_nll"]
    assert (card.data.language, card.data.datasets) == ("en", ["a/b"])
    assert "mine" in card.data.tags
    model, _ = load_ensemble(REPO)
    batch = tiny.inputs("bert", with_labels=False)
    trainer.model.eval()
    assert np.array_equal(model(**batch).logits.detach(), trainer.model(**batch).logits.detach())


def test_trainer_refuses_what_could_not_be_pushed_before_it_trains(hub, tmp_path):
    for strategy in ("checkpoint", "all_checkpoints"):
        with pytest.raises(ValueError, match=f"hub_strategy='{strategy}' would push optimizer states"):
            trainer_for(tmp_path / "repo", push_to_hub=True, hub_base_model=BASE, hub_strategy=strategy)
    with pytest.raises(ValueError, match="does not say what its base model is; name it"):
        trainer_for(tmp_path / "repo", push_to_hub=True)
    assert hub.repo_ids() == [BASE]


def test_trainer_pushes_later_without_having_said_so(hub, tmp_path):
    trainer = trainer_for(tmp_path / "repo", hub_base_model=BASE)
    future = trainer.push_to_hub(blocking=False)
    assert hub.commits(REPO, "main")
    assert future.result().oid == hub.commits(REPO)[0][0]


def test_command_line_pushes_and_says_where(hub, evaluated):
    arguments = ["push", evaluated / "adapter", REPO, "--base-model", BASE, "--license", "mit", "--tag", "x"]
    folders = ["--evaluation", evaluated / "adapter-evaluation", "--single-evaluation", evaluated / "single-evaluation"]
    result = CliRunner().invoke(app, [*map(str, [*arguments, *folders])])
    assert result.exit_code == 0, result.output
    assert f"It is at {hub.url}/{REPO}/commit/" in result.output.replace("\n", "")
    assert "minus single model" in card_of(hub).text
    result = CliRunner().invoke(app, ["push", str(evaluated / "adapter"), REPO])
    assert result.exit_code == 1
    assert "--base-model organisation/name" in " ".join(result.stderr.split())


def test_images_go_with_their_processor(hub, tmp_path):
    evaluate_tiny.save_adapter(tmp_path, "vit")
    files = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    hub.add_repo("maker/vit", files)
    push(tmp_path / "adapter", base_model="maker/vit")
    assert hub.files(REPO).keys() == ADAPTER_FILES | {"preprocessor_config.json"}
    model, processor = load_ensemble(REPO)
    pipe = transformers.pipeline("image-classification", model=model, image_processor=processor)
    picture = evaluate_tiny.dataset("vit", 1)[0]["image"]
    assert pipe(picture)[0]["label"] == predict(model, processor, [picture])[0].label
    assert "image_processor=processor" in card_of(hub).text


def test_metadata_goes_over_what_is_found(saved):
    info, config = adapter_infos(saved / "adapter")[0], SigmaNormConfig.from_pretrained(str(saved / "adapter"))
    base = PublishedBase(BASE, "0" * 40, license="other", license_name="odd", license_link="https://example.org")
    data = model_card(REPO, info, config, base, None, {}).data
    assert (data.license, data.license_name, data.license_link) == ("other", "odd", "https://example.org")
    data = model_card(REPO, info, config, base, None, {"license": "mit"}).data
    assert data.license == "mit"
    assert "license_name" not in data.to_dict()
    assert isinstance(data, ModelCardData)


@pytest.mark.parametrize(("train_scale", "expected"), [(True, 727_000), (False, 650_000)])
def test_size_of_an_adapter_over_bert_base(train_scale, expected, tmp_path):
    """700 KB for 4 members are kept without the trained scale; with it, the default, it is 4% more."""
    config = transformers.BertConfig(num_labels=2, vocab_size=8)  # embeddings are no part of an adapter
    model = get_peft_model(transformers.BertForSequenceClassification(config), SigmaNormConfig(train_scale=train_scale))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size == pytest.approx(expected, rel=0.01)


def test_card_that_peft_began_does_not_bring_its_path_of_the_base(hub, adapter):
    card = (adapter / "README.md").read_text()
    (adapter / "README.md").write_text(card.replace("# Model Card for Model ID", "# Mine"))
    assert str(adapter.parent.parent) in card or "base_model" in card
    push(adapter)
    found = card_of(hub)
    assert "# Mine" in found.text
    assert found.data.base_model == BASE
    assert not [tag for tag in found.data.tags if "/tmp" in tag or tag.startswith("base_model:")]
    push(adapter, revision="v9")  # a new branch begins as the main one
    (adapter / "README.md").unlink()
    push(adapter, revision="v10")
    assert "# Mine" in card_of(hub, revision="v10").text


@pytest.mark.parametrize("head", ["license: [mit", "3: x", "model-index: 5", "- a", "license: [a]"])
def test_card_that_cannot_be_read_is_named_and_nothing_is_made(hub, adapter, head):
    (adapter / "README.md").write_text(f"---\n{head}\n---\n# Mine\n")
    with pytest.raises(ValueError, match=r"README\.md"):
        push(adapter, "user/new")
    (adapter / "README.md").unlink()
    with pytest.raises(ValueError, match="leave out either create_pr or revision"):
        push(adapter, "user/new", create_pr=True, revision="x")
    assert hub.repo_ids() == [BASE]


def test_names_of_classes_that_look_like_paths_stay(hub):
    model = tiny.ensemble("bert", id2label={0: "/m/09x0r", 1: "/m/0k4j", 2: "other"})
    push_model(model, REPO, tiny.tokenizer(), base_model=BASE)
    assert load_ensemble(REPO)[0].config.id2label == {0: "/m/09x0r", 1: "/m/0k4j", 2: "other"}


def test_base_of_the_hub_is_pinned_to_the_commit_that_was_loaded(hub, tmp_path):
    model, tokenizer = ensemble_from_pretrained(BASE, "text-classification", 2, num_labels=3, head_init="fresh")
    assert model.peft_config["default"].revision == hub.base_sha
    hub.add_repo(BASE, {**hub.files(BASE), "model.safetensors": b"other"})
    model.push_to_hub(REPO, processor=tokenizer)
    assert json.loads(hub.files(REPO)["adapter_config.json"])["revision"] == hub.base_sha
    load_ensemble(REPO)


def test_figures_are_those_of_the_weights_that_are_pushed(hub, tmp_path):
    trainer = trainer_for(
        tmp_path / "repo", hub_base_model=BASE, eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_nll", greater_is_better=False,
        learning_rate=0.1,
    )  # fmt: skip
    trainer.train()
    trainer.push_to_hub()
    pushed = {r.metric_type: r.metric_value for r in card_of(hub).data.eval_results}
    assert pushed["nll"] == pytest.approx(trainer.state.best_metric)
    assert pushed["nll"] == pytest.approx(trainer.evaluate()["eval_nll"], rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_members": None}, "holds no whole evaluation"),
        ({"resamples": None}, "holds no whole evaluation"),
        ({"dataset": None}, "holds no whole evaluation"),
    ],
)
def test_damaged_evaluations_are_named(evaluated, tmp_path, change, message):
    folder = Path(shutil.copytree(evaluated / "adapter-evaluation", tmp_path / "evaluation"))
    report = json.loads((folder / "metrics.json").read_text())
    (folder / "metrics.json").write_text(json.dumps(report | change))
    with pytest.raises(ValueError, match=message):
        read_evaluation(folder, None, 3)
    (folder / "metrics.json").write_text(json.dumps(report))
    for content, why in (("", "is damaged"), ("example,label\n0,a\n", "lacks the columns")):
        (folder / "examples.csv").write_text(content)
        with pytest.raises(ValueError, match=why):
            read_evaluation(folder, evaluated / "single-evaluation", 3)


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("stanfordnlp/sst2", "stanfordnlp/sst2"),
        ("private/secret customers/x.parquet", "x.parquet"),
        ("~/secret/data", "data"),
        (r"C:\Users\me\x.csv", "x.csv"),
        ("/home/me/data", "data"),
        (None, None),
    ],
)
def test_dataset_is_named_without_its_path(dataset, name):
    assert public_name(dataset) == name


def test_regression_is_described_as_such(hub):
    push_model(tiny.ensemble("bert", num_labels=1, problem_type="regression"), REPO, tiny.tokenizer(), base_model=BASE)
    text = card_of(hub).text
    assert "mean of their outputs" in text
    assert "For regression as in" in text
    assert "of\n1 label." in text
