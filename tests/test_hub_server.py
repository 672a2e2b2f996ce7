import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import huggingface_hub
import pytest
import tiny
import transformers
from hub_server import HubServer, skip_waits
from huggingface_hub import CommitOperationDelete, HfApi, ModelCard, errors, hf_hub_download, snapshot_download

REPO = "user/repo"
FILES = {"config.json": b'{"a": 1}', "model.safetensors": bytes(range(256)) * 40}


@pytest.fixture
def server():
    with HubServer() as server:
        yield server


@pytest.fixture
def api(server, monkeypatch, tmp_path):
    server.use(monkeypatch, tmp_path / "cache")
    return HfApi()


@pytest.fixture
def folder(tmp_path):
    def write(files=FILES, name="folder"):
        for path, content in files.items():
            target = tmp_path / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return tmp_path / name

    return write


@pytest.fixture
def repo(api, folder):
    api.create_repo(REPO)
    api.upload_folder(repo_id=REPO, folder_path=folder(), commit_message="First")
    return REPO


def read(path):
    with open(path, "rb") as file:
        return file.read()


def test_repositories_are_created_public_private_and_only_once(server, api):
    url = api.create_repo(REPO)
    assert (url, url.repo_id) == (f"{server.url}/{REPO}", REPO)
    api.create_repo("user/secret", private=True)
    assert api.create_repo("user/secret", exist_ok=True).repo_id == "user/secret"
    with pytest.raises(errors.HfHubHTTPError) as error:
        api.create_repo(REPO)
    assert error.value.response.status_code == 409
    assert server.repo_ids() == [REPO, "user/secret"]
    assert [server.is_private(repo_id) for repo_id in server.repo_ids()] == [False, True]
    assert api.model_info("user/secret").private
    assert [message for _, message in server.commits(REPO)] == ["initial commit"]


def test_an_uploaded_folder_is_downloaded_unchanged(server, api, repo):
    for name, content in FILES.items():
        assert read(hf_hub_download(repo, name)) == content
        assert server.files(repo)[name] == content
    assert sorted(api.list_repo_files(repo)) == [".gitattributes", *sorted(FILES)]
    uploads = [path for method, path in server.requests if method == "PUT"]
    assert len(uploads) == 1
    assert uploads[0].startswith(f"/lfs/{repo}/")
    assert not any("xet" in path for _, path in server.requests)


def test_a_snapshot_has_all_files_in_their_folders(api, folder):
    files = {**FILES, "adapters/one.safetensors": b"one", "adapters/deep/notes.txt": b"notes"}
    api.create_repo(REPO)
    api.upload_folder(repo_id=REPO, folder_path=folder(files))
    snapshot = snapshot_download(REPO)
    assert {name: read(os.path.join(snapshot, name)) for name in files} == files
    names = [entry.path for entry in api.list_repo_tree(REPO, "adapters")]
    assert sorted(names) == ["adapters/deep", "adapters/one.safetensors"]
    with pytest.raises(errors.EntryNotFoundError):
        list(api.list_repo_tree(REPO, "nothing"))


def test_an_old_commit_is_still_there_after_a_new_one(server, api, repo):
    (old, _), *_ = server.commits(repo)
    api.upload_file(repo_id=repo, path_in_repo="config.json", path_or_fileobj=b"{}", commit_message="Second")
    assert [message for _, message in server.commits(repo)] == ["Second", "First", "initial commit"]
    assert [commit.commit_id for commit in api.list_repo_commits(repo)] == [sha for sha, _ in server.commits(repo)]
    assert read(hf_hub_download(repo, "config.json", revision=old)) == FILES["config.json"]
    assert read(hf_hub_download(repo, "config.json")) == b"{}"
    assert server.files(repo, old)["config.json"] == FILES["config.json"]


def test_an_unchanged_folder_makes_no_commit(server, api, repo, folder):
    before = server.commits(repo)
    info = api.upload_folder(repo_id=repo, folder_path=folder())
    assert info.oid == before[0][0]
    assert server.commits(repo) == before


def test_files_are_deleted_and_a_missing_one_is_an_error(server, api, repo):
    api.create_commit(repo, [CommitOperationDelete("config.json")], commit_message="Delete")
    assert "config.json" not in server.files(repo)
    with pytest.raises(errors.EntryNotFoundError):
        api.create_commit(repo, [CommitOperationDelete("config.json")], commit_message="Delete")


