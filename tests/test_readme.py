import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_continuous_integration_calls_the_readmes_test_command():
    (setup,) = re.findall(r"^python -m venv .*\[dev\].*$", README, re.MULTILINE)
    test_command = setup.split(" && ")[-1]
    assert test_command in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.slow
def test_code_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(code, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "eval_nll" in printed
    assert printed.count("Prediction(label=") == 2