def test_a_pull_request_leaves_the_main_branch_alone(server, api, repo):
    before = server.commits(repo)
    info = api.upload_file(repo_id=repo, path_in_repo="new.txt", path_or_fileobj=b"new", create_pr=True)
    assert (info.pr_revision, info.pr_num) == ("refs/pr/1", 1)
    assert server.commits(repo) == before
    assert read(hf_hub_download(repo, "new.txt", revision="refs/pr/1")) == b"new"
    api.upload_file(repo_id=repo, path_in_repo="more.txt", path_or_fileobj=b"more", revision="refs/pr/1")
    assert {"new.txt", "more.txt"} < server.files(repo, "refs/pr/1").keys()
    refs = api.list_repo_refs(repo, include_pull_requests=True)
    assert [[ref.name for ref in found] for found in (refs.branches, refs.pull_requests)] == [["main"], ["refs/pr/1"]]


def test_a_branch_is_made_once_and_takes_commits(server, api, repo):
    api.create_branch(repo, branch="trial/one")
    api.create_branch(repo, branch="trial/one", exist_ok=True)
    with pytest.raises(errors.HfHubHTTPError, match="409"):
        api.create_branch(repo, branch="trial/one")
    api.upload_file(repo_id=repo, path_in_repo="new.txt", path_or_fileobj=b"new", revision="trial/one")
    assert "new.txt" in server.files(repo, "trial/one")
    assert "new.txt" not in server.files(repo)


def test_model_info_has_the_files_and_what_the_card_says(server, api, repo):
    card = ModelCard("---\nlibrary_name: peft\nlicense: mit\ntags:\n- ensemble\n---\n# A model\n")
    card.validate()
    api.upload_file(repo_id=repo, path_in_repo="README.md", path_or_fileobj=str(card).encode())
    info = api.model_info(repo, expand=["siblings", "cardData"])
    assert [sibling.rfilename for sibling in info.siblings] == [".gitattributes", "README.md", *sorted(FILES)]
    assert (info.id, info.sha, info.private, info.gated) == (repo, server.commits(repo)[0][0], False, False)
    assert (info.library_name, info.tags) == ("peft", ["peft", "ensemble"])
    assert info.card_data.license == "mit"
    assert len(api.model_info(repo, revision=server.commits(repo)[-1][0]).siblings) == 1


@pytest.mark.parametrize("front_matter", ["tags: [a", "- a\n- b", "license: [mit]", "tags: ensemble"])
def test_a_card_with_broken_front_matter_is_refused_before_anything_is_sent(server, api, repo, folder, front_matter):
    card = f"---\n{front_matter}\n---\n# A model\n"
    before = server.commits(repo)
    with pytest.raises(ValueError, match=r"Invalid metadata in README\.md"):
        api.upload_folder(repo_id=repo, folder_path=folder({"README.md": card.encode()}))
    assert server.commits(repo) == before
    assert server.requests[-1] == ("POST", "/api/validate-yaml")


def test_a_card_without_front_matter_is_warned_about(api, repo):
    with pytest.warns(UserWarning, match="empty or missing yaml metadata"):
        api.upload_file(repo_id=repo, path_in_repo="README.md", path_or_fileobj=b"# A model\n")


def test_the_token_is_known(server, api):
    assert (api.whoami()["name"], api.whoami(server.read_token)["name"]) == ("user", "user")
    with pytest.raises(errors.HfHubHTTPError, match="Invalid user token"):
        api.whoami("hf_wrong")


def test_a_private_repository_does_not_exist_without_a_token(server, api):
    server.add_repo(REPO, FILES, private=True)
    for call in (api.model_info, api.list_repo_files, api.auth_check, lambda *a, **k: hf_hub_download(*a, "x", **k)):
        with pytest.raises(errors.RepositoryNotFoundError) as error:
            call(REPO, token=False)
        assert error.value.response.status_code == 401
    assert read(hf_hub_download(REPO, "config.json", token=server.read_token)) == FILES["config.json"]


def test_a_token_that_may_only_read_is_forbidden_to_write(server, api, repo, folder):
    before = server.commits(repo)
    reader = HfApi(token=server.read_token)
    for call in (
        lambda: reader.create_repo("user/new"),
        lambda: reader.create_branch(repo, branch="new"),
        lambda: reader.upload_folder(repo_id=repo, folder_path=folder({"new.txt": b"new"})),
        lambda: reader.auth_check(repo, write=True),
    ):
        with pytest.raises(errors.HfHubHTTPError) as error:
            call()
        assert error.value.response.status_code == 403
    assert (server.commits(repo), server.repo_ids()) == (before, [repo])


def test_what_is_missing_raises_the_errors_of_the_client(api, repo):
    for missing in ("user/nothing", "nothing"):
        with pytest.raises(errors.RepositoryNotFoundError):
            hf_hub_download(missing, "config.json")
        with pytest.raises(errors.RepositoryNotFoundError):
            api.model_info(missing)
    with pytest.raises(errors.RevisionNotFoundError):
        hf_hub_download(repo, "config.json", revision="nothing")
    with pytest.raises(errors.RevisionNotFoundError):
        api.upload_file(repo_id=repo, path_in_repo="new.txt", path_or_fileobj=b"new", revision="nothing")
    with pytest.raises(errors.EntryNotFoundError):
        hf_hub_download(repo, "nothing.json")
    assert [api.file_exists(repo, name) for name in ("config.json", "nothing.json")] == [True, False]


def test_a_gated_repository_shows_its_files_but_not_their_content(server, api):
    server.add_repo(REPO, FILES, gated=True)
    assert api.model_info(REPO, token=False).gated
    for token, status in ((False, 401), (server.read_token, 403)):
        with pytest.raises(errors.GatedRepoError) as error:
            hf_hub_download(REPO, "config.json", token=token)
        assert error.value.response.status_code == status
    assert read(hf_hub_download(REPO, "config.json")) == FILES["config.json"]


def test_a_failed_upload_leaves_no_commit_and_succeeds_when_repeated(server, api, folder, monkeypatch):
    waits = skip_waits(monkeypatch)
    api.create_repo(REPO)
    before = server.commits(REPO)
    server.fail_next("^PUT /lfs/", times=6)
    with pytest.raises(RuntimeError, match=r"Error while uploading 'model\.safetensors'") as error:
        api.upload_folder(repo_id=REPO, folder_path=folder())
    assert error.value.__cause__.response.status_code == 500
    assert waits == [1, 2, 4, 8, 8]
    assert server.commits(REPO) == before
    api.upload_folder(repo_id=REPO, folder_path=folder())
    assert len(server.commits(REPO)) == 2
    assert read(hf_hub_download(REPO, "model.safetensors")) == FILES["model.safetensors"]


def test_the_client_gets_over_a_few_failures_but_not_over_endless_ones(server, api, folder, monkeypatch):
    skip_waits(monkeypatch)
    api.create_repo(REPO)
    server.fail_next("^PUT /lfs/", status=503, times=2)
    api.upload_folder(repo_id=REPO, folder_path=folder())
    server.fail_next("POST .*/commit/", times=-1)
    for _ in range(2):
        with pytest.raises(errors.HfHubHTTPError, match="500"):
            api.upload_file(repo_id=REPO, path_in_repo="new.txt", path_or_fileobj=b"new")
    assert len(server.commits(REPO)) == 2


def test_a_download_that_broke_off_is_resumed(server, api, repo, monkeypatch):
    waits = skip_waits(monkeypatch)
    server.drop_next(r"^GET .*/resolve/.*safetensors")
    assert read(hf_hub_download(repo, "model.safetensors")) == FILES["model.safetensors"]
    assert waits == [1]
    assert [method for method, path in server.requests if "resolve" in path] == ["HEAD", "GET", "GET"]


def test_a_commit_whose_answer_is_lost_has_happened(server, api, repo):
    server.drop_next("/commit/main")
    with pytest.raises(Exception, match="peer closed connection"):
        api.upload_file(repo_id=repo, path_in_repo="new.txt", path_or_fileobj=b"new", commit_message="Lost")
    assert server.commits(repo)[0][1] == "Lost"


def test_a_dropped_question_about_a_file_is_asked_again(server, api, repo, monkeypatch):
    skip_waits(monkeypatch)
    server.drop_next("^HEAD")
    with pytest.raises(Exception, match="disconnected"):
        hf_hub_download(repo, "config.json")
    assert read(hf_hub_download(repo, "config.json")) == FILES["config.json"]


def test_a_stale_parent_is_refused_and_no_parent_is_taken(server, api, repo):
    (old, _), *_ = server.commits(repo)
    api.upload_file(repo_id=repo, path_in_repo="one.txt", path_or_fileobj=b"1", parent_commit=old)
    with pytest.raises(errors.HfHubHTTPError) as error:
        api.upload_file(repo_id=repo, path_in_repo="two.txt", path_or_fileobj=b"2", parent_commit=old)
    assert error.value.response.status_code == 412
    assert "two.txt" not in server.files(repo)
    api.upload_file(repo_id=repo, path_in_repo="two.txt", path_or_fileobj=b"2")
    assert {"one.txt", "two.txt"} < server.files(repo).keys()


def test_uploads_at_once_all_land(server, api, folder):
    api.create_repo(REPO)
    folders = [folder({f"{i}.txt": b"text", f"{i}.safetensors": bytes([i] * 1000)}, str(i)) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        infos = list(pool.map(lambda path: api.upload_folder(repo_id=REPO, folder_path=path), folders))
    assert len(server.files(REPO)) == 1 + 2 * len(folders)
    assert {info.oid for info in infos} == {sha for sha, _ in server.commits(REPO)[:-1]}
    assert len(server.commits(REPO)) == 1 + len(folders)


def test_a_repository_is_published_without_the_client(server, api):
    first = server.add_repo(REPO, FILES)
    second = server.add_repo(REPO, {"other.txt": b"other"})
    assert server.files(REPO) == {"other.txt": b"other"}
    assert [sha for sha, _ in server.commits(REPO)] == [second, first]
    assert read(hf_hub_download(REPO, "model.safetensors", revision=first)) == FILES["model.safetensors"]


def test_transformers_loads_from_it_and_pushes_to_it(server, api, tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    server.add_repo("user/words", {path.name: path.read_bytes() for path in (tmp_path / "tokenizer").iterdir()})
    loaded = transformers.AutoTokenizer.from_pretrained("user/words")
    assert loaded.get_vocab() == tokenizer.get_vocab()
    loaded.push_to_hub("user/copy", private=True)
    assert server.is_private("user/copy")
    assert transformers.AutoTokenizer.from_pretrained("user/copy").get_vocab() == tokenizer.get_vocab()
    with pytest.raises(OSError, match="not a valid model identifier"):
        transformers.AutoTokenizer.from_pretrained("user/nothing")


def test_the_process_is_as_before_once_the_patches_are_undone(server, tmp_path, monkeypatch):
    constants = huggingface_hub.constants
    before = {name: value for name, value in vars(constants).items() if name.isupper()}
    with monkeypatch.context() as patches:
        server.use(patches, tmp_path, token="")
        assert huggingface_hub.get_token() is None
        assert huggingface_hub.model_info.__self__.endpoint == constants.ENDPOINT == server.url
    assert {name: value for name, value in vars(constants).items() if name.isupper()} == before
    assert constants.HF_HUB_OFFLINE
    with pytest.raises(errors.OfflineModeIsEnabled):
        huggingface_hub.model_info(REPO)


def test_a_closed_server_is_gone_and_the_cache_remains(monkeypatch, tmp_path):
    with HubServer() as server:
        server.use(monkeypatch, tmp_path)
        server.add_repo(REPO, FILES)
        path = hf_hub_download(REPO, "config.json")
    skip_waits(monkeypatch)
    assert hf_hub_download(REPO, "config.json") == path
    with pytest.raises(errors.LocalEntryNotFoundError):
        hf_hub_download(REPO, "model.safetensors")


def test_a_fresh_process_uses_it_by_its_environment(server, tmp_path):
    code = """
        import json, sys
        from huggingface_hub import create_repo, hf_hub_download, upload_file
        create_repo("user/repo")
        upload_file(repo_id="user/repo", path_in_repo="a.safetensors", path_or_fileobj=b"abc")
        print(json.dumps(hf_hub_download("user/repo", "a.safetensors")))
    """
    command = [sys.executable, "-c", re.sub("^ +", "", code, flags=re.MULTILINE)]
    environment = {**os.environ, **server.environment(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).startswith(str(tmp_path / "cache" / "hub"))
    assert server.files(REPO)["a.safetensors"] == b"abc"


def test_a_route_that_is_not_there_says_so(api, repo):
    with pytest.raises(errors.HfHubHTTPError, match="has no GET /api/models/user/repo/discussions"):
        list(api.get_repo_discussions(repo))
